"""Tensors by their bits, and dtypes by their names."""

import numpy
import torch

_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(values: torch.Tensor) -> torch.Tensor:
    """The elements as whole numbers of the same bits."""
    return values.view(_AS_BITS[values.itemsize])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree: a NaN equals itself, and 0 isn't -0."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other)))
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix('torch.')


def address(view: memoryview) -> int:
    """Where bytes lie in memory; compares with ``data_ptr()``."""
    return numpy.frombuffer(view, numpy.uint8).ctypes.data
