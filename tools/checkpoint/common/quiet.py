"""Imports: what is missing, in less time, and no word of core's about optional packages."""

import gc
import importlib
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


def import_quickly(name: str) -> None:
    """Import a large package while nothing is collected: none of it is garbage.

    The collector would look at all of it again and again, for a sixth of the time.
    """
    if name in sys.modules or not gc.isenabled():
        return
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def missing_packages() -> str | None:
    """Why the tools can't run in this environment, told before anything is imported; else None."""
    if find_spec('torch') is not None:
        return None
    return (
        f'torch: not installed for {sys.executable}; run with the Python of your training '
        f'environment, in a checkout with .venv/bin/python, which `make` makes'
    )
