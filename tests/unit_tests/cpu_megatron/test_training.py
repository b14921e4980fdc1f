import math
import os
import select
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.cpu_megatron.recorder import read_log
from tests.cpu_megatron.torchrun import REPOSITORY, torchrun

PRETRAIN = 'tests.cpu_megatron.pretrain'


def _train_save_and_continue(tmp_path, nproc, *arguments):
    """Six iterations in one go, and the last three again from the checkpoint of the third."""
    save = tmp_path / 'checkpoints'
    whole = [*arguments, '--save', str(save), '--save-interval', '3']
    torchrun(nproc, PRETRAIN, *whole, '--cpu-log', str(tmp_path / 'whole'))
    (save / 'latest_checkpointed_iteration.txt').write_text('3')
    dump = tmp_path / 'dump'
    torchrun(
        nproc,
        PRETRAIN,
        *arguments,
        *('--load', str(save), '--cpu-log', str(tmp_path / 'rest'), '--cpu-dump', str(dump)),
    )
    return read_log(tmp_path / 'whole'), read_log(tmp_path / 'rest')


@pytest.mark.parametrize(
    ('nproc', 'arguments'),
    [
        (1, ['hybrid', '--bf16', '--cpu-optimizer', 'fused_adam', '--use-distributed-optimizer']),
        (2, ['gpt', '--expert-model-parallel-size', '2', '--num-experts', '4']),
    ],
    ids=['hybrid', 'moe_ep2'],
)
def test_training_goes_on_from_its_checkpoint(tmp_path, nproc, arguments):
    whole, rest = _train_save_and_continue(tmp_path, nproc, *arguments)
    assert [record['iteration'] for record in whole] == [1, 2, 3, 4, 5, 6]
    assert rest == whole[3:]
    assert abs(whole[0]['lm loss'] - math.log(64)) < 0.1  # fresh weights know nothing
    assert len({record['lm loss'] for record in whole}) == 6
    for rank in range(nproc):
        dump = torch.load(tmp_path / f'dump.{rank}')
        moments = [value for key, value in dump['optimizer'].items() if key.endswith('exp_avg')]
        assert moments and all(moment.abs().sum() > 0 for moment in moments)
        assert dump['model']


def test_a_run_ends_with_the_process_that_started_it(tmp_path):
    pid = tmp_path / 'pid'
    wait = f'import os, time; os.symlink(str(os.getpid()), {str(pid)!r}); time.sleep(3600)'
    run = f"torchrun(1, 'timeit', '-n1', '-r1', {wait!r})"
    code = f'from tests.cpu_megatron.torchrun import torchrun; {run}'
    caller = subprocess.Popen([sys.executable, '-c', code], cwd=REPOSITORY)
    while not pid.is_symlink():
        assert caller.poll() is None
        time.sleep(0.05)
    child = os.pidfd_open(int(pid.readlink().name))
    caller.kill()
    caller.wait()
    ended, _, _ = select.select([child], [], [], 600)  # readable when the process is gone
    if not ended:
        signal.pidfd_send_signal(child, signal.SIGKILL)
    os.close(child)
    assert ended
