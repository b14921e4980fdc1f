"""Writing ``latest_checkpointed_iteration.txt``, and finishing what a killed run left of it."""

import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from .errors import CheckpointError
from .exchange import UNPUBLISHED
from .paths import TRACKER_NAME
from .staging import (
    abandoned,
    fsync,
    fsync_directory,
    leftovers,
    make_locked,
    remove_leftovers,
    staging_path,
    staging_prefix,
)


def finish_tracker(root: Path, text: str, targets: Sequence[Path]) -> bool:
    """Put the tracker in place that a run killed after its last rename had ready; if there is one.

    One written since then counts instead.
    """
    tracker = root / TRACKER_NAME
    if content(tracker) == held_text(text):
        waiting = any((p / UNPUBLISHED).exists() for target in targets for p in leftovers(target))
        write_tracker(root, text)
        remove_leftovers(tracker)
        return not waiting
    for temporary in leftovers(tracker):
        with abandoned(temporary) as unlocked:
            token = temporary.name.removeprefix(staging_prefix(tracker))
            renamed = not any(staging_path(target, token).exists() for target in targets)
            if unlocked and renamed and content(temporary) == text:
                if not _written_since(tracker, temporary):
                    replace_tracker(root, temporary, text)
                    return True
    return False


def held_text(text: str) -> str:
    """What a tracker says while the iteration that it names is being replaced."""
    return f'{text} is being replaced'


def content(file: Path) -> str:
    """What a small file holds, without spaces around it; nothing where it can't be read."""
    try:
        return file.read_bytes().decode(errors='replace').strip()
    except OSError:
        return ''


def stage_tracker(temporary: Path, text: str) -> int:
    """Write a file of that line, flushed; returns its lock."""
    lock = make_locked(temporary, lambda path: path.open('x').close())
    try:
        with temporary.open('w') as file:
            file.write(f'{text}\n')
            file.flush()
            fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        os.close(lock)
        raise
    return lock


def write_tracker(root: Path, text: str) -> None:
    """Make a root's tracker say ``text``, in one step.

    Raises:
        CheckpointError: the file system refuses
    """
    tracker = root / TRACKER_NAME
    temporary = staging_path(tracker, f'{os.getpid()}-{uuid.uuid4().hex[:8]}')
    lock = stage_tracker(temporary, text)
    try:
        replace_tracker(root, temporary, text)
    finally:
        os.close(lock)


def _written_since(path: Path, other: Path) -> bool:
    return path.exists() and path.stat().st_mtime_ns > other.stat().st_mtime_ns


def replace_tracker(root: Path, temporary: Path, text: str) -> None:
    """Put a tracker in place that says ``text`` and is ready in a temporary file.

    Raises:
        CheckpointError: the file system refuses
    """
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
