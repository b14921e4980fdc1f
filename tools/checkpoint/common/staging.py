"""Hidden paths beside a target that a run writes into, and how a killed run's are told and removed.

Each is locked by the run that made it. A child that the run forks has the lock too, and until it
executes something else may outlive the run: nothing starts one while it publishes.
"""

import errno
import fcntl
import glob
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST_NAME = 96  # bytes


def staging_prefix(target: Path) -> str:
    """What the names of all paths staged for ``target`` on this host begin with.

    A long name is cut and told by its digest, so that the whole fits where the name itself does.
    """
    name, encoded = target.name, os.fsencode(target.name)
    if len(encoded) > _LONGEST_NAME:
        digest = hashlib.sha256(encoded).hexdigest()[:16]
        name = f'{encoded[: _LONGEST_NAME - 17].decode(errors="ignore")}~{digest}'
    return f'.{name}.tmp-{socket.gethostname()}-'


def staging_path(target: Path, token: str) -> Path:
    """Where a run with that token writes what will become ``target``."""
    return target.parent / (staging_prefix(target) + token)


def make_locked(path: Path, make: Callable[[Path], object]) -> int:
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


def lock_directory(path: Path) -> int:
    """Lock a directory that is there; returns the lock.

    Raises:
        BlockingIOError: another run has it locked
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # no locks here, as above
        pass
    return descriptor


@contextmanager
def abandoned(path: Path) -> Iterator[bool]:
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


def remove_leftovers(target: Path) -> None:
    """Remove what was staged for ``target`` by processes of this host that are gone."""
    for path in leftovers(target):
        with abandoned(path) as unlocked:
            if not unlocked:
                continue
            if path.is_dir():
                remove_tree(path)
            else:
                path.unlink(missing_ok=True)


def leftovers(target: Path) -> list[Path]:
    """What processes of this host have staged for ``target``."""
    return sorted(target.parent.glob(glob.escape(staging_prefix(target)) + '*'))


def remove_tree(path: Path) -> None:
    """Remove a directory, also while a writer thread that is being stopped still adds files."""
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.05)


def fsync_tree(directory: Path) -> None:
    """Flush every file and directory below ``directory``, and itself."""
    for parent, _, names in os.walk(directory):
        for name in names:
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                fsync(descriptor)
            finally:
                os.close(descriptor)
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
