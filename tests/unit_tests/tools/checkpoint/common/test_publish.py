"""Publication: complete or absent, whatever stops it and wherever."""

import os
import signal
import stat
from pathlib import Path

import pytest

from tools.checkpoint.common import publish
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.common.paths import TRACKER_NAME
from tools.checkpoint.common.publish import Interrupted, Publication

STEPS = [
    'staged',
    'written',
    'synced',
    'renamed 1',
    'renamed 2',
    'unmarking',
    'unmarked',
    'tracked 1',
    'tracked 2',
]


def entries(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob('*'))


def write_two(root, stop=lambda name: None):
    """Publish two targets of two files each with a tracker each; ``stop`` sees each step."""
    publish.step, before = stop, publish.step
    try:
        targets = [root / side / 'iter_0000007' for side in ('edge', 'cloud')]
        with Publication(targets, {target.parent: '7' for target in targets}) as publication:
            for target in targets:
                (publication.path(target) / 'sub').mkdir()
                for name in ('a', 'sub/b'):
                    (publication.path(target) / name).write_text(f'{target.name} {name}')
            stop('written')
            publication.commit()
    finally:
        publish.step = before


def complete(root):
    return sorted(
        f'{side}{rest}'
        for side in ('edge', 'cloud')
        for rest in (
            '',
            '/iter_0000007',
            '/iter_0000007/a',
            '/iter_0000007/sub',
            '/iter_0000007/sub/b',
            '/latest_checkpointed_iteration.txt',
        )
    )


def in_child(action):
    """Run ``action`` in a forked child; its wait status."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def test_two_targets_appear_together_with_their_trackers(tmp_path):
    seen = []
    write_two(tmp_path, seen.append)
    assert entries(tmp_path) == complete(tmp_path)
    assert (tmp_path / 'edge/latest_checkpointed_iteration.txt').read_text() == '7\n'
    assert list(dict.fromkeys(seen)) == STEPS


@pytest.mark.parametrize('victim', STEPS)
def test_sigkill_at_each_step_then_the_next_run_publishes(tmp_path, victim):
    def die(name):
        if name == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    assert os.WIFSIGNALED(in_child(lambda: write_two(tmp_path, die)))
    visible = [p for p in tmp_path.glob('*/iter_*') if not (p / publish.UNPUBLISHED).exists()]
    for target in visible:
        assert (target / 'a').exists() and (target / 'sub/b').exists()
    trackers = list(tmp_path.glob(f'*/{TRACKER_NAME}'))
    assert len(trackers) == {'tracked 1': 1, 'tracked 2': 2}.get(victim, 0)
    assert not trackers or len(visible) == 2
    try:
        write_two(tmp_path)
    except CheckpointError as error:
        assert 'exists' in str(error) and STEPS.index(victim) >= STEPS.index('renamed 2')
        assert ('nothing is left to do' in str(error)) == (victim != 'tracked 2')
    else:
        assert STEPS.index(victim) < STEPS.index('renamed 2')
    assert entries(tmp_path) == complete(tmp_path)
    assert [path.read_text() for path in tmp_path.glob(f'*/{TRACKER_NAME}')] == ['7\n', '7\n']


@pytest.mark.parametrize('later', ['tracker written since', 'never renamed', 'other iteration'])
def test_a_tracker_is_finished_only_where_it_is_what_a_killed_run_left(
    tmp_path, monkeypatch, later
):
    target, tracker = tmp_path / 'iter_0000007', tmp_path / TRACKER_NAME

    def publish_seven(stop=None):
        def die(name):
            if name == stop:
                os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(publish, 'step', die)
        with Publication([target], {tmp_path: '7'}) as publication:
            publication.commit()

    tracker.write_text('1')
    in_child(lambda: publish_seven('synced' if later == 'never renamed' else 'unmarked'))
    assert target.exists() == (later != 'never renamed') and tracker.read_text() == '1'
    left = next(tmp_path.glob('.latest*'))
    if later == 'tracker written since':
        written = left.stat().st_mtime_ns + 1_000_000
        tracker.write_text('100')
        os.utime(tracker, ns=(written, written))
    elif later == 'never renamed':
        target.mkdir()  # by somebody else
    else:
        left.write_text('9')
    found = tracker.read_text()
    with pytest.raises(CheckpointError, match='never replaced'):
        publish_seven()
    assert tracker.read_text() == found


@pytest.mark.parametrize('victim', STEPS[:3])
def test_an_error_before_the_commit_leaves_nothing(tmp_path, victim):
    def fail(name):
        if name == victim:
            raise OSError(28, 'No space left on device')

    with pytest.raises((OSError, CheckpointError)):
        write_two(tmp_path, fail)
    assert entries(tmp_path) == []


@pytest.mark.parametrize('victim', ['renamed 1', 'renamed 2', 'unmarking'])
def test_an_error_between_the_renames_undoes_them(tmp_path, victim):
    def fail(name):
        if name == victim:
            raise OSError(5, 'Input/output error', 'some file')

    with pytest.raises(CheckpointError, match='Input/output error'):
        write_two(tmp_path, fail)
    assert entries(tmp_path) == []


@pytest.mark.usefixtures('default_signal_handlers')
@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_renames_leaves_nothing_and_handlers_come_back(tmp_path, signum):
    before = signal.getsignal(signum)
    with pytest.raises(Interrupted) as caught:
        write_two(tmp_path, lambda name: name == 'written' and os.kill(os.getpid(), signum))
    assert caught.value.exit_code == 128 + signum
    assert entries(tmp_path) == []
    assert signal.getsignal(signum) is before


@pytest.mark.usefixtures('default_signal_handlers')
def test_a_signal_between_the_renames_waits_for_the_end(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_two(
            tmp_path, lambda name: name == 'renamed 1' and os.kill(os.getpid(), signal.SIGINT)
        )
    assert entries(tmp_path) == complete(tmp_path)


def test_existing_target_is_refused_and_left_alone(tmp_path):
    target = tmp_path / 'iter_0000001'
    target.mkdir()
    with pytest.raises(CheckpointError, match='exists'), Publication([target]):
        pass
    with pytest.raises(CheckpointError, match='exists'):
        with Publication([tmp_path / 'late']) as publication:
            (tmp_path / 'late').mkdir()
            publication.commit()
    assert entries(tmp_path) == ['iter_0000001', 'late']


def test_a_running_publication_of_the_same_target_is_left_alone(tmp_path):
    target = tmp_path / 'out'
    with Publication([target]) as first:
        (first.path(target) / 'file').write_text('first')
        with Publication([target]):
            assert (first.path(target) / 'file').exists()
        first.commit()
    assert (target / 'file').read_text() == 'first'


def test_a_staging_directory_taken_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    """Another run looks for leftovers between the making of a directory and its lock."""
    target, right, seen = tmp_path / 'out', os.open, []

    def open_late(path, flags, *args, **options):
        if '.out.tmp-' in str(path) and not seen:
            seen.append(path)
            publish.remove_leftovers(target)
            assert not Path(path).exists()
        return right(path, flags, *args, **options)

    monkeypatch.setattr(os, 'open', open_late)
    with Publication([target]) as publication:
        (publication.path(target) / 'file').write_text('x')
        publish.remove_leftovers(target)
        publication.commit()
    assert seen and entries(tmp_path) == ['out', 'out/file']


def test_permissions_follow_umask_and_parent(tmp_path):
    parent = tmp_path / 'parent'
    parent.mkdir()
    os.chmod(parent, 0o2775)
    before = os.umask(0o027)
    try:
        with Publication([parent / 'out'], {parent: '3'}) as publication:
            (publication.path(parent / 'out') / 'file').write_text('x')
            publication.commit()
    finally:
        os.umask(before)
    mode = lambda path: stat.S_IMODE(path.stat().st_mode)  # noqa: E731
    assert mode(parent / 'out') == 0o2750
    assert mode(parent / 'out/file') == 0o640
    assert mode(parent / 'latest_checkpointed_iteration.txt') == 0o640


def test_unwritable_parent_is_named(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(CheckpointError, match='file'), Publication([tmp_path / 'file/out']):
        pass
    assert entries(tmp_path) == ['file']
