"""Whole numbers in files, however their writers stored them."""

import operator
from typing import Any

import numpy


def whole(value: object) -> int | None:
    """2 for 2, 2.0 and NumPy's kinds of both; None for anything that isn't a whole number."""
    if isinstance(value, (float, numpy.floating)):
        return int(value) if value.is_integer() else None
    if isinstance(value, (bool, numpy.bool_)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # such as a tensor of several elements
        return None


def number_in(args: Any, name: str) -> int | None:
    """A whole number that ``args`` hold; None where they are missing, or it is no number."""
    return whole(getattr(args, name, None))
