import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tests.cpu_megatron as cpu_megatron
from tests.cpu_megatron import fused_adam_convention, warm
from tests.cpu_megatron.torchrun import REPOSITORY, free_port, torchrun

ON_A_GPU = """
import sys
import torch
before = {name: dict(vars(module)) for name, module in {
    'cuda': torch.cuda, 'tensor': torch.Tensor, 'distributed': torch.distributed}.items()}
import tests.cpu_megatron
tests.cpu_megatron.install()
for name, module in {
    'cuda': torch.cuda, 'tensor': torch.Tensor, 'distributed': torch.distributed}.items():
    replaced = [key for key, value in before[name].items() if vars(module).get(key) is not value]
    assert not replaced, replaced
assert torch.zeros(1).type() == 'torch.FloatTensor'
"""

WITHOUT = """
import sys
import tests.cpu_megatron
tests.cpu_megatron.install()
tests.cpu_megatron.install()
assert sum(type(finder).__name__ == 'AfterImport' for finder in sys.meta_path) == 1
assert not any(name.split('.')[0] == 'megatron' for name in sys.modules)
"""


def _python(code, **env):
    return subprocess.run(
        [sys.executable, '-c', code],
        cwd=REPOSITORY,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


def test_torch_is_left_alone_on_a_gpu():
    result = _python(ON_A_GPU, **cpu_megatron.ON_GPU)
    assert result.returncode == 0, result.stderr


def test_installing_twice_is_once_and_imports_no_megatron():
    result = _python(WITHOUT)
    assert result.returncode == 0, result.stderr


def test_devices_are_the_cpu():
    for device in ('cuda', 'cuda:0', 0, torch.device('cuda', 0)):
        assert torch.empty(2, device=device, pin_memory=True).device.type == 'cpu'
        assert torch.ones(2).to(device).device.type == 'cpu'
        assert torch.ones(2).to(device=device, dtype=torch.float64).dtype == torch.float64
    assert torch.ones(2, device='meta').device.type == 'meta'
    assert torch.ones(1).type() == 'torch.cuda.FloatTensor'
    assert torch.ones(1, dtype=torch.bfloat16).type() == 'torch.cuda.BFloat16Tensor'
    assert torch.ones(1).type(torch.float64).dtype == torch.float64


def test_fused_adam_convention_is_adamw():
    make = torch.Generator().manual_seed(11)
    ours, theirs = [], []
    for shape in ((3, 5), (4,)):
        value = torch.randn(shape, generator=make, dtype=torch.float64)
        ours.append(value.clone().requires_grad_())
        theirs.append(value.clone().requires_grad_())
    options = {'lr': 0.1, 'betas': (0.8, 0.95), 'eps': 1e-6, 'weight_decay': 0.2}
    fused = fused_adam_convention.FusedAdam([{'params': ours}, {'params': []}], **options)
    adamw = torch.optim.AdamW(theirs, **options)
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=make, dtype=torch.float64)
            b.grad = a.grad.clone()
        fused.step()
        adamw.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)  # fp64; the two order their products differently
        assert set(fused.state[a]) == {'exp_avg', 'exp_avg_sq'}
    assert fused.param_groups[0]['step'] == 4
    assert 'step' not in fused.param_groups[1]


@pytest.mark.parametrize('launcher', [torchrun, warm.run])
def test_the_end_of_a_failed_run_is_shown(launcher):
    with pytest.raises(AssertionError, match='exited with 2(.|\n)*invalid choice'):
        launcher(1, 'tests.cpu_megatron.pretrain', 'bert')


@pytest.mark.parametrize('launcher', [torchrun, warm.run])
def test_a_run_that_takes_too_long_is_ended(launcher):
    port = free_port()
    with pytest.raises(AssertionError, match='took more than'):
        launcher(1, 'http.server', str(port), timeout=3)
    ends = time.monotonic() + 600
    while True:
        with socket.socket() as client:
            if client.connect_ex(('127.0.0.1', port)):
                return
        assert time.monotonic() < ends


def test_an_adam_that_comes_too_late_is_told():
    with pytest.raises(AssertionError, match='torch_adam already'):
        warm.run(1, 'tests.cpu_megatron.pretrain', 'gpt', '--cpu-optimizer', 'fused_adam')


WAITS_FOR_A_RUN = """
import sys
from tests.cpu_megatron.torchrun import torchrun
torchrun(1, 'sleeper', env={'PYTHONPATH': sys.argv[1]})
"""


def test_a_run_ends_with_the_process_that_waits_for_it(tmp_path):
    started, ended = tmp_path / 'started', tmp_path / 'ended'
    (tmp_path / 'sleeper.py').write_text(
        f'import os, pathlib, time\n'
        f'pathlib.Path({str(tmp_path / "new")!r}).write_text(str(os.getpid()))\n'
        f'os.rename({str(tmp_path / "new")!r}, {str(started)!r})\n'
        f'time.sleep(30)\n'
        f'pathlib.Path({str(ended)!r}).touch()\n'
    )
    waiting = subprocess.Popen([sys.executable, '-c', WAITS_FOR_A_RUN, tmp_path], cwd=REPOSITORY)
    while not started.exists():
        assert waiting.poll() is None
        time.sleep(0.05)
    waiting.kill()
    waiting.wait()
    run = int(started.read_text())
    while is_running(run):
        time.sleep(0.05)
    assert not ended.exists()


def is_running(pid):
    try:
        state = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in 'ZX'  # its new parent may not have asked for it yet
