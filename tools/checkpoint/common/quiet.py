"""Imports: what is missing, and no word of core's about optional packages."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Keep what importing core warns of from burying the tools' own output."""
    cpp_extension = logging.getLogger('torch.utils.cpp_extension')
    level = cpp_extension.level
    cpp_extension.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        cpp_extension.setLevel(level)


def missing_packages() -> str | None:
    """Why the tools can't run in this environment, told before anything is imported; else None."""
    if find_spec('torch') is not None:
        return None
    return (
        f'torch: not installed for {sys.executable}; run with the Python of your training '
        f'environment, in a checkout with .venv/bin/python, which `make` makes'
    )
