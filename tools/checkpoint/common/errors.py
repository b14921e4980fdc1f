"""The one error that a user of the checkpoint tools can cause."""

from .core import CheckpointingException


class CheckpointError(CheckpointingException, ValueError):
    """A checkpoint, path or option that a tool can't work with.

    The message is one line and names the file, the key, what was found, what was expected, and the
    way out. It is core's own ``CheckpointingException`` and a ``ValueError`` alike.
    """


def one_line(error: BaseException) -> str:
    """First line of an error's message, or its class name where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
