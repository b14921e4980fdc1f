"""The one error that a user of the checkpoint tools can cause."""

import logging
import warnings

with warnings.catch_warnings():
    # Importing core names every optional package that is absent; none matters to these tools.
    warnings.simplefilter('ignore')
    _cpp_extension = logging.getLogger('torch.utils.cpp_extension')
    _level = _cpp_extension.level
    _cpp_extension.setLevel(logging.ERROR)
    from megatron.core.dist_checkpointing.core import CheckpointingException

    _cpp_extension.setLevel(_level)


class CheckpointError(CheckpointingException, ValueError):
    """A checkpoint, path or option that a tool can't work with.

    The message is one line (a list of offenders may follow on lines of its own) and names the
    file, the key, what was found, what was expected, and the way out. It is core's own
    ``CheckpointingException`` and a ``ValueError`` alike.
    """


def one_line(error: BaseException) -> str:
    """First line of an error's message, or its class name where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
