"""Objects that a conversion makes, as DCP stores them."""

import io
from typing import Any

import torch

from ..common.core_classes import WithStandIns


def archived(value: Any) -> bytes:
    """An object's ``torch.save`` archive."""
    data = io.BytesIO()
    torch.save(value, data, pickle_module=WithStandIns)
    return data.getvalue()
