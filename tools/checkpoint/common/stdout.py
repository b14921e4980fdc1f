"""What the tools say: standard output that may be full or closed, and the one line of an error."""

import os
import sys


def tell(text: str) -> bool:
    """Print to standard output, at once; where that fails, say so in one line on standard error.

    Nothing more is written to standard output then, not by Python as it exits either. Characters
    that the terminal's encoding lacks are escaped.

    Returns:
        whether it was written
    """
    if sys.stdout is None:
        complain("standard output can't be written: it is closed")
        return False
    encoding = getattr(sys.stdout, 'encoding', None) or 'utf-8'
    try:
        print(text.encode(encoding, 'backslashreplace').decode(encoding), flush=True)
    except OSError as error:
        complain(f"standard output can't be written: {error.strerror or error}")
        _discard()
        return False
    return True


def complain(reason: object) -> int:
    """Print why a tool ends, in the one form that all of them have; returns its exit status."""
    if sys.stderr is not None:  # else print would take standard output
        print(f'error: {printable(str(reason))}', file=sys.stderr)
    return 1


def printable(text: str) -> str:
    """One line that any terminal takes: what would break it or act on the terminal is escaped."""
    return text if text.isprintable() else ''.join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def _discard() -> None:
    """Lead standard output to nowhere: what it still buffers is tried again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):  # no file behind it
        pass
    finally:
        os.close(nowhere)
