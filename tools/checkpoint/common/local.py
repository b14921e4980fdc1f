"""Paths that users give are of a mounted file system: a URL isn't taken for one.

Python's ``Path`` makes ``msc:/profile/run`` of ``msc://profile/run``, a directory ``msc:`` here.
This module needs nothing heavy, so that command lines can say so before anything is imported.
"""

import argparse
import os
import re
from pathlib import Path, PurePath

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
    """An argparse type: the text, unless it is a URL.

    Raises:
        argparse.ArgumentTypeError: it is
    """
    reason = why_not_local(text)
    if reason:
        raise argparse.ArgumentTypeError(reason)
    return text


def local_path(text: str) -> Path:
    """An argparse type: the path, unless it is a URL.

    Raises:
        argparse.ArgumentTypeError: it is
    """
    return Path(not_a_url(text))
