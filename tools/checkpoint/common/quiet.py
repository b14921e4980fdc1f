"""Imports of torch and megatron-core: what is missing, and no word about optional packages."""

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
    for package, module in (('torch', 'torch'), ('megatron-core', 'megatron.core')):
        try:
            found = find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return (
                f'{package}: not installed for {sys.executable}; run with the Python of your '
                f'training environment, in a checkout with .venv/bin/python, which `make` makes'
            )
    return None
