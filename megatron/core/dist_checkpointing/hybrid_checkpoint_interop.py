"""Loads hybrid distributed checkpoints into GPTModel runs, without converting them.

The way back of :mod:`gpt_checkpoint_interop`: where every layer of the hybrid model is an attention
or an MLP, as many of one as of the other, a GPT model holds the same weights. The GPT run's sharded
state dict, or its optimizer's in a model-space format, is pointed at the hybrid checkpoint's keys.
"""

from __future__ import annotations

from .checkpoint_keys import DECODER, is_optimizer_state, parse_key
from .checkpoint_layout import DENSE, MOE, CheckpointLayout
from .gpt_checkpoint_interop import (
    _GPT_FINAL_NORM_KEY_MAP,
    GPTCompatLayerMaps,
    gpt_compatible_layer_maps,
    renamed,
)
from .gpt_layer_maps import ATTENTION_PARTS

if __name__.startswith('megatron.'):
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.layer_axis import drop_layer_axis, layer_on_axis
    from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict

# The start of a layer's own key -> the symbol of a layer that has such a key; the first one counts.
_SYMBOL_BY_PART = {
    'mixer.': 'M',
    'self_attention.core_attention.indexer.': 'D',
    'self_attention.A_log': 'G',
    'self_attention.linear_kv_up_proj.': '+',
    'self_attention.linear_qkv.': '*',
}
_SYMBOL_BY_MLP_KIND = {DENSE: '-', MOE: 'E'}
_ATTENTION_SYMBOLS, _MLP_SYMBOLS = '*+', '-E'

_HYBRID_FINAL_NORM = {gpt: hybrid for hybrid, gpt in _GPT_FINAL_NORM_KEY_MAP.items()}
_MLP_PARTS = ('pre_mlp_layernorm.', 'mlp.')


def hybrid_checkpoint_pattern(layout: CheckpointLayout) -> str:
    """Pattern of the hybrid model behind a checkpoint, as its keys tell.

    Returns:
        one symbol a layer, without separators; ``?`` for a layer of no known kind.
    """
    parts: dict[int, set[str]] = {}
    for own in (parse_key(key) for key in layout.keys if not is_optimizer_state(key)):
        if own.decoder_layer is not None:
            parts.setdefault(own.decoder_layer, set()).add(own.part)
    return ''.join(
        _symbol(parts.get(layer, set()), layout.mlp_kinds.get(layer))
        for layer in range(layout.num_layers)
    )


def _symbol(parts: set[str], mlp_kind: str | None) -> str:
    symbols = [
        symbol
        for start, symbol in _SYMBOL_BY_PART.items()
        if any(part.startswith(start) for part in parts)
    ]
    if mlp_kind is None:
        return symbols[0] if symbols else '?'
    return '?' if symbols else _SYMBOL_BY_MLP_KIND[mlp_kind]


def hybrid_checkpoint_layer_maps(layout: CheckpointLayout) -> GPTCompatLayerMaps:
    """Pair the layers of a hybrid checkpoint with those of a GPT model.

    Args:
        layout: of the hybrid checkpoint, with its keys as ``torch_dist`` has them.

    Returns:
        the maps that ``gpt_compatible_layer_maps`` makes of the same pattern.

    Raises:
        ValueError: the hybrid model has an MTP part, layers that a GPT model doesn't have, or
            unequal or zero numbers of attention and MLP layers.
    """
    pattern = hybrid_checkpoint_pattern(layout)

    def refuse(reason: str) -> ValueError:
        return ValueError(
            f'The hybrid checkpoint, of layers {pattern!r}, can not go into a GPT model: {reason}.'
        )

    for index, symbol in enumerate(pattern):
        if symbol not in _ATTENTION_SYMBOLS + _MLP_SYMBOLS:
            raise refuse(
                f'nothing in a GPT layer takes its layer {index}, {symbol!r} '
                f'({pattern.count(symbol)} such layers)'
            )
    if layout.mtp_depths:
        raise refuse(f'its MTP part ({layout.mtp_depths} depths) has no place there')
    attention = [index for index, symbol in enumerate(pattern) if symbol in _ATTENTION_SYMBOLS]
    mlp = [index for index, symbol in enumerate(pattern) if symbol in _MLP_SYMBOLS]
    if not attention or len(attention) != len(mlp):
        raise refuse(
            f'a GPT layer has one attention and one MLP, but the checkpoint has {len(attention)} '
            f'attention and {len(mlp)} MLP layers'
        )
    return GPTCompatLayerMaps(
        attention_to_gpt={hybrid: gpt for gpt, hybrid in enumerate(attention)},
        mlp_to_gpt={hybrid: gpt for gpt, hybrid in enumerate(mlp)},
        fresh_init=frozenset(),
        num_gpt_layers=len(attention),
        symbols=pattern,
    )


def is_pattern_of_gpt_layers(hybrid_layer_pattern: str | None, num_layers: int | None) -> bool:
    """Whether a hybrid model of the pattern makes a GPT model of ``num_layers`` layers."""
    symbols = {ord('+'): '*', ord('E'): '-'}
    try:
        layer_maps = gpt_compatible_layer_maps((hybrid_layer_pattern or '').translate(symbols))
    except ValueError:
        return False
    return not layer_maps.fresh_init and layer_maps.num_gpt_layers == num_layers


def retarget_sharded_state_dict_to_hybrid_checkpoint(
    sharded_state_dict: ShardedStateDict, layer_maps: GPTCompatLayerMaps
) -> None:
    """Point a GPTModel's or its optimizer's sharded state dict at a hybrid checkpoint, in place.

    Keys and sharding axes of the entries change; the nesting and the state dict's own names, which
    ``load_state_dict`` goes by, stay. Layers can stand as the leading axis or in the key.

    Args:
        sharded_state_dict: of one model chunk, or of an optimizer in a model-space format.
        layer_maps: of the hybrid checkpoint.

    Raises:
        ValueError: an entry belongs to a layer, or to a part of one, that the checkpoint's layers
            don't have.
    """
    attention = {gpt: hybrid for hybrid, gpt in layer_maps.attention_to_gpt.items()}
    mlp = {gpt: hybrid for hybrid, gpt in layer_maps.mlp_to_gpt.items()}

    def retarget(entry):
        if not isinstance(entry, ShardedBase):
            return entry
        key = parse_key(entry.key)
        if key.block != DECODER:
            entry.key = key.prefix + renamed(key.name, _HYBRID_FINAL_NORM)
            return entry
        if key.part.startswith(ATTENTION_PARTS):
            hybrid_layers = attention
        elif key.part.startswith(_MLP_PARTS):
            hybrid_layers = mlp
        else:
            raise ValueError(
                f'State dict entry {entry.key!r} belongs neither to the attention nor to the MLP '
                f'of its layer, and hybrid layers have nothing else.'
            )
        on_axis = key.layer is None
        gpt_layer = layer_on_axis(entry) if on_axis else key.layer
        if gpt_layer not in hybrid_layers:
            raise ValueError(
                f'State dict entry {entry.key!r} belongs to GPT layer {gpt_layer}, and the hybrid '
                f'checkpoint has {len(hybrid_layers)}.'
            )
        entry.key = f'{key.prefix}{DECODER}.{hybrid_layers[gpt_layer]}.{key.part}'
        return drop_layer_axis(entry) if on_axis else entry

    dict_list_map_inplace(retarget, sharded_state_dict)
