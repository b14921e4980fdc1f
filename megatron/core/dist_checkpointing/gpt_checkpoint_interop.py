"""Loads GPT distributed checkpoints into HybridModel runs, without converting them.

A GPT decoder layer is an attention and an MLP under one index; HybridModel gives each its own
layer (:mod:`gpt_layer_maps` says which reads what). Only where an entry is looked up changes: the
run's sharded state dict is pointed at the checkpoint's keys, and :func:`dist_checkpointing.load`
reads and reshards as for any other checkpoint. With the pattern ``M*-M*-``:

    decoder.layers.1.self_attention.linear_qkv.weight
        ->  decoder.layers.self_attention.linear_qkv.weight, layer 0 of 2 along a new first axis
    decoder.layers.5.mlp.linear_fc1.weight
        ->  decoder.layers.mlp.linear_fc1.weight, layer 1 of 2
    decoder.layers.0.mixer.in_proj.weight
        ->  not read

The state of an optimizer in a model-space format carries the parameters' keys and shards, so the
same functions serve it.

``megatron.training`` calls all this on ``--load``; by hand::

    layout = read_checkpoint_layout(directory)  # of checkpoint_layout
    layer_maps = gpt_compatible_layer_maps('M*-M*-', layout)
    request = model.sharded_state_dict()
    retarget_sharded_state_dict_to_gpt_checkpoint(request, layer_maps)
    model.load_state_dict(dist_checkpointing.load(request, directory))

Where attention is replaced, some layers of its tensors aren't read: pass ``load`` also
``validate_access_integrity=False``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

if __name__ == '__main__':
    if not __package__:  # by its path, in a checkout
        sys.path[0] = __file__.rsplit('/megatron/', 1)[0]
    try:
        from megatron_overlay.tools.checkpoint.gpt_into_hybrid import main
    except ModuleNotFoundError:
        # In a checkout the tools are beside the overlay's package, not below it.
        from tools.checkpoint.gpt_into_hybrid import main

    raise SystemExit(main())

import torch

from .checkpoint_keys import (
    DECODER,
    MAIN_PARAMS,
    Key,
    is_extra_state,
    is_parameter,
    mtp_stack,
    parse_key,
    without_module_prefix,
)
from .explicit_names import CheckpointNames
from .gpt_layer_maps import (
    _FRESH_INIT_SYMBOLS,
    _GPT_SOURCED_SYMBOLS,
    GPTCompatLayerMaps,
    gpt_compatible_layer_maps,
)
from .key_arguments import arguments_behind

if __name__.startswith('megatron.'):
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.layer_axis import (
        _prepend_gpt_layer_axis,
        chunk_of_one_layer,
    )
    from megatron.core.dist_checkpointing.mamba_from_attention import (
        attention_part,
        built_from_attention,
    )
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedBase,
        ShardedStateDict,
        ShardedTensorFactory,
    )

__all__ = [
    '_FRESH_INIT_SYMBOLS',
    '_GPT_SOURCED_SYMBOLS',
    '_prepend_gpt_layer_axis',
    'GPTCompatLayerMaps',
    'gpt_compatible_layer_maps',
    'is_partly_read',
    'retarget_fsdp_state_dict_to_gpt_checkpoint',
    'retarget_sharded_state_dict_to_gpt_checkpoint',
]

# A depth of multi-token prediction is one GPT layer, and in HybridModel a stack of its own; in
# `torch_dist` the two also differ in the name of what holds it.
_GPT_MTP_LAYER, _GPT_MTP_EXPLICIT_LAYER = 'transformer_layer.', 'mtp_model_layer.'
_GPT_FINAL_NORM_KEY_MAP = {'decoder.final_norm.': 'decoder.final_layernorm.'}
# GPTModel drops this empty entry of its output layer when it saves.
_GPT_OMITTED_LOCAL_KEYS = ('output_layer._extra_state',)


def retarget_sharded_state_dict_to_gpt_checkpoint(
    sharded_state_dict: ShardedStateDict, layer_maps: GPTCompatLayerMaps
) -> None:
    """Point a HybridModel's or its optimizer's sharded state dict at a GPT checkpoint, in place.

    Keys and sharding axes of the entries change; the nesting and the state dict's own names, which
    ``load_state_dict`` goes by, stay. Entries without a source become
    :class:`LocalNonpersistentObject`, so that they come back from the load as they are now.

    Args:
        sharded_state_dict: of one model chunk, or of an optimizer in a model-space format.
        layer_maps: of the pattern that the model was built from.

    Raises:
        ValueError: an entry belongs to a layer that the pattern doesn't have.
    """

    def retarget(entry):
        if not isinstance(entry, ShardedBase):
            return entry
        key = parse_key(entry.key)
        if key.decoder_layer is None:
            name = _outside_decoder_layers(key, layer_maps, _GPT_MTP_LAYER)
            if name is None:
                return LocalNonpersistentObject(entry.data)
            entry.key = key.prefix + name
            return entry
        part, gpt_layer = key.part, _gpt_layer_of(key, layer_maps)
        if gpt_layer is None:
            gpt_layer, part = _warm_start_of(key, layer_maps)
            if gpt_layer is None:
                return LocalNonpersistentObject(entry.data)
            if isinstance(entry, ShardedTensorFactory) and layer_maps.attention_sizes:
                entry = built_from_attention(entry, layer_maps.attention_sizes)
        if layer_maps.indexed:
            entry.key = f'{key.prefix}{DECODER}.{gpt_layer}.{part}'
            return entry
        entry.key = f'{key.prefix}{DECODER}.{part}'
        partly = is_partly_read(entry.key, layer_maps)
        stack = chunk_of_one_layer if partly else _prepend_gpt_layer_axis
        return stack(entry, gpt_layer, layer_maps.num_gpt_layers)

    dict_list_map_inplace(retarget, sharded_state_dict)


def is_partly_read(key: str, layer_maps: GPTCompatLayerMaps) -> bool:
    """Whether of the GPT checkpoint's ``key``, of any state, some layers may stay unread."""
    return layer_maps.may_be_partly_read(parse_key(key))


def _warm_start_of(key: Key, layer_maps: GPTCompatLayerMaps) -> tuple[int | None, str]:
    """GPT layer and part of its attention that an entry of a fresh layer begins with.

    None in place of the layer where it begins with nothing; so do moments.
    """
    source = attention_part(key.part)
    if key.layer is None or source is None or key.state not in (None, *MAIN_PARAMS):
        return None, ''
    return layer_maps.warm_start.get(key.layer), source


def retarget_fsdp_state_dict_to_gpt_checkpoint(
    state_dict: Mapping[Any, Any],
    layer_maps: GPTCompatLayerMaps,
    checkpoint_keys: Iterable[str] | None = None,
    checkpoint_prefix: str = '',
) -> dict[Any, Any]:
    """Rename an ``fsdp_dtensor`` model or optimizer state dict to a GPT checkpoint's keys.

    Names stay explicit there (``decoder.layers.<i>.…``), so the index is replaced and nothing is
    resharded. Parameter names are found at any depth of the mappings around them.

    Args:
        state_dict: the model's (parameter name -> DTensor) or the optimizer's (with ``state`` and
            ``param_to_group_meta``, below integer keys where optimizers are chained).
        layer_maps: of the pattern that the model was built from.
        checkpoint_keys: the checkpoint's flattened keys. When given, the number of ``module.``
            prefixes is the checkpoint's, every tensor of a parameter has to be among them, and
            other leaves that aren't (``_extra_state``, groups' settings) are left out.
        checkpoint_prefix: where ``state_dict`` stands in the flattened keys, such as ``model``.

    Returns:
        A new mapping of the same nesting, with the same leaf objects, without the entries that
        have no source.

    Raises:
        ValueError: a name belongs to a layer that the pattern doesn't have; the checkpoint lacks a
            tensor of a parameter, or has the parameter under several prefixes.
    """
    names = None
    if checkpoint_keys is not None:
        names = CheckpointNames(checkpoint_keys, checkpoint_prefix)

    def retarget(value, path, of_parameter):
        if not _is_nested(value):
            return value if is_stored(value, path, of_parameter) else _LEFT_OUT
        if not isinstance(value, Mapping):
            parts = [
                (part, retarget(part, f'{path}.{index}', of_parameter))
                for index, part in enumerate(value)
            ]
            return type(value)(old if new is _LEFT_OUT else new for old, new in parts)
        found = {}
        for key, child in value.items():
            new_key, of_this = key, of_parameter
            if isinstance(key, str) and '.' in key:
                new_key = _name_in_checkpoint(key, layer_maps, names, path)
                if new_key is None:
                    continue
                of_this = of_parameter or is_parameter(new_key)
            new_child = retarget(child, f'{path}.{new_key}' if path else str(new_key), of_this)
            if new_child is not _LEFT_OUT:
                found[new_key] = new_child
        return found

    def is_stored(leaf, path, of_parameter):
        if names is None or path in names.keys:
            return True
        if of_parameter and isinstance(leaf, torch.Tensor) and not is_extra_state(path):
            raise ValueError(
                f'{path}: the model needs it and the checkpoint does not have it, but '
                f'{names.nearest(path)}. '
                f'{arguments_behind([path], "--hybrid-layer-pattern")}'
            )
        return False

    return retarget(state_dict, checkpoint_prefix, False)


_LEFT_OUT = object()


def _is_nested(value: Any) -> bool:
    # The first check is the cheap one.
    return not isinstance(value, torch.Tensor) and isinstance(value, (Mapping, list, tuple))


def _retarget_explicit_key_to_gpt_checkpoint(
    key: Any, layer_maps: GPTCompatLayerMaps, checkpoint_keys: Iterable[str] | None = None
) -> Any | None:
    """Name that ``key`` has in the GPT checkpoint; None leaves the entry out.

    Keys that aren't strings, and strings that aren't parameter names, come back unchanged.

    Raises:
        ValueError: ``key`` belongs to a layer that the pattern doesn't have; the checkpoint has
            the parameter under several prefixes.
    """
    if not isinstance(key, str) or '.' not in key:
        return key
    names = None if checkpoint_keys is None else CheckpointNames(checkpoint_keys)
    return _name_in_checkpoint(key, layer_maps, names)


def _name_in_checkpoint(
    key: str, layer_maps: GPTCompatLayerMaps, names: CheckpointNames | None, path: str | None = None
) -> str | None:
    """The name with the checkpoint's layer and, where its names are known, its wrappers."""
    own = parse_key(key)
    if own.decoder_layer is None:
        name = _outside_decoder_layers(own, layer_maps, _GPT_MTP_EXPLICIT_LAYER)
    else:
        gpt_layer = _gpt_layer_of(own, layer_maps)
        name = None if gpt_layer is None else f'{DECODER}.{gpt_layer}.{own.part}'
    if name is None:
        return None
    key = own.prefix + name
    if names is None:
        return key
    bare = without_module_prefix(key)
    found = names.prefixes(bare, path)
    if len(found) > 1 and is_parameter(bare):
        raise ValueError(
            f'{bare}: the checkpoint has it under {len(found)} prefixes, '
            f'{" and ".join(sorted(found.values()))}, and only one can be meant. Load a '
            f'checkpoint that holds one model.'
        )
    return f'{next(iter(found))}{bare}' if len(found) == 1 else key


def _gpt_layer_of(key: Key, layer_maps: GPTCompatLayerMaps) -> int | None:
    hybrid_layer = key.decoder_layer
    if hybrid_layer is None or layer_maps.is_fresh_indexer(key.part):
        return None
    try:
        return layer_maps.gpt_layer(hybrid_layer)
    except KeyError:
        raise ValueError(
            f'State dict entry {key.prefix + key.name!r} belongs to hybrid layer {hybrid_layer}, '
            f'which is not part of the hybrid layer pattern; make the maps from the pattern of the '
            f'model.'
        ) from None


def _outside_decoder_layers(
    key: Key, layer_maps: GPTCompatLayerMaps, gpt_mtp_layer: str
) -> str | None:
    """The GPT model's name for an entry; None for one that it doesn't have."""
    if key.name in _GPT_OMITTED_LOCAL_KEYS:
        return None
    stack = mtp_stack(key)
    if stack is None:
        return renamed(key.name, _GPT_FINAL_NORM_KEY_MAP)
    layer, part = stack
    if layer >= len(layer_maps.mtp_pattern):
        raise ValueError(
            f'State dict entry {key.prefix + key.name!r} belongs to MTP layer {layer}, which is '
            f"not part of the hybrid layer pattern's MTP part; make the maps from the pattern of "
            f'the model.'
        )
    if layer_maps.mtp_pattern[layer] in _FRESH_INIT_SYMBOLS:
        return None
    return f'{key.block}.{key.layer}.{gpt_mtp_layer}{part}'


def renamed(name: str, beginnings: Mapping[str, str]) -> str:
    """``name``, with another beginning where it has one of these."""
    for old, new in beginnings.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
