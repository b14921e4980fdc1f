"""Weighted merge: killed or stopped at any moment, it leaves the old state or the new one."""

import os
import random
import signal
import subprocess

import pytest

from tests.unit_tests.tools.checkpoint.handmade import (
    WEIGHTS,
    assert_same,
    leave_group,
    load_tensors,
    tree,
)
from tools.checkpoint.common import publish
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.merge import accumulate
from tools.checkpoint.weighted_merge import main
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge

RANDOM_KILLS = int(os.environ.get('WEIGHTED_MERGE_KILLS', '50'))
STEPS = [
    'staged',
    'written',
    'completed',
    'synced',
    'renamed 1',
    'unmarked',
    'tracked 1',
]


def forked(action):
    """Run ``action`` in a forked child, quietly; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        leave_group()
        code = action() or 0
    finally:
        os._exit(code)


def merged_into(root, paths):
    merge(paths, WEIGHTS, root, 7, threads=2)


def state_of(root, expected):
    """``old``, ``new``, or a failure: what a user of ``root`` finds."""
    target, tracker = root / 'iter_0000007', root / 'latest_checkpointed_iteration.txt'
    if not target.exists():
        assert tracker.read_text() == '1'
        return 'old'
    assert_same(load_tensors(target), expected)
    assert tracker.read_text() in ('1', '7\n')
    return 'new'


def start_root(tmp_path, name):
    root = tmp_path / name
    root.mkdir()
    (root / 'latest_checkpointed_iteration.txt').write_text('1')
    return root


def check_next_run(root, paths, expected, state):
    """The same run again ends with the new directory and tracker, and nothing beside them."""
    if state == 'old':
        merged_into(root, paths)
    else:
        with pytest.raises(CheckpointError, match='exists'):
            merged_into(root, paths)
    assert state_of(root, expected) == 'new'
    assert (root / 'latest_checkpointed_iteration.txt').read_text() == '7\n'
    assert sorted(os.listdir(root)) == ['iter_0000007', 'latest_checkpointed_iteration.txt']


@pytest.mark.parametrize('victim', STEPS)
def test_sigkill_at_each_named_step(three, expected, tmp_path, victim):
    root = start_root(tmp_path, 'root')
    seen = []

    def action():
        def step(name):
            if name == victim:
                os.kill(os.getpid(), signal.SIGKILL)

        publish.step = step
        merged_into(root, three[0])

    _, status = os.waitpid(forked(action), 0)
    assert os.WIFSIGNALED(status), f'{victim} was not reached {seen}'
    state = state_of(root, expected)
    assert state == ('old' if STEPS.index(victim) < STEPS.index('renamed 1') else 'new')
    check_next_run(root, three[0], expected, state)


def test_sigkill_at_random_times(three, expected, tmp_path):
    root = start_root(tmp_path, 'timing')
    _, _, used = os.wait4(forked(lambda: merged_into(root, three[0])), 0)
    assert state_of(root, expected) == 'new'
    dice = random.Random(1)
    states = []
    for index in range(RANDOM_KILLS):
        root = start_root(tmp_path, f'{index}')
        ends = dice.uniform(0.01, 1) * (used.ru_utime + used.ru_stime)

        def action(root=root, ends=ends):
            # by processor time, which a busy machine doesn't change; nothing handles this signal
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, ends)
            merged_into(root, three[0])

        os.waitpid(forked(action), 0)
        states.append(state_of(root, expected))
        check_next_run(root, three[0], expected, states[-1])
    assert 'old' in states


def test_a_dry_run_leaves_what_a_killed_run_left(three, tmp_path, capsys):
    root = start_root(tmp_path, 'root')

    def die():
        publish.step = lambda name: name == 'unmarked' and os.kill(os.getpid(), signal.SIGKILL)
        merged_into(root, three[0])

    os.waitpid(forked(die), 0)
    before = tree(root)
    pairs = [f'{path}:{weight}' for path, weight in zip(three[0], WEIGHTS, strict=True)]
    again = ['--merge-inputs', *pairs, '--merge-output', str(root), '--output-iteration', '7']
    assert main([*again, '--dry-run']) == 1
    assert 'exists' in capsys.readouterr().err and tree(root) == before
    assert main(again) == 1
    assert 'nothing is left to do' in capsys.readouterr().err
    assert (root / 'latest_checkpointed_iteration.txt').read_text() == '7\n'


def test_no_process_is_started_while_locks_are_held(three, tmp_path, monkeypatch):
    """A child has its parent's locks until it executes: what the killed run left would stay."""
    held, started = [], []
    start = subprocess.Popen.__init__

    def record(self, *arguments, **options):
        started.append(bool(held))
        start(self, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, '__init__', record)
    monkeypatch.setattr(os, 'fork', lambda: started.append(bool(held)))
    monkeypatch.setattr(publish, 'step', held.append)
    merge(three[0], WEIGHTS, tmp_path / 'out', 7, verify=True, save_integrity=True)
    assert held[-1] == 'tracked 1' and not any(started)


@pytest.mark.usefixtures('default_signal_handlers')
@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize('when', ['staged', 'chunk', 'written', 'synced'])
def test_signals_leave_nothing(three, tmp_path, signum, when):
    root = start_root(tmp_path, 'root')

    def action():
        def stop(*_):
            os.kill(os.getpid(), signum)

        def step(name):
            if name == when:
                stop()

        publish.step = step
        if when == 'chunk':
            right = accumulate.ChunkMerger.merge
            # once: the threads' later chunks come after the handlers are gone
            once = [stop]
            accumulate.ChunkMerger.merge = lambda *a: (once and once.pop()(), right(*a))
        pairs = [f'{path}:{weight}' for path, weight in zip(three[0], WEIGHTS, strict=True)]
        return main(
            ['--merge-inputs', *pairs, '--merge-output', str(root), '--output-iteration', '7']
        )

    _, status = os.waitpid(forked(action), 0)
    assert os.WEXITSTATUS(status) == 128 + signum
    assert tree(root) == {'latest_checkpointed_iteration.txt': b'1'}
