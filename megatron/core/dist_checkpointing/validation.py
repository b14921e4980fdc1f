"""Amends upstream's check that shards make up whole tensors, where layers or experts are stacked.

A hybrid model that replaces attention reads some layers of tensors that GPT stacks along an axis.
That what it needs is there, and was read, is made sure of elsewhere (``check_sources``,
``ReadRecord``). Optimizer state of some layers only is no whole tensor, which ``torch_dist``
doesn't store.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from megatron.core.dist_checkpointing.checkpoint_keys import parse_key, stacks_layers
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor

import megatron_overlay

upstream = megatron_overlay.upstream(__name__)

_NAMED = 4
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


def validate_sharding_integrity(global_metadata, common_state_dict=None) -> None:
    """Upstream's for the keys that are read whole; partial state ends every rank, not only rank 0.

    Raises:
        CheckpointingException: shards don't make up whole tensors.
    """
    if _is_partly_read is not None:
        partly = _is_partly_read
        global_metadata = [
            [entry for entry in entries if not partly(entry.key)] for entries in global_metadata
        ]
    shards = [shard for of_rank in global_metadata for shard in of_rank]
    reason = partial_state(shard for shard in shards if isinstance(shard, ShardedTensor))
    if reason:
        saving = common_state_dict is not None
        raise CheckpointingException(f'{reason} {_SAVE_SO if saving else _LOAD_SO}')
    upstream.validate_sharding_integrity(global_metadata, common_state_dict)


_SAVE_SO = (
    'Save with --use-distributed-optimizer and without --dist-ckpt-optim-fully-reshardable '
    '(dp_reshardable), or freeze all or none.'
)
_LOAD_SO = 'Pass --no-load-optim to start the optimizer fresh, or freeze all or none.'


def partial_state(shards: Iterable[ShardedTensor]) -> str:
    """Which optimizer state there is for a part of a weight's layers or experts only.

    Args:
        shards: of all ranks, weights and optimizer state.

    Returns:
        one sentence or two; empty where there is none.
    """
    places: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for shard in shards:
        if shard.prepend_axis_num and shard.has_regular_grid:
            places[shard.key].add(shard.global_offset[: shard.prepend_axis_num])
    for key, found in places.items():
        weight = parse_key(key).weight
        if weight != key and (missing := places.get(weight, found) - found):
            return (
                f'{key}: the optimizer has state for {_described(weight, found)}, and none for '
                f'{_described(weight, missing)} (frozen?); expected it for all or none of what '
                f'{weight} is stacked of.'
            )
    return ''


def _described(weight: str, places: set[tuple[int, ...]]) -> str:
    axes = ['layer'] * stacks_layers(weight)
    axes += ['expert'] * (len(next(iter(places))) - len(axes))
    named = [
        ' '.join(f'{axis} {index}' for axis, index in zip(axes, place, strict=True))
        for place in sorted(places)
    ]
    rest = len(named) - _NAMED
    return ', '.join(named[:_NAMED]) + (f' and {rest} more' if rest > 0 else '')
