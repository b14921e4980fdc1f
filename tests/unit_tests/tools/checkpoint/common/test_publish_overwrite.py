"""Replacing what is there: the old state or the new one, whatever stops it and wherever."""

import os
import signal

import pytest

from tests.unit_tests.tools.checkpoint.common.test_publish import complete, entries, in_child
from tools.checkpoint.common import exchange, publish
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.common.paths import TRACKER_NAME
from tools.checkpoint.common.publish import Publication

SIDES = ('edge', 'cloud')
STEPS = [
    'staged',
    'written',
    'synced',
    'held 1',
    'held 2',
    'exchanging',
    'renamed 1',
    'exchanging again',
    'renamed 2',
    'unmarking',
    'unmarking again',
    'unmarked',
    'tracked 1',
    'tracked 2',
    'removed 1',
    'removed 2',
]
LAST_EXCHANGE = STEPS.index('exchanging again')


@pytest.fixture(params=['exchanged in one step', 'in two steps'])
def in_one_step(request, monkeypatch):
    """The file system exchanges two names, or can't."""
    if request.param == 'in two steps':
        monkeypatch.setattr(exchange, '_swap', lambda one, other: False)
    return request.param == 'exchanged in one step'


def write(root, content, stop=lambda name: None, sides=SIDES, overwrite=True):
    """Publish a directory with a file a side; ``stop`` sees each step."""
    seen = set()

    def step(name):
        stop(f'{name} again' if name in seen else name)
        seen.add(name)

    publish.step, before = step, publish.step
    try:
        targets = [root / side / 'iter_0000007' for side in sides]
        trackers = {target.parent: '7' for target in targets}
        with Publication(targets, trackers, overwrite=overwrite) as publication:
            for target in targets:
                (publication.path(target) / 'sub').mkdir()
                for name in ('a', 'sub/b'):
                    (publication.path(target) / name).write_text(content)
            step('written')
            publication.commit()
    finally:
        publish.step = before


def kill_at(victim):
    return lambda name: name == victim and os.kill(os.getpid(), signal.SIGKILL)


def found(root, side):
    """What a side holds: one content in both of its files; None where it isn't there."""
    target = root / side / 'iter_0000007'
    if not target.exists():
        return None
    (content,) = {(target / name).read_text() for name in ('a', 'sub/b')}
    return content


def tracker(root, side):
    file = root / side / TRACKER_NAME
    return file.read_text().rstrip('\n') if file.exists() else None


def read_by_trackers(root):
    """What who goes by the trackers reads of the iteration, by side."""
    return {found(root, side) for side in SIDES if tracker(root, side) == '7'}


def test_steps_and_result(tmp_path, in_one_step):
    seen = []
    write(tmp_path, 'old', overwrite=False)
    write(tmp_path, 'new', seen.append)
    assert [name for name in dict.fromkeys(seen)] == STEPS
    assert entries(tmp_path) == complete(tmp_path)
    assert read_by_trackers(tmp_path) == {'new'}


def test_what_is_there_stays_at_every_moment_until_it_is_exchanged(tmp_path, in_one_step):
    write(tmp_path, 'old', overwrite=False)

    def look(name):
        assert len(read_by_trackers(tmp_path)) <= 1  # never one side of each
        if STEPS.index(name) < STEPS.index('exchanging'):
            assert [found(tmp_path, side) for side in SIDES] == ['old', 'old']
        if STEPS.index(name) > LAST_EXCHANGE:
            assert [found(tmp_path, side) for side in SIDES] == ['new', 'new']
        if in_one_step:
            assert None not in [found(tmp_path, side) for side in SIDES]

    write(tmp_path, 'new', look)


@pytest.mark.parametrize('again', ['without overwriting', 'killed twice'])
@pytest.mark.parametrize('victim', STEPS)
def test_sigkill_at_each_step(tmp_path, in_one_step, victim, again):
    write(tmp_path, 'old', overwrite=False)
    assert os.WIFSIGNALED(in_child(lambda: write(tmp_path, 'new', kill_at(victim))))
    assert len(read_by_trackers(tmp_path)) <= 1
    if again == 'killed twice':
        assert os.WIFSIGNALED(in_child(lambda: write(tmp_path, 'newer', kill_at(victim))))
        assert len(read_by_trackers(tmp_path)) <= 1
    if again == 'without overwriting':
        with pytest.raises(CheckpointError, match='exists'):
            write(tmp_path, 'newer', overwrite=False)
        whole = 'new' if STEPS.index(victim) >= STEPS.index('renamed 2') else 'old'
        if in_one_step and victim == 'exchanging again':
            whole = 'new'
        assert read_by_trackers(tmp_path) == {whole}
        assert [tracker(tmp_path, side) for side in SIDES] == ['7', '7']
        assert not [name for name in entries(tmp_path) if name.endswith('-old')]
    write(tmp_path, 'newest')
    assert read_by_trackers(tmp_path) == {'newest'}
    assert entries(tmp_path) == complete(tmp_path)


@pytest.mark.parametrize(
    'sides, before', [(('edge',), None), (('edge',), '7'), (SIDES, '5'), (SIDES, '7')]
)
@pytest.mark.parametrize('victim', STEPS)
def test_one_target_there(tmp_path, victim, sides, before):
    """The other is new; the tracker names another iteration, the same, or is missing."""
    write(tmp_path, 'old', sides=('edge',), overwrite=False)
    file = tmp_path / 'edge' / TRACKER_NAME
    file.unlink() if before is None else file.write_text(f'{before}\n')
    killed = os.WIFSIGNALED(in_child(lambda: write(tmp_path, 'new', kill_at(victim), sides)))
    assert len(read_by_trackers(tmp_path)) <= 1
    if tracker(tmp_path, 'edge') == '7':
        assert found(tmp_path, 'edge') == 'new' or before == '7'
    assert tracker(tmp_path, 'edge') in (before, '7', '7 is being replaced')
    assert killed or tracker(tmp_path, 'edge') == '7'
    with pytest.raises(CheckpointError, match='exists'):
        write(tmp_path, 'newer', sides=sides, overwrite=False)
    assert tracker(tmp_path, 'edge') == {'new': '7', 'old': before}[found(tmp_path, 'edge')]
    write(tmp_path, 'newest', sides=sides)
    assert {side: found(tmp_path, side) for side in sides} == dict.fromkeys(sides, 'newest')
    assert not [name for name in entries(tmp_path) if '.tmp-' in name]


@pytest.mark.parametrize('victim', STEPS[: STEPS.index('unmarked')])
def test_an_error_puts_back_what_was_there(tmp_path, in_one_step, victim):
    write(tmp_path, 'old', overwrite=False)

    def fail(name):
        if name == victim:
            raise OSError(28, 'No space left on device')

    with pytest.raises((OSError, CheckpointError)):
        write(tmp_path, 'new', fail)
    assert read_by_trackers(tmp_path) == {'old'}
    assert entries(tmp_path) == complete(tmp_path)


@pytest.mark.parametrize('kind', ['file', 'link', 'dangling link'])
def test_only_directories_are_replaced(tmp_path, kind):
    target = tmp_path / 'edge' / 'iter_0000007'
    target.parent.mkdir()
    (tmp_path / 'elsewhere').mkdir()
    target.touch() if kind == 'file' else target.symlink_to(
        tmp_path / ('elsewhere' if kind == 'link' else 'nowhere')
    )
    before = entries(tmp_path)
    with pytest.raises(CheckpointError, match='only a directory is replaced'):
        write(tmp_path, 'new', sides=('edge',))
    assert entries(tmp_path) == before


def test_two_runs_at_once(tmp_path):
    """The second is told, at every step of the first, and takes nothing of it away."""
    write(tmp_path, 'old', overwrite=False)

    def second(name):
        if STEPS.index(name) < STEPS.index('unmarked'):
            with pytest.raises(CheckpointError, match='another run|exists'):
                write_quietly(tmp_path)

    def write_quietly(root):
        step, publish.step = publish.step, lambda name: None
        try:
            targets = [root / side / 'iter_0000007' for side in SIDES]
            with Publication(targets, {t.parent: '7' for t in targets}, overwrite=True):
                pass
        finally:
            publish.step = step

    write(tmp_path, 'new', second)
    assert read_by_trackers(tmp_path) == {'new'}
    assert entries(tmp_path) == complete(tmp_path)
