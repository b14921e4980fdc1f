"""NumPy arrays in pickles, whose types can claim that bytes of the file are objects' addresses."""

import gc
import pickle
from types import FunctionType, ModuleType
from typing import Any

import numpy

# Booleans, numbers, bytes, text, dates: what an element says doesn't lead anywhere.
_VALUES = 'biufcSUMm'


def refuse_pointers(dtype: numpy.dtype) -> None:
    """Refuse a type of objects, or of anything made of parts.

    Such a type's own flags tell whether it has objects, and are read from the pickle.
    """
    if dtype.kind not in _VALUES or dtype.fields is not None or dtype.subdtype is not None:
        raise pickle.UnpicklingError('a NumPy array or scalar that does not hold plain values')


def refuse_forged_arrays(value: Any) -> None:
    """Refuse a loaded value in which, however deep, is an array of anything but plain values."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        part = todo.pop()
        if id(part) in seen or isinstance(part, (type, ModuleType, FunctionType, str, bytes)):
            continue
        seen.add(id(part))
        if isinstance(part, numpy.dtype):
            refuse_pointers(part)
        elif isinstance(part, (numpy.ndarray, numpy.generic)):
            refuse_pointers(part.dtype)
        else:
            todo.extend(gc.get_referents(part))
