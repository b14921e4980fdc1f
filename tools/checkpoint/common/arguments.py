"""What the tools' arguments may be: argparse types, which need nothing that is slow to import.

Paths are of a mounted file system, and a URL isn't taken for one: Python's ``Path`` makes
``msc:/profile/run`` of ``msc://profile/run``, a directory ``msc:`` here.
"""

import argparse
import os
import re
from pathlib import Path, PurePath
from typing import Any

from megatron_overlay import __version__

_MOST_DIGITS = 18
_URL = re.compile(r'([a-z][a-z0-9+.-]*:)/(/?)', re.ASCII | re.IGNORECASE)


def why_not_local(path: str | PurePath) -> str | None:
    """Why a path is refused; None for one of a file system.

    Of a ``Path``, which has lost a slash, a directory of that name is proof that it was no URL.
    """
    found = _URL.match(os.fspath(path))
    if found is None:
        return None
    if found[2] or (isinstance(path, PurePath) and not os.path.exists(found[1])):
        return (
            f'{path}: a URL ({found[1]}//), expected a path of a mounted file system; '
            'MSC and object stores are not supported'
        )
    return None


def not_a_url(text: str) -> str:
    """An argparse type: the text, unless it is a URL or empty, as an unset variable is."""
    if not text:
        raise argparse.ArgumentTypeError('an empty path')
    reason = why_not_local(text)
    if reason:
        raise argparse.ArgumentTypeError(reason)
    return text


def local_path(text: str) -> Path:
    """An argparse type: the path, unless it is a URL."""
    return Path(not_a_url(text))


def natural(text: str) -> int:
    """An argparse type: 0, 1, 2, …, of at most 18 digits, which 64 bits hold."""
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f'{text!r}: expected 0 or a positive number')
    if len(text) > _MOST_DIGITS:  # before it is made a number, which takes its time
        raise argparse.ArgumentTypeError(
            f'{text[:9]}…: expected no more than {_MOST_DIGITS} digits'
        )
    return int(text)


def positive(text: str) -> int:
    """An argparse type: 1, 2, 3, …."""
    if natural(text) == 0:
        raise argparse.ArgumentTypeError('0: expected a positive number')
    return int(text)


class Parser(argparse.ArgumentParser):
    """A command's parser, and those of its own commands: help as it is written, ``--version``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings
        )
        self.add_argument(
            '--version', action='version', version=f'megatron-checkpoint-toolkit {__version__}'
        )
