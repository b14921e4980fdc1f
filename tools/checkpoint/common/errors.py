"""The one error that a user of the checkpoint tools can cause."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_overlay.errors import CheckpointingException

from .stdout import printable


class CheckpointError(CheckpointingException, ValueError):
    """A checkpoint, path or option that a tool can't work with.

    The message is one line and names the file, the key, what was found, what was expected, and the
    way out; characters that would break the line or act on a terminal stand in it as escapes. It is
    core's own ``CheckpointingException`` and a ``ValueError`` alike.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message.rstrip()))


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Around code that takes a file's content apart: content of another make is the file's fault.

    Args:
        path: the file
        expected: what it should hold

    Raises:
        CheckpointError: in place of any error of Python's own, naming it
    """
    try:
        yield
    except (CheckpointingException, OSError):
        raise
    except Exception as error:
        raise CheckpointError(
            f'{path}: no {expected}, or damaged ({type(error).__name__}: {one_line(error)})'
        ) from error


def shown(value: object) -> str:
    """What a file holds, in at most 99 characters."""
    try:
        return f'{value!r:.99}'
    except Exception:  # such as an integer of more digits than Python prints
        return f'a value of type {type(value).__name__}'


def some(keys: Collection[str], most: int = 3) -> str:
    """The first few of them, in order, and how many there are besides."""
    first = ', '.join(sorted(keys)[:most]) or 'none'
    return f'{first} and {len(keys) - most} more' if len(keys) > most else first


def one_line(error: BaseException) -> str:
    """First line of an error's message, or its class name where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
