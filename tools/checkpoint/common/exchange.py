"""Putting a directory where another one is, so that the other can be put back.

A directory that is replaced is kept beside it, under a hidden name of the run that replaces it.
"""

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

from .staging import (
    abandoned,
    fsync_directory,
    leftovers,
    remove_tree,
    staging_path,
    staging_prefix,
)

UNPUBLISHED = '.unpublished'

_OLD = '-old'
_CURRENT_DIRECTORY, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def exchange(
    new: Path, target: Path, aside: Path, step: Callable[[str], object] = lambda name: None
) -> None:
    """``target`` becomes what ``new`` is, and ``aside`` what ``target`` was.

    Where the file system can exchange two names there is a ``target`` at every moment.

    Args:
        new, target, aside: paths in one directory; ``aside`` doesn't exist
        step: is told of the moment between two renames

    Raises:
        OSError: the file system refuses
    """
    if _swap(new, target):
        step('exchanging')
        os.rename(new, aside)
    else:
        os.rename(target, aside)
        step('exchanging')
        os.rename(new, target)


def _swap(one: Path, other: Path) -> bool:
    """Whether the two names were exchanged in one step; False where that can't be done here."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, names = _CURRENT_DIRECTORY, (os.fsencode(one), os.fsencode(other))
    if rename(here, names[0], here, names[1], _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def kept_path(target: Path, token: str) -> Path:
    """Where the run with that token keeps what was at ``target``."""
    return staging_path(target, token + _OLD)


def finish_exchange(target: Path, token: str) -> None:
    """Bring what was at ``target`` to where it is kept, if a kill came in between."""
    hidden, kept = staging_path(target, token), kept_path(target, token)
    if hidden.exists() and not (hidden / UNPUBLISHED).exists() and not kept.exists():
        os.rename(hidden, kept)


def put_back(target: Path, token: str) -> bool:
    """Undo what the run with that token did to ``target``.

    Returns:
        whether there is what it replaced, which is at ``target`` then
    """
    finish_exchange(target, token)
    kept, failed = kept_path(target, token), staging_path(target, f'{token}-new')
    if not kept.exists():
        return False
    if os.path.lexists(target):
        exchange(kept, target, failed)
        fsync_directory(target.parent)
        remove_tree(failed)
    else:
        os.rename(kept, target)
        fsync_directory(target.parent)
    return True


def put_back_missing(target: Path) -> None:
    """Restore a target that a killed run had put aside without putting anything in its place."""
    if os.path.lexists(target):
        return
    for kept in _kept(target):
        with abandoned(kept) as unlocked:
            if unlocked and not (kept / UNPUBLISHED).exists():
                token = kept.name.removeprefix(staging_prefix(target)).removesuffix(_OLD)
                put_back(target, token)
                return


def remove_kept(target: Path) -> None:
    """Remove what runs that are gone have kept of ``target``, which is in place."""
    for kept in _kept(target):
        with abandoned(kept) as unlocked:
            if unlocked:
                remove_tree(kept)


def _kept(target: Path) -> list[Path]:
    return [path for path in leftovers(target) if path.name.endswith(_OLD)]
