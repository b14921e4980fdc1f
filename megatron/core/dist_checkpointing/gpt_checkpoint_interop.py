"""Loads GPT distributed checkpoints into HybridModel runs, without converting them.

A GPT decoder layer is an attention and an MLP under one index; HybridModel gives each its own
layer. The i-th attention position of a hybrid pattern reads GPT layer i's attention, the i-th MLP
position its MLP, and a Mamba position reads nothing. Only where an entry is looked up changes: the
run's sharded state dict is pointed at the checkpoint's keys, and :func:`dist_checkpointing.load`
reads and reshards as for any other checkpoint.

The state of an optimizer in a model-space format carries the parameters' keys and shards, so the
same functions serve it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.checkpoint_layout import (
    DENSE,
    MOE,
    WEIGHT_PREFIXES,
    CheckpointLayout,
)
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.explicit_names import MODULE_PREFIX_RE, CheckpointNames
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, parse_hybrid_pattern

_MLP_KINDS = {Symbols.MLP: DENSE, Symbols.MOE: MOE}
_MLP_SYMBOLS = tuple(_MLP_KINDS)
_GPT_SOURCED_SYMBOLS = (Symbols.ATTENTION, *_MLP_SYMBOLS)
_FRESH_INIT_SYMBOLS = (Symbols.MAMBA,)
# HybridModel has it since megatron-core 0.19.
_LATENT_ATTENTION_SYMBOL = '+'

# What may stand before the decoder's own names: wrappers, and the prefixes that optimizers give
# their state. Anything else is another model (`vision_model.decoder.layers.…`).
_OWN_PREFIX = r'^(?:(?:module|model\d*|chained_\d+|optimizer\.state\.[^.]+)\.)*'
_OWN_PREFIX_RE = re.compile(_OWN_PREFIX)
_DECODER_LAYER_KEY_RE = re.compile(_OWN_PREFIX + r'decoder\.layers\.(\d+)\.')
_GPT_FINAL_NORM_KEY_MAP = {'decoder.final_norm.': 'decoder.final_layernorm.'}
# GPTModel drops this empty entry of its output layer when it saves.
_GPT_OMITTED_LOCAL_KEYS = ('output_layer._extra_state',)

# Distributed optimizer formats that store state by parameter.
MODEL_SPACE_FORMATS = ('fully_reshardable', 'fully_sharded_model_space')


@dataclass(frozen=True)
class GPTCompatLayerMaps:
    """Which GPT layer each layer of a hybrid pattern reads.

    Layer indices are global (over all pipeline stages) and count from 0.

    Attributes:
        attention_to_gpt: hybrid layer of the i-th attention position -> i.
        mlp_to_gpt: hybrid layer of the i-th MLP position, dense or MoE -> i.
        fresh_init: hybrid layers that keep their initialisation.
        num_gpt_layers: layers of the GPT checkpoint.
        indexed: the checkpoint stores the layer as an index in the key, as GPTModel does for
            layers that differ from one another, instead of as the leading axis.
    """

    attention_to_gpt: Mapping[int, int]
    mlp_to_gpt: Mapping[int, int]
    fresh_init: frozenset[int]
    num_gpt_layers: int
    indexed: bool = False

    def gpt_layer(self, hybrid_layer: int) -> int | None:
        """GPT layer that ``hybrid_layer`` reads; None for a layer that starts fresh.

        Raises:
            KeyError: the pattern has no such layer.
        """
        if hybrid_layer in self.fresh_init:
            return None
        if hybrid_layer in self.attention_to_gpt:
            return self.attention_to_gpt[hybrid_layer]
        return self.mlp_to_gpt[hybrid_layer]


def gpt_compatible_layer_maps(
    hybrid_layer_pattern: str, layout: CheckpointLayout | None = None
) -> GPTCompatLayerMaps:
    """Pair the layers of a hybrid pattern with those of a GPT model.

    Args:
        hybrid_layer_pattern: as in ``--hybrid-layer-pattern``; ``|`` separators don't matter.
        layout: of the checkpoint, where it is known. Its layers then have to be of the kinds that
            the pattern asks for, which also allows patterns that mix dense and MoE MLPs, and
            multi-latent attention (``+``).

    Raises:
        ValueError: the pattern is empty or None, has an MTP part, has a symbol that GPT layers
            can't provide, mixes dense and MoE MLPs, has unequal or zero numbers of attention and
            MLP positions, or differs from ``layout``.
    """

    def refuse(reason: str) -> ValueError:
        return ValueError(
            f'Hybrid layer pattern {hybrid_layer_pattern!r} can not take a GPT checkpoint: {reason}'
        )

    if not hybrid_layer_pattern:
        raise refuse('it is empty; set --hybrid-layer-pattern.')
    try:
        parsed = parse_hybrid_pattern(hybrid_layer_pattern)
    except ValueError as error:
        raise refuse(str(error)) from error
    if parsed.mtp_num_depths:
        raise refuse(f'its MTP part {parsed.mtp_pattern!r} has no source; leave that part out.')
    symbols = (parsed.main_pattern or '').replace(Symbols.PIPE, '')
    if not symbols:
        raise refuse('it has no layers; set --hybrid-layer-pattern.')
    latent = layout is not None and layout.latent_attention
    attention_symbol = _LATENT_ATTENTION_SYMBOL if latent else Symbols.ATTENTION
    supported = [attention_symbol, *_MLP_SYMBOLS, *_FRESH_INIT_SYMBOLS]
    strangers = sorted(set(symbols).difference(supported))
    if strangers:
        raise refuse(f'no layer of it provides {strangers}; supported are {supported}.')
    if all(kind in symbols for kind in _MLP_SYMBOLS) and not (layout and layout.indexed):
        raise refuse("it mixes dense ('-') and MoE ('E') MLPs, GPT layers are all alike.")
    attention = [i for i, symbol in enumerate(symbols) if symbol == attention_symbol]
    mlp = [i for i, symbol in enumerate(symbols) if symbol in _MLP_SYMBOLS]
    if not attention or len(attention) != len(mlp):
        raise refuse(
            f'a GPT layer has one attention and one MLP, but the pattern has {len(attention)} '
            f"attention ({attention_symbol!r}) and {len(mlp)} MLP ('-' or 'E') positions."
        )
    if layout is not None:
        if layout.num_layers != len(attention):
            raise refuse(
                f'it has {len(attention)} attention and MLP positions, the checkpoint '
                f'{layout.num_layers} layers.'
            )
        for gpt, hybrid in enumerate(mlp):
            kind = layout.mlp_kinds.get(gpt)
            if kind != _MLP_KINDS[symbols[hybrid]]:
                raise refuse(
                    f'its layer {hybrid} is {symbols[hybrid]!r}, the MLP of GPT layer {gpt} is '
                    f'{kind or "missing"}.'
                )
    return GPTCompatLayerMaps(
        attention_to_gpt={hybrid: gpt for gpt, hybrid in enumerate(attention)},
        mlp_to_gpt={hybrid: gpt for gpt, hybrid in enumerate(mlp)},
        fresh_init=frozenset(
            i for i, symbol in enumerate(symbols) if symbol in _FRESH_INIT_SYMBOLS
        ),
        num_gpt_layers=len(attention),
        indexed=layout is not None and layout.indexed,
    )


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
        if _own_name(entry.key) in _GPT_OMITTED_LOCAL_KEYS:
            return LocalNonpersistentObject(entry.data)
        layer = _DECODER_LAYER_KEY_RE.match(entry.key)
        if layer is None:
            entry.key = _rename_final_norm(entry.key)
            return entry
        gpt_layer = _gpt_layer_of(layer, entry.key, layer_maps)
        if gpt_layer is None:
            return LocalNonpersistentObject(entry.data)
        before, after = entry.key[: layer.start(1)], entry.key[layer.end() :]
        if layer_maps.indexed:
            entry.key = f'{before}{gpt_layer}.{after}'
            return entry
        entry.key = before + after
        return _prepend_gpt_layer_axis(entry, gpt_layer, layer_maps.num_gpt_layers)

    dict_list_map_inplace(retarget, sharded_state_dict)


def _prepend_gpt_layer_axis(entry, gpt_layer_idx: int, num_gpt_layers: int):
    """Make ``entry`` shard ``gpt_layer_idx`` along a new leading axis of ``num_gpt_layers``.

    Args:
        entry: a ShardedTensor of global shape (…), which becomes (num_gpt_layers, …); a
            ShardedObject, whose ``(1,)`` placeholder shape the layer axis replaces; or a
            ShardedTensorFactory, which then builds entries so changed.

    Returns:
        ``entry``, changed in place.
    """
    if isinstance(entry, ShardedTensor):
        entry.axis_fragmentations = (num_gpt_layers, *entry.axis_fragmentations)
        entry.prepend_axis_num += 1
    elif isinstance(entry, ShardedTensorFactory):
        build_without_layer_axis = entry.build_fn

        def build(key, data, replica_id, flattened_range):
            built = build_without_layer_axis(key, data, replica_id, flattened_range)
            return dict_list_map_inplace(
                lambda part: _prepend_gpt_layer_axis(part, gpt_layer_idx, num_gpt_layers), built
            )

        entry.build_fn = build
        return entry
    elif not isinstance(entry, ShardedObject):
        return entry
    elif (entry.global_shape, entry.global_offset) == ((1,), (0,)):
        entry.global_shape, entry.global_offset = (), ()
    entry.global_shape = (num_gpt_layers, *entry.global_shape)
    entry.global_offset = (gpt_layer_idx, *entry.global_offset)
    return entry


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
        if isinstance(value, Mapping):
            renamed = {}
            for key, child in value.items():
                new_key = _retarget_explicit_key_to_gpt_checkpoint(key, layer_maps)
                if new_key is None:
                    continue
                child_of_parameter = of_parameter or _is_parameter_name(new_key)
                if names is not None and isinstance(new_key, str) and '.' in new_key:
                    new_key = _with_checkpoint_prefix(new_key, names, path)
                child_path = f'{path}.{new_key}' if path else str(new_key)
                if _is_nested(child) or is_stored(child, child_path, child_of_parameter):
                    renamed[new_key] = retarget(child, child_path, child_of_parameter)
            return renamed
        if isinstance(value, (list, tuple)):
            children = [(child, f'{path}.{index}') for index, child in enumerate(value)]
            for child, child_path in children:
                if isinstance(child, torch.Tensor):
                    is_stored(child, child_path, of_parameter)
            return type(value)(retarget(*child, of_parameter) for child in children)
        return value

    def is_stored(leaf, path, of_parameter):
        if names is None or path in names.keys:
            return True
        if of_parameter and isinstance(leaf, torch.Tensor) and not path.endswith('_extra_state'):
            raise ValueError(
                f'{path}: the model needs it and the checkpoint does not have it, but '
                f'{names.nearest(path)}. Check --hybrid-layer-pattern, the tied or untied '
                f'embeddings and the MLP kind, or pass --no-load-optim if it is optimizer state.'
            )
        return False

    return retarget(state_dict, checkpoint_prefix, False)


def _is_nested(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple))


def _is_parameter_name(key: Any) -> bool:
    return isinstance(key, str) and _own_name(key).startswith(WEIGHT_PREFIXES)


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
    if _own_name(key) in _GPT_OMITTED_LOCAL_KEYS:
        return None
    layer = _DECODER_LAYER_KEY_RE.match(key)
    if layer is not None:
        gpt_layer = _gpt_layer_of(layer, key, layer_maps)
        if gpt_layer is None:
            return None
        key = f'{key[: layer.start(1)]}{gpt_layer}.{key[layer.end() :]}'
    else:
        key = _rename_final_norm(key)
    if checkpoint_keys is None:
        return key
    return _with_checkpoint_prefix(key, CheckpointNames(checkpoint_keys))


def _with_checkpoint_prefix(key: str, names: CheckpointNames, path: str | None = None) -> str:
    bare = MODULE_PREFIX_RE.sub('', key)
    found = names.prefixes(bare, path)
    if len(found) > 1 and _is_parameter_name(bare):
        raise ValueError(
            f'{bare}: the checkpoint has it under {len(found)} prefixes, '
            f'{" and ".join(sorted(found.values()))}, and only one can be meant. Load a '
            f'checkpoint that holds one model.'
        )
    return f'{next(iter(found))}{bare}' if len(found) == 1 else key


def _gpt_layer_of(layer: re.Match, key: str, layer_maps: GPTCompatLayerMaps) -> int | None:
    hybrid_layer = int(layer.group(1))
    try:
        return layer_maps.gpt_layer(hybrid_layer)
    except KeyError:
        raise ValueError(
            f'State dict entry {key!r} belongs to hybrid layer {hybrid_layer}, which the maps '
            f'do not have; make them from the pattern that the model was built from.'
        ) from None


def _own_name(key: str) -> str:
    return key[_OWN_PREFIX_RE.match(key).end() :]


def _rename_final_norm(key: str) -> str:
    name = _own_name(key)
    for hybrid, gpt in _GPT_FINAL_NORM_KEY_MAP.items():
        if name.startswith(hybrid):
            return key.removesuffix(name) + gpt + name.removeprefix(hybrid)
    return key


if __name__ == '__main__':
    try:
        from megatron_overlay.tools.checkpoint.gpt_into_hybrid import main
    except ModuleNotFoundError:
        # In a checkout the tools are beside the overlay's package, not below it.
        from tools.checkpoint.gpt_into_hybrid import main

    raise SystemExit(main())
