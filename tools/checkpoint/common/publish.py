"""Atomic publication: outputs appear complete, or not at all.

The protocol, each step durable before the next:

1. ``staged``     a hidden directory ``.<name>.tmp-<host>-<pid>-<token>`` beside each target, locked
                  by this process; everything is written there;
2. ``synced``     every file and directory in it is flushed to the disk, and so is each tracker's
                  new content, in a temporary file of its own beside it;
3. ``renamed``    each is renamed to its target. With several targets each carries the marker
                  ``.unpublished`` until all are renamed, so that a target whose siblings are
                  missing is known for what it is;
4. ``unmarked``   the markers are gone, the parents flushed: this is the commit;
5. ``tracked``    each tracker is replaced by its temporary file.

An error or signal before the commit removes what was staged and renamed. What a killed run leaves
is hidden, has a name of its own, and is removed by the next run that publishes the same target; a
run killed between 4 and 5 has left its trackers' temporary files, and the next run puts them in
place. Who reads by the trackers sees the old state or the new one at every moment.
"""

import os
import signal
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Self

from .errors import CheckpointError
from .paths import TRACKER_NAME
from .staging import (
    abandoned,
    fsync,
    fsync_directory,
    fsync_tree,
    leftovers,
    make_locked,
    remove_leftovers,
    remove_tree,
    staging_path,
    staging_prefix,
)

UNPUBLISHED = '.unpublished'


class Interrupted(BaseException):
    """A SIGINT, SIGTERM or SIGHUP that arrived during a publication.

    Attributes:
        exit_code: 128 plus the signal's number, as shells have it
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f'stopped by {signal.Signals(signum).name}; nothing was published')
        self.exit_code = 128 + signum


def step(name: str) -> None:
    """Named point of the protocol; tests stop the process here."""


class Publication:
    """Directories that are written aside and published together.

    Usage::

        with Publication([target], trackers={root: '100'}) as publication:
            write_files(publication.staging[target])
            publication.commit()

    Leaving the block without ``commit`` removes everything.

    Args:
        targets: directories to publish; none may exist. Missing parents are made (and removed
            again where the publication fails)
        trackers: checkpoint root to text of its ``latest_checkpointed_iteration.txt``

    Attributes:
        staging: target to the directory to write into

    Raises:
        CheckpointError: a target exists, or its parent can't be written
    """

    def __init__(
        self, targets: Sequence[str | Path], trackers: Mapping[Path, str] | None = None
    ) -> None:
        self.targets = [Path(target).absolute() for target in targets]
        self.trackers = {root.absolute(): text for root, text in (trackers or {}).items()}
        self.staging: dict[Path, Path] = {}
        self.committed = False
        self._token = f'{os.getpid()}-{uuid.uuid4().hex[:8]}'
        self._new_trackers: dict[Path, Path] = {}
        self._locks: list[int] = []
        self._renamed: list[Path] = []
        self._made_parents: list[Path] = []
        self._signals = _Signals()

    def path(self, target: str | Path) -> Path:
        """Where to write what will become ``target``."""
        return self.staging[Path(target).absolute()]

    def __enter__(self) -> Self:
        finished = recover(self.targets, self.trackers)
        for target in self.targets:
            refuse_existing(target, finished)
        self._signals.install()
        try:
            for target in self.targets:
                self._stage(target)
            step('staged')
        except BaseException:
            self._undo()
            self._signals.restore()
            raise
        return self

    def _stage(self, target: Path) -> None:
        try:
            for parent in reversed([p for p in target.parents if not p.exists()]):
                parent.mkdir(exist_ok=True)
                self._made_parents.append(parent)
            remove_leftovers(target)
            staging = staging_path(target, self._token)
            self.staging[target] = staging
            self._locks.append(make_locked(staging, Path.mkdir))
            if len(self.targets) > 1:
                (staging / UNPUBLISHED).touch()
        except OSError as error:
            raise CheckpointError(
                f"{target}: can't be written: {error.strerror or error} ({error.filename})"
            ) from error

    def commit(self) -> None:
        """Flush, rename all, flush the parents, then write the trackers.

        Raises:
            CheckpointError: a target appeared in the meantime, or the file system refused
        """
        try:
            for staging in self.staging.values():
                fsync_tree(staging)
            for root, text in self.trackers.items():
                self._stage_tracker(root, text)
            step('synced')
            self._signals.hold()  # from here on finishing takes less time than undoing
            for target, staging in self.staging.items():
                refuse_existing(target)
                os.rename(staging, target)
                self._renamed.append(target)
                step(f'renamed {len(self._renamed)}')
            for parent in {target.parent for target in self.targets}:
                fsync_directory(parent)
            if len(self.targets) > 1:
                unmark(self.targets)
            self.committed = True
            step('unmarked')
        except OSError as error:
            raise CheckpointError(
                f"{error.filename2 or error.filename or self.targets[0]}: can't be published: "
                f'{error.strerror or error}'
            ) from error
        for number, (root, temporary) in enumerate(self._new_trackers.items(), start=1):
            _replace_tracker(root, temporary, self.trackers[root])
            step(f'tracked {number}')

    def _stage_tracker(self, root: Path, text: str) -> None:
        remove_leftovers(root / TRACKER_NAME)
        temporary = staging_path(root / TRACKER_NAME, self._token)
        self._new_trackers[root] = temporary
        self._locks.append(make_locked(temporary, lambda path: path.open('x').close()))
        with temporary.open('w') as file:
            file.write(text)
            file.flush()
            fsync(file.fileno())

    def __exit__(self, *exc_info: object) -> None:
        try:
            if not self.committed:
                self._undo()
            for lock in self._locks:
                os.close(lock)
            self._locks.clear()
        finally:
            self._signals.restore()

    def _undo(self) -> None:
        self._signals.hold()
        for path in self._new_trackers.values():
            path.unlink(missing_ok=True)
        for path in [*self._renamed, *self.staging.values()]:
            remove_tree(path)
        for parent in reversed(self._made_parents):
            try:
                parent.rmdir()
            except OSError:  # someone else put something there
                break


class _Signals:
    """Turns SIGINT, SIGTERM and SIGHUP into ``Interrupted`` while a publication is under way."""

    def __init__(self) -> None:
        self._before: dict[int, object] = {}
        self._held = False
        self._pending: int | None = None

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, background jobs
                    self._before[signum] = signal.signal(signum, self._handle)

    def hold(self) -> None:
        """Keep signals back until ``restore``."""
        self._held = True

    def restore(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        self._before.clear()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            signal.raise_signal(pending)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._held:
            self._pending = signum
        else:
            self._held = True
            raise Interrupted(signum)


def refuse_existing(target: Path, finished: bool = False) -> None:
    """Raise where ``target`` exists.

    Args:
        finished: ``recover`` has just finished it

    Raises:
        CheckpointError: it exists
    """
    if os.path.lexists(target):
        if finished:
            raise CheckpointError(
                f'{target}: exists; a killed run had finished it but for {TRACKER_NAME}, which is '
                'written now: nothing is left to do if that run had the same inputs and options'
            )
        raise CheckpointError(f'{target}: exists, and an output is never replaced; name another')


def unmark(targets: Sequence[Path]) -> None:
    """Take away the markers that say a target's siblings may be missing."""
    for target in targets:
        (target / UNPUBLISHED).unlink(missing_ok=True)
        step('unmarking')
        fsync_directory(target)


def recover(targets: Sequence[Path], trackers: Mapping[Path, str]) -> bool:
    """Bring what a killed run left to "none" or to "all".

    Where every target is there, all had been renamed: the markers go, and the trackers follow. Else
    the marked ones are removed. Targets of a running process are left alone.

    Args:
        targets, trackers: as ``Publication`` has them

    Returns:
        whether a tracker was written
    """
    present = [target for target in targets if os.path.exists(target)]
    marked = [target for target in present if os.path.exists(target / UNPUBLISHED)]
    with ExitStack() as locks:
        if not all(locks.enter_context(abandoned(target)) for target in marked):
            return False
        if len(present) == len(targets):
            unmark(marked)
            finished = [_finish_tracker(root, text, targets) for root, text in trackers.items()]
            return any(finished)
        for target in marked:
            remove_tree(target)
    return False


def _finish_tracker(root: Path, text: str, targets: Sequence[Path]) -> bool:
    """Put the tracker in place that a run killed after its last rename had ready; if there is one.

    One written since then counts instead.
    """
    tracker = root / TRACKER_NAME
    for temporary in leftovers(tracker):
        with abandoned(temporary) as unlocked:
            token = temporary.name.removeprefix(staging_prefix(tracker))
            renamed = not any(staging_path(target, token).exists() for target in targets)
            if unlocked and renamed and temporary.read_bytes() == text.encode():
                if not _written_since(tracker, temporary):
                    _replace_tracker(root, temporary, text)
                    return True
    return False


def _written_since(path: Path, other: Path) -> bool:
    return path.exists() and path.stat().st_mtime_ns > other.stat().st_mtime_ns


def _replace_tracker(root: Path, temporary: Path, text: str) -> None:
    tracker = root / TRACKER_NAME
    try:
        os.replace(temporary, tracker)
        fsync_directory(root)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{tracker}: can't be replaced: {error.strerror}; the output itself is complete: "
            f'write {text.strip()} into this file to have it loaded'
        ) from error
