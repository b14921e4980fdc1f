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

Where targets are to be replaced, every staged directory has the marker, and step 3 exchanges it
with its target; what was there is kept, hidden, until 5 is done. An error puts it back, and so does
the next run after a kill before the last exchange; the markers go in the order in which they came,
so a first target that is marked and a last one that isn't tell of that. Two exchanges are two
steps: a tracker that names what is being replaced says so meanwhile, which no reader takes for an
iteration.
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
from .exchange import (
    UNPUBLISHED,
    exchange,
    finish_exchange,
    kept_path,
    put_back,
    put_back_missing,
    remove_kept,
)
from .paths import TRACKER_NAME
from .staging import (
    abandoned,
    fsync_directory,
    fsync_tree,
    lock_directory,
    make_locked,
    remove_leftovers,
    remove_tree,
    staging_path,
)
from .trackers import (
    content,
    finish_tracker,
    held_text,
    replace_tracker,
    stage_tracker,
    write_tracker,
)


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
        targets: directories to publish. Missing parents are made (and removed again where the
            publication fails)
        trackers: checkpoint root to text of its ``latest_checkpointed_iteration.txt``
        overwrite: replace targets that exist; else none may

    Attributes:
        staging: target to the directory to write into

    Raises:
        CheckpointError: a target exists, or its parent can't be written; with ``overwrite``, it is
            no directory, or another run is publishing it
    """

    def __init__(
        self,
        targets: Sequence[str | Path],
        trackers: Mapping[Path, str] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        self.targets = [Path(target).absolute() for target in targets]
        self.trackers = {root.absolute(): text for root, text in (trackers or {}).items()}
        self.staging: dict[Path, Path] = {}
        self.committed = False
        self._overwrite = overwrite
        self._replaced: list[Path] = []
        self._exchanged: list[Path] = []
        self._held: list[Path] = []
        self._token = f'{os.getpid()}-{uuid.uuid4().hex[:8]}'
        self._new_trackers: dict[Path, Path] = {}
        self._locks: list[int] = []
        self._renamed: list[Path] = []
        self._made_parents: list[Path] = []
        self._signals = _Signals()

    def path(self, target: str | Path) -> Path:
        return self.staging[Path(target).absolute()]

    def __enter__(self) -> Self:
        finished = recover(self.targets, self.trackers)
        self._signals.install()
        try:
            for target in self.targets:
                if self._overwrite and os.path.lexists(target):
                    self._claim(target)
                else:
                    refuse_existing(target, finished)
            for target in self.targets:
                self._stage(target)
            step('staged')
        except BaseException:
            self._undo()
            self._unlock()
            self._signals.restore()
            raise
        return self

    def _claim(self, target: Path) -> None:
        refuse_irreplaceable(target)
        try:
            self._locks.append(lock_directory(target))
        except BlockingIOError as error:
            raise CheckpointError(f'{target}: another run is publishing it; wait for it') from error
        self._replaced.append(target)

    @property
    def _marked(self) -> bool:
        return len(self.targets) > 1 or bool(self._replaced)

    def _stage(self, target: Path) -> None:
        try:
            for parent in reversed([p for p in target.parents if not p.exists()]):
                self._made_parents.append(parent)  # first: a signal may come in between
                parent.mkdir(exist_ok=True)
            remove_leftovers(target)
            staging = staging_path(target, self._token)
            self.staging[target] = staging
            self._locks.append(make_locked(staging, Path.mkdir))
            if self._marked:
                (staging / UNPUBLISHED).write_text(self._token)
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
            self._hold_trackers()
            for target, staging in self.staging.items():
                if target in self._replaced:
                    self._exchanged.append(target)
                    exchange(staging, target, kept_path(target, self._token), step)
                else:
                    refuse_existing(target)
                    os.rename(staging, target)
                self._renamed.append(target)
                step(f'renamed {len(self._renamed)}')
            for parent in {target.parent for target in self.targets}:
                fsync_directory(parent)
            if self._marked:
                unmark(self.targets)
            self.committed = True
            step('unmarked')
        except OSError as error:
            raise CheckpointError(
                f"{error.filename2 or error.filename or self.targets[0]}: can't be published: "
                f'{error.strerror or error}'
            ) from error
        for number, (root, temporary) in enumerate(self._new_trackers.items(), start=1):
            replace_tracker(root, temporary, self.trackers[root])
            step(f'tracked {number}')
        for number, target in enumerate(self._replaced, start=1):
            remove_tree(kept_path(target, self._token))
            step(f'removed {number}')

    def _hold_trackers(self) -> None:
        """Two exchanges are two steps: in between no reader may take one side for both."""
        for root, text in self.trackers.items() if len(self.targets) > 1 else ():
            names = {target for target in self._replaced if target.parent == root}
            if names and content(root / TRACKER_NAME) == text:
                self._held.append(root)
                write_tracker(root, held_text(text))
                step(f'held {len(self._held)}')

    def _stage_tracker(self, root: Path, text: str) -> None:
        remove_leftovers(root / TRACKER_NAME)
        temporary = staging_path(root / TRACKER_NAME, self._token)
        self._new_trackers[root] = temporary
        self._locks.append(stage_tracker(temporary, text))

    def __exit__(self, *exc_info: object) -> None:
        try:
            if not self.committed:
                self._undo()
            self._unlock()
        finally:
            self._signals.restore()

    def _unlock(self) -> None:
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()

    def _undo(self) -> None:
        self._signals.hold()
        for path in self._new_trackers.values():
            path.unlink(missing_ok=True)
        for target in self._exchanged:
            try:
                put_back(target, self._token)
            except OSError as error:
                raise CheckpointError(
                    f"{target}: what was there can't be put back: {error.strerror or error}; it "
                    f'lies in {kept_path(target, self._token)}'
                ) from error
        for path in [*self._renamed, *self.staging.values()]:
            if path not in self._replaced:
                remove_tree(path)
        for root in self._held:
            write_tracker(root, self.trackers[root])
        for parent in reversed(self._made_parents):
            try:
                parent.rmdir()
            except FileNotFoundError:
                continue
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


def refuse_existing(
    target: Path, finished: bool = False, way_out: str = 'an output is never replaced; name another'
) -> None:
    """Raise where ``target`` exists.

    Args:
        finished: ``recover`` has just finished it
        way_out: what the message says of an output that is there
    """
    if os.path.lexists(target):
        if finished:
            raise CheckpointError(
                f'{target}: exists; a killed run had finished it but for {TRACKER_NAME}, which is '
                'written now: nothing is left to do if that run had the same inputs and options'
            )
        raise CheckpointError(f'{target}: exists, and {way_out}')


def refuse_irreplaceable(target: Path) -> None:
    """Raise where something other than a directory is at ``target``."""
    if os.path.lexists(target) and (os.path.islink(target) or not os.path.isdir(target)):
        raise CheckpointError(
            f'{target}: no directory, and only a directory is replaced; move it away'
        )


def unmark(targets: Sequence[Path]) -> None:
    """Take away the markers that say a target's siblings may be missing."""
    for target in targets:
        (target / UNPUBLISHED).unlink(missing_ok=True)
        step('unmarking')
        fsync_directory(target)


def recover(targets: Sequence[Path], trackers: Mapping[Path, str]) -> bool:
    """Bring what a killed run left to "none" or to "all".

    Where every target is there and the last one isn't waiting, all had been renamed: the markers
    go, and the trackers follow. Else the marked ones are removed, and what they replaced is put
    back. Targets of a running process are left alone.

    Args:
        targets, trackers: as ``Publication`` has them

    Returns:
        whether a tracker was written, all targets being in place
    """
    for target in targets:
        put_back_missing(target)
    present = [target for target in targets if os.path.exists(target)]
    marked = [target for target in present if os.path.exists(target / UNPUBLISHED)]
    with ExitStack() as locks:
        if not all(locks.enter_context(abandoned(target)) for target in marked):
            return False
        tokens = {target: content(target / UNPUBLISHED) for target in marked}
        if len(present) == len(targets) and (not marked or marked[-1] == targets[-1]):
            for target, token in tokens.items():
                finish_exchange(target, token)
            unmark(marked)
            finished = [finish_tracker(root, text, targets) for root, text in trackers.items()]
            for target in targets:
                remove_kept(target)
            return any(finished)
        for target, token in tokens.items():
            if not put_back(target, token):
                remove_tree(target)
        for root, text in trackers.items():
            if content(root / TRACKER_NAME) == held_text(text):
                write_tracker(root, text)
    return False
