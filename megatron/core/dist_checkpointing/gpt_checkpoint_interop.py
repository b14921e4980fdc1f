"""Loads GPT distributed checkpoints into HybridModel runs, without converting them.

A GPT decoder layer is an attention and an MLP under one index; HybridModel gives each its own
layer. The i-th attention position of a hybrid pattern reads GPT layer i's attention, the i-th MLP
position its MLP, and a Mamba position reads nothing. Only where an entry is looked up changes: the
run's sharded state dict is pointed at the checkpoint's keys, and :func:`dist_checkpointing.load`
reads and reshards as for any other checkpoint.

The state of an optimizer in a model-space format carries the parameters' keys and shards, so the
same functions serve it.
"""

import bisect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.checkpoint_layout import DENSE, MOE, CheckpointLayout
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
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

_WEIGHT_PREFIXES = ('decoder.', 'embedding.', 'output_layer.')

# `fsdp_dtensor` keys: the mappings around a parameter's name, then its wrappers.
_EXPLICIT_CONTAINER_RE = re.compile(
    r'^(?:(?:model\d*|optimizer\d*|state|param_to_group_meta|\d+)\.)*((?:module\.)*)'
)
_MODULE_PREFIX_RE = re.compile(r'^(?:module\.)+')


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


def check_sources(sharded_state_dict: ShardedStateDict, layout: CheckpointLayout) -> None:
    """Make sure that model and checkpoint have the same weights, before anything is read.

    Loading can be told to pass over what is missing on either side; here a missing source would
    leave a weight random, and a weight that nothing reads means another architecture (untied
    output layer, learned positions). All ranks have to call this, and all of them raise.

    Args:
        sharded_state_dict: retargeted, of this rank's model chunks and, if wanted, optimizer.
        layout: of the checkpoint.

    Raises:
        CheckpointingException: an entry has no source, or no rank reads a weight.
    """
    requested = set(_tensor_keys(sharded_state_dict))
    missing = sorted(requested - layout.keys)
    weights = sorted(
        key
        for key in layout.keys
        if key.startswith(_WEIGHT_PREFIXES) and not key.endswith('_extra_state')
    )
    unread = torch.tensor([key not in requested for key in weights], dtype=torch.uint8)
    failed = torch.tensor([not missing], dtype=torch.uint8)
    agreed = torch.cat([unread, failed])
    if torch.distributed.is_initialized():
        if torch.distributed.get_backend() == 'nccl':
            agreed = agreed.cuda()
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN)
    *unread, complete = agreed.tolist()
    if missing:
        raise CheckpointingException(
            f'{missing[0]}: the model needs it and the checkpoint does not have it '
            f'({len(missing)} such keys). Check --hybrid-layer-pattern, the tied or untied '
            f'embeddings and the MLP kind, or pass --no-load-optim if it is optimizer state.'
        )
    if not complete:
        raise CheckpointingException('Another rank found entries that the checkpoint lacks.')
    left_out = [key for key, is_unread in zip(weights, unread, strict=True) if is_unread]
    if left_out:
        raise CheckpointingException(
            f'{left_out[0]}: the checkpoint has it and nothing in the model reads it '
            f"({len(left_out)} such keys). Give the run the GPT run's arguments, such as "
            f'--untie-embeddings-and-output-weights or --position-embedding-type.'
        )


def _tensor_keys(sharded_state_dict: ShardedStateDict):
    for entry in nested_values(sharded_state_dict):
        if isinstance(entry, ShardedTensorFactory):
            yield from _tensor_keys({'built': entry.build()})
        elif isinstance(entry, ShardedTensor):
            yield entry.key


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
            prefixes is the checkpoint's, and leaves that it doesn't have are left out.
        checkpoint_prefix: where ``state_dict`` stands in the flattened keys, such as ``model``.

    Returns:
        A new mapping of the same nesting, with the same leaf objects, without the entries that
        have no source.

    Raises:
        ValueError: a name belongs to a layer that the pattern doesn't have.
    """
    names = None if checkpoint_keys is None else _CheckpointNames(checkpoint_keys)

    def retarget(value, path):
        if isinstance(value, Mapping):
            renamed = {}
            for key, child in value.items():
                new_key = _retarget_explicit_key_to_gpt_checkpoint(key, layer_maps, names)
                if new_key is None:
                    continue
                child_path = f'{path}.{new_key}' if path else str(new_key)
                is_leaf = not isinstance(child, (Mapping, list, tuple))
                if is_leaf and names is not None and child_path not in names.keys:
                    continue
                renamed[new_key] = retarget(child, child_path)
            return renamed
        if isinstance(value, (list, tuple)):
            return type(value)(retarget(child, f'{path}.{i}') for i, child in enumerate(value))
        return value

    return retarget(state_dict, checkpoint_prefix)


def _retarget_explicit_key_to_gpt_checkpoint(
    key: Any, layer_maps: GPTCompatLayerMaps, checkpoint_keys: 'Iterable[str] | None' = None
) -> Any | None:
    """Name that ``key`` has in the GPT checkpoint; None leaves the entry out.

    Keys that aren't strings, and strings that aren't parameter names, come back unchanged.
    """
    if not isinstance(key, str):
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
    if not isinstance(checkpoint_keys, _CheckpointNames):
        checkpoint_keys = _CheckpointNames(checkpoint_keys)
    return checkpoint_keys.with_own_module_prefix(key)


class _CheckpointNames:
    """The ``module.`` prefixes that a checkpoint stores its parameters under.

    GPTModel and HybridModel can be wrapped to different depths. Looking up a name takes a binary
    search, since optimizer state has further levels below the parameter's name.

    Attributes:
        keys: the checkpoint's flattened keys.
    """

    def __init__(self, keys: Iterable[str]):
        self.keys = frozenset(keys)
        names: dict[str, set[str]] = {}
        for key in self.keys:
            container = _EXPLICIT_CONTAINER_RE.match(key)
            names.setdefault(container.group(1), set()).add(key[container.end() :])
        self._sorted_names = {prefix: sorted(found) for prefix, found in names.items()}

    def with_own_module_prefix(self, key: str) -> str:
        """``key`` with the checkpoint's prefix where that is known and unique."""
        bare = _MODULE_PREFIX_RE.sub('', key)
        prefixes = [
            prefix
            for prefix, names in self._sorted_names.items()
            if _starts_any(names, bare, '') or _starts_any(names, bare, '.')
        ]
        return prefixes[0] + bare if len(prefixes) == 1 else key


def _starts_any(sorted_names: list[str], name: str, separator: str) -> bool:
    position = bisect.bisect_left(sorted_names, name + separator)
    if position == len(sorted_names):
        return False
    found = sorted_names[position]
    return found.startswith(name + separator) if separator else found == name


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
