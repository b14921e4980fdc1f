"""Hostile files, failing storage, kills: no code runs, and outputs appear together or not."""

import io
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit_tests.tools.checkpoint.pp_vpp_files import (
    ITERATION,
    MERGE,
    TRACKER,
    load,
    path_of,
    refused,
    same,
    save,
    tree,
)
from tools.checkpoint.common import publish
from tools.checkpoint.convert_ckpt_pp_vpp import main
from tools.checkpoint.pp_vpp import torch_file

REPOSITORY = Path(__file__).resolve().parents[4]


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize('place', ['args', 'model', 'optimizer', 'rng_state', 'new key'])
def test_hostile_file_runs_nothing(place, pp4, tmp_path, capsys):
    shutil.copytree(pp4, tmp_path / 'SRC')
    state = load(pp4, '00_002')
    bomb = Hostile(tmp_path / 'ran')
    if place in ('model', 'optimizer'):
        state[place]['bomb'] = bomb
    else:
        state[place] = bomb
    save(state, tmp_path / 'SRC', '00_002')
    refused(MERGE, tmp_path, capsys, 'refused class (posix|os).mkdir; pass --trust-checkpoints')
    assert not (tmp_path / 'ran').exists()


def test_hostile_plain_pickle_runs_nothing(pp4, tmp_path, capsys):
    shutil.copytree(pp4, tmp_path / 'SRC')
    path_of(tmp_path / 'SRC', '00_000').write_bytes(pickle.dumps(Hostile(tmp_path / 'ran')))
    refused(MERGE, tmp_path, capsys, 'no zip-based')


def test_trusted_file_loads(pp4, tmp_path):
    shutil.copytree(pp4, tmp_path / 'SRC')
    for stage in range(4):
        state = load(pp4, f'00_00{stage}')
        state['custom'] = Path('/somewhere'), range(3)
        save(state, tmp_path / 'SRC', f'00_00{stage}')
    words = MERGE.replace('SRC', str(tmp_path / 'SRC')).replace('OUT', str(tmp_path / 'OUT'))
    assert main(words.split()) == 1
    assert main([*words.split(), '--trust-checkpoints']) == 0


def sides_command(source, root):
    return [
        'merge',
        '--load-dir',
        str(source),
        '--save-dir-edge',
        str(root / 'edge'),
        '--save-dir-cloud',
        str(root / 'cloud'),
        '--merge-stages',
        '0,3',
        '--merge-cloud-stages',
        '1,2',
    ]


def complete(root):
    """Both outputs with their trackers and nothing else: split gives the source's layers back."""
    return tree(root) == sorted(
        f'{side}{rest}'
        for side in ('cloud', 'edge')
        for rest in (
            '',
            f'/{ITERATION}',
            f'/{ITERATION}/mp_rank_00_000',
            f'/{ITERATION}/mp_rank_00_000/model_optim_rng.pt',
            f'/{TRACKER}',
        )
    )


@pytest.mark.parametrize('failing', [0, 1])
def test_failure_on_one_side_leaves_neither(failing, pp4, tmp_path, capsys, monkeypatch):
    write, calls = torch_file.write, []

    def fail(path, *args):
        calls.append(path)
        if len(calls) == failing + 1:
            path.write_bytes(b'half')
            raise OSError(28, 'No space left on device')
        return write(path, *args)

    monkeypatch.setattr(torch_file, 'write', fail)
    assert main([*sides_command(pp4, tmp_path), '--workers', '1']) == 1
    assert re.fullmatch(
        r'error: .*model_optim_rng.pt: can\'t be written: No space left on device\n',
        capsys.readouterr().err,
    )
    assert tree(tmp_path) == []


def test_full_disk(pp4, tmp_path, capsys, monkeypatch):
    """The writer itself runs into the error, in the middle of ``torch.save``."""

    class FullFile(io.FileIO):
        def write(self, data):
            if self.tell() > 20000:
                raise OSError(28, 'No space left on device')
            return super().write(data[:10000])  # and writes only a part at a time before

    opened = open
    monkeypatch.setattr(
        torch_file,
        'open',
        lambda path, mode, **kw: FullFile(path, 'x') if mode == 'xb' else opened(path, mode, **kw),
        raising=False,
    )
    assert main(sides_command(pp4, tmp_path)) == 1
    assert 'No space left on device' in capsys.readouterr().err
    assert tree(tmp_path) == []


STEPS = [
    'staged',
    'edge written',
    'synced',
    'renamed 1',
    'renamed 2',
    'unmarking',
    'unmarked',
    'tracked 1',
    'tracked 2',
]
COMMITTED = STEPS.index('unmarked')


def stopped_at(name, command, signum):
    """Run a command in a child that gets a signal at a step; its wait status."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            write = torch_file.write

            def step(reached):
                if reached == name:
                    os.kill(os.getpid(), signum)

            def written(path, *args):
                write(path, *args)
                if 'edge' in str(path):
                    step('edge written')

            publish.step, torch_file.write = step, written
            os._exit(main([*command, '--workers', '1']))
        finally:
            os._exit(99)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize('name', STEPS)
def test_killed_run_leaves_both_or_neither(name, pp4, tmp_path, capsys):
    """After SIGKILL at any step a second run ends with both outputs, whole, and both trackers."""
    command = sides_command(pp4, tmp_path)
    assert os.waitstatus_to_exitcode(stopped_at(name, command, signal.SIGKILL)) == -signal.SIGKILL
    found = {side: tmp_path / side / ITERATION for side in ('edge', 'cloud')}
    visible = {side for side, target in found.items() if target.exists()}
    if len(visible) == 1:  # known for what it is, and no source for anything
        assert name == 'renamed 1' and (found['edge'] / publish.UNPUBLISHED).exists()
        source = ['--load-dir', str(tmp_path / 'edge'), '--iteration', '2']
        assert main(['split', *source, '--save-dir', str(tmp_path / 'x')]) == 1
        assert 'marked .unpublished' in capsys.readouterr().err
    trackers = {side for side in found if (tmp_path / side / TRACKER).exists()}
    assert len(trackers) == {'tracked 1': 1, 'tracked 2': 2}.get(name, 0)
    assert not trackers or len(visible) == 2
    again = main(command)
    assert again == (STEPS.index(name) >= STEPS.index('renamed 2'))  # all was in place
    assert complete(tmp_path)
    for side, stages in (('edge', (0, 3)), ('cloud', (1, 2))):
        found = load(tmp_path / side, '00_000')
        for chunk, stage in enumerate(stages):
            assert same(found[f'model{chunk}'], load(pp4, f'00_00{stage}')['model']) == []


@pytest.mark.usefixtures('default_signal_handlers')
@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize('name', STEPS[:COMMITTED])
def test_stopped_run_leaves_nothing(name, signum, pp4, tmp_path):
    status = os.waitstatus_to_exitcode(stopped_at(name, sides_command(pp4, tmp_path), signum))
    if complete(tmp_path):  # the signal came too late to stop the commit
        assert STEPS.index(name) >= STEPS.index('synced')
        return
    assert status == 128 + signum
    assert tree(tmp_path) == []


def test_script_converts_from_anywhere_without_megatron_loaded(pp4, tmp_path):
    """The list of safe classes is core's: the tool itself must have it registered."""
    script = Path(__file__).parents[4] / 'tools/checkpoint/convert_ckpt_pp_vpp.py'
    words = MERGE.replace('SRC', str(pp4)).replace('OUT', str(tmp_path / 'out')).split()
    done = subprocess.run(
        [sys.executable, script, *words], cwd=tmp_path, text=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, '')
    assert same(load(tmp_path / 'out', '00_001')['model1'], load(pp4, '00_003')['model']) == []


def test_output_that_can_not_be_shown(pp4, tmp_path, capsys, monkeypatch):
    """One line; a plan that nobody saw is a failure, an output that is published is none."""
    words = MERGE.replace('SRC', str(pp4)).replace('OUT', str(tmp_path / 'out')).split()
    for dry, code in ((['--dry-run'], 1), ([], 0)):
        with open('/dev/full', 'w') as full:
            monkeypatch.setattr(sys, 'stdout', full)
            assert main([*words, *dry]) == code
        error = capsys.readouterr().err
        assert error == "error: standard output can't be written: No space left on device\n"
    assert (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    'name', ['a b', 'ünï', '-dash', 'new\nline', "quo'te", 'x' * 200, 'link', 'trailing/']
)
def test_odd_directory_names(name, pp4, tmp_path):
    source, output = f'{tmp_path}/{name}', f'{tmp_path}/out/{name}'
    if name == 'link':
        (tmp_path / name).symlink_to(pp4)
    else:
        shutil.copytree(pp4, source)
    assert main(['merge', f'--load-dir={source}', f'--save-dir={output}', '--pipeline-size=2']) == 0
    assert same(load(output, '00_001')['model1'], load(pp4, '00_003')['model']) == []


def test_arguments_that_can_not_work_are_told_before_torch_is_imported(tmp_path):
    script = """
import sys
from tools.checkpoint import convert_ckpt_pp_vpp, weighted_merge
for tool, words in (
    (convert_ckpt_pp_vpp, 'merge --load-dir nowhere --save-dir x --pipeline-size 2'),
    (convert_ckpt_pp_vpp, 'merge --load-dir . --save-dir x'),
    (weighted_merge, '--merge-inputs nowhere:1 --merge-output x'),
    (weighted_merge, '--merge-inputs nowhere --start-checkpoint 1 --end-checkpoint 2 '
                     '--merge-output x'),
):
    assert tool.main(words.split()) == 1
for tool in (convert_ckpt_pp_vpp, weighted_merge):
    try:
        tool.main(['--help'])
    except SystemExit:
        pass
assert 'torch' not in sys.modules and 'megatron.core' not in sys.modules
"""
    environment = {**os.environ, 'PYTHONPATH': str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, '-c', script],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('\n') == 4 and done.stderr.count('nowhere') == 3
