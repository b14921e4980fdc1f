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

The lock is what tells a killed run from a running one. A child that a run forks has the lock too,
and until it executes something else may outlive the run: nothing starts one while it publishes.
"""

import errno
import fcntl
import glob
import os
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Self

from .errors import CheckpointError
from .paths import TRACKER_NAME

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
            staging = _staging_path(target, self._token)
            self.staging[target] = staging
            self._locks.append(_make_locked(staging, Path.mkdir))
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
        temporary = _staging_path(root / TRACKER_NAME, self._token)
        self._new_trackers[root] = temporary
        self._locks.append(_make_locked(temporary, lambda path: path.open('x').close()))
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
                'written now: nothing is left to do'
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
    present = [target for target in targets if target.exists()]
    marked = [target for target in present if (target / UNPUBLISHED).exists()]
    with ExitStack() as locks:
        if not all(locks.enter_context(_unlocked(target)) for target in marked):
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
    for temporary in _leftovers(tracker):
        with _unlocked(temporary) as unlocked:
            token = temporary.name.removeprefix(_staging_prefix(tracker))
            renamed = not any(_staging_path(target, token).exists() for target in targets)
            if unlocked and renamed and temporary.read_text() == text:
                if not _written_since(tracker, temporary):
                    _replace_tracker(root, temporary, text)
                    return True
    return False


def _written_since(path: Path, other: Path) -> bool:
    return path.exists() and path.stat().st_mtime_ns > other.stat().st_mtime_ns


def remove_leftovers(target: Path) -> None:
    """Remove what was staged for ``target`` by processes of this host that are gone."""
    for path in _leftovers(target):
        with _unlocked(path) as unlocked:
            if not unlocked:
                continue
            if path.is_dir():
                remove_tree(path)
            else:
                path.unlink(missing_ok=True)


def _leftovers(target: Path) -> list[Path]:
    """What processes of this host have staged for ``target``."""
    return sorted(target.parent.glob(glob.escape(_staging_prefix(target)) + '*'))


def remove_tree(path: Path) -> None:
    """Remove a directory, also while a writer thread that is being stopped still adds files."""
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.05)


def _replace_tracker(root: Path, temporary: Path, text: str) -> None:
    tracker = root / TRACKER_NAME
    try:
        os.replace(temporary, tracker)
        fsync_directory(root)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{tracker}: can't be replaced: {error.strerror}; the output itself is complete: "
            f'write {text} into this file to have it loaded'
        ) from error


def fsync_tree(directory: Path) -> None:
    """Flush every file and directory below ``directory``, and itself."""
    for path in _files(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fsync(descriptor)
        finally:
            os.close(descriptor)
    for parent, _, _ in os.walk(directory):
        fsync_directory(parent)


def fsync_directory(directory: str | Path) -> None:
    """Flush a directory's entries; file systems that can't do so are left alone."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync(descriptor: int) -> None:
    """``os.fsync`` that passes over file systems without it, and not over a full disk.

    Raises:
        OSError: data could not be stored
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise


def _files(directory: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(directory):
        yield from (Path(parent) / name for name in names)


def _staging_prefix(target: Path) -> str:
    return f'.{target.name}.tmp-{socket.gethostname()}-'


def _staging_path(target: Path, token: str) -> Path:
    return target.parent / (_staging_prefix(target) + token)


def _make_locked(path: Path, make: Callable[[Path], object]) -> int:
    """Make a path, its mode after the umask and the parent, and lock it; returns the lock.

    Between the two a run that looks for leftovers may take it for one: then it is made again.
    """
    while True:
        make(path)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # no locks here (some network file systems): leftovers stay, hidden
            return descriptor
        if path.exists():
            return descriptor
        os.close(descriptor)


@contextmanager
def _unlocked(path: Path) -> Iterator[bool]:
    """Whether the process that staged ``path`` is known to be gone; locked for the length of it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked = True
    except OSError:
        unlocked = False
    try:
        yield unlocked
    finally:
        os.close(descriptor)
