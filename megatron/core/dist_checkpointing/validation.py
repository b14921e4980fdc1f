"""Amends upstream's check that a request covers every shard of a tensor.

A hybrid model that replaces attention reads some layers of tensors that GPT stacks along an axis.
That what it needs is there, and was read, is made sure of elsewhere (``check_sources``,
``ReadRecord``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import megatron_overlay

upstream = megatron_overlay.upstream(__name__)

_is_partly_read: Callable[[str], bool] | None = None


@contextmanager
def reading_parts(is_partly_read: Callable[[str], bool] | None) -> Iterator[None]:
    """Let requests cover a part only of the keys for which ``is_partly_read`` holds, in here."""
    global _is_partly_read
    outer, _is_partly_read = _is_partly_read, is_partly_read
    try:
        yield
    finally:
        _is_partly_read = outer


def validate_sharding_integrity(global_metadata, *args, **kwargs) -> None:
    """Upstream's, for the keys that are read whole."""
    partly = _is_partly_read
    if partly is not None:
        global_metadata = [
            [entry for entry in entries if not partly(entry.key)] for entries in global_metadata
        ]
    return upstream.validate_sharding_integrity(global_metadata, *args, **kwargs)
