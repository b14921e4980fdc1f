"""Standard output that may be full, closed or a pipe that nobody reads."""

import os
import sys


def tell(text: str) -> bool:
    """Print to standard output, at once; where that fails, say so in one line on standard error.

    Nothing more is written to standard output then, not by Python as it exits either.

    Returns:
        whether it was written
    """
    try:
        print(text, flush=True)
    except OSError as error:
        reason = error.strerror or error
        print(f"error: standard output can't be written: {reason}", file=sys.stderr)
        _discard()
        return False
    return True


def _discard() -> None:
    """Lead standard output to nowhere: what it still buffers is tried again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):  # no file behind it
        pass
    finally:
        os.close(nowhere)
