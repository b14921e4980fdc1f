"""Entries of one layer as parts of tensors that have the layers along their first axis."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)


def _prepend_gpt_layer_axis(entry, gpt_layer_idx: int, num_gpt_layers: int):
    """Make ``entry`` shard ``gpt_layer_idx`` along a new leading axis of ``num_gpt_layers``.

    Args:
        entry: a ShardedTensor of global shape (…), which becomes (num_gpt_layers, …); a
            ShardedObject, whose ``(1,)`` placeholder shape the layer axis replaces; or a
            ShardedTensorFactory, which then builds entries so changed.

    Returns:
        ``entry``, changed in place.
    """
    if isinstance(entry, ShardedTensorFactory):
        return _change_what_is_built(
            entry, lambda part: _prepend_gpt_layer_axis(part, gpt_layer_idx, num_gpt_layers)
        )
    if isinstance(entry, ShardedTensor):
        entry.axis_fragmentations = (num_gpt_layers,) + tuple(entry.axis_fragmentations)
        entry.prepend_axis_num = entry.prepend_axis_num + 1
    elif not isinstance(entry, ShardedObject):
        return entry
    elif (entry.global_shape, entry.global_offset) == ((1,), (0,)):
        entry.global_shape, entry.global_offset = (), ()
    entry.global_shape = (num_gpt_layers,) + tuple(entry.global_shape)
    entry.global_offset = (gpt_layer_idx,) + tuple(entry.global_offset)
    return entry


def layer_on_axis(entry: ShardedBase) -> int:
    """The layer that an entry is of, by its place along the first axis."""
    if isinstance(entry, ShardedTensorFactory):
        parts = nested_values({'built': entry.build()})
        return layer_on_axis(next(part for part in parts if isinstance(part, ShardedBase)))
    return entry.global_offset[0]


def drop_layer_axis(entry):
    """Undo ``_prepend_gpt_layer_axis``; what a factory builds gets the same. In place."""
    if isinstance(entry, ShardedTensorFactory):
        return _change_what_is_built(entry, drop_layer_axis)
    if isinstance(entry, (ShardedTensor, ShardedObject)):
        entry.global_shape = entry.global_shape[1:]
        entry.global_offset = entry.global_offset[1:]
        if isinstance(entry, ShardedTensor):
            entry.axis_fragmentations = entry.axis_fragmentations[1:]
            entry.prepend_axis_num -= 1
        elif not entry.global_shape:
            # an object without axes has a placeholder
            entry.global_shape, entry.global_offset = (1,), (0,)
    return entry


def _change_what_is_built(factory: ShardedTensorFactory, change: Callable) -> ShardedTensorFactory:
    build = factory.build_fn
    factory.build_fn = lambda *args: dict_list_map_inplace(change, build(*args))
    return factory


def chunk_of_one_layer(entry: ShardedBase, gpt_layer: int, num_gpt_layers: int) -> ShardedBase:
    """``entry``, asking for one layer of a tensor of which other layers may stay unread.

    For an axis that isn't in the data megatron makes a torch ShardedTensor, and that wants all
    shards from the ranks together. Here the data has the axis, with one element.

    Args:
        entry: as for :func:`_prepend_gpt_layer_axis`.

    Returns:
        a factory, where ``entry`` is of tensors; it gives back what ``entry`` did.
    """
    if isinstance(entry, ShardedTensor):
        whole = ShardedTensorFactory(
            entry.key, entry.data, _same_shard(entry), lambda loaded: loaded, entry.replica_id
        )
        return chunk_of_one_layer(whole, gpt_layer, num_gpt_layers)
    if not isinstance(entry, ShardedTensorFactory):
        return _prepend_gpt_layer_axis(entry, gpt_layer, num_gpt_layers)

    def with_axis(part: Any) -> Any:
        if not isinstance(part, ShardedTensor):
            return part
        return replace(
            part,
            data=part.data.unsqueeze(0),
            local_shape=(1, *part.local_shape),
            global_shape=(num_gpt_layers, *part.global_shape),
            global_offset=(gpt_layer, *part.global_offset),
            axis_fragmentations=(num_gpt_layers, *part.axis_fragmentations),
        )

    def without_axis(part: Any) -> Any:
        return part.squeeze(0) if isinstance(part, torch.Tensor) else part

    def build(*args):
        return dict_list_map_inplace(with_axis, entry.build_fn(*args))

    def merge(loaded):
        return entry.merge_fn(dict_list_map_inplace(without_axis, loaded))

    return replace(entry, build_fn=build, merge_fn=merge)


def _same_shard(entry: ShardedTensor):
    shard = entry.without_data()

    def build(key, data, replica_id, flattened_range):
        return replace(shard, key=key, data=data, dtype=data.dtype, replica_id=replica_id)

    return build
