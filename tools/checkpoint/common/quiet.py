"""Imports of megatron-core without a word about the optional packages that are absent."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


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
