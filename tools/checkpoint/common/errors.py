"""The one error that a user of the checkpoint tools can cause."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .core import CheckpointingException


class CheckpointError(CheckpointingException, ValueError):
    """A checkpoint, path or option that a tool can't work with.

    The message is one line and names the file, the key, what was found, what was expected, and the
    way out; characters that would break the line or act on a terminal stand in it as escapes. It is
    core's own ``CheckpointingException`` and a ``ValueError`` alike.
    """

    def __init__(self, message: str) -> None:
        super().__init__(
            message if message.isprintable() else ''.join(map(_printable, message.rstrip()))
        )


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
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(
            f'{path}: no {expected}, or damaged ({type(error).__name__}: {one_line(error)})'
        ) from error


def one_line(error: BaseException) -> str:
    """First line of an error's message, or its class name where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _printable(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]
