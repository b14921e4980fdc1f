"""Mamba-2 layers that begin with the weights of the attention they replace.

Without softmax an attention is a Mamba-2 layer that forgets nothing: y_t = Σ_{s≤t} (C_t·B_s) x_s,
with the queries as C, the keys as B and the values as x (arXiv 2408.15237, section 2). In keys of
the two models:

    mixer.in_proj.weight  rows of x, B, C   <-  self_attention.linear_qkv.weight
    mixer.out_proj.weight                   <-  self_attention.linear_proj.weight
    norm before the layer                   <-  self_attention.linear_qkv.layer_norm_…

Rows of ``in_proj`` for gate (z) and step (dt), convolution, A, D and the gated norm have no
counterpart and stay as they are initialised. Heads that share keys and values in the attention get
a copy each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .checkpoint_keys import DECODER
from .checkpoint_layout import CheckpointLayout
from .gpt_layer_maps import REPLACE_ATTENTION, AttentionSizes, GPTCompatLayerMaps
from .pattern_symbols import Symbols

if __name__.startswith('megatron.'):
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

WARM_START = '--init-mamba-from-attention'
_IN_PROJ, _QKV = 'mixer.in_proj.weight', 'self_attention.linear_qkv.weight'
_NORM = 'self_attention.linear_qkv.layer_norm_'
# The norm is a part of the linear layer in Transformer Engine, and else a module.
_SOURCES = {
    _IN_PROJ: _QKV,
    'mixer.out_proj.weight': 'self_attention.linear_proj.weight',
    'norm.weight': f'{_NORM}weight',
    'norm.bias': f'{_NORM}bias',
    'mixer.in_proj.layer_norm_weight': f'{_NORM}weight',
    'mixer.in_proj.layer_norm_bias': f'{_NORM}bias',
}


def with_warm_start(
    layer_maps: GPTCompatLayerMaps, layout: CheckpointLayout, args: Any, query_groups: Any
) -> GPTCompatLayerMaps:
    """The maps, with the Mamba layers that begin with the attention in whose place they stand.

    Args:
        layer_maps: of the run's pattern.
        layout: of the checkpoint, with its keys as ``torch_dist`` has them.
        args: of the run.
        query_groups: groups of heads that share keys and values; None where it isn't known.

    Raises:
        ValueError: no Mamba layer, or more than one, stands in an attention's place; the sizes of
            the run's Mamba layers aren't those of the attention.
    """
    if layout.latent_attention:
        raise ValueError(
            f'{WARM_START}: multi-latent attention (MLA) has no queries, keys and values of one '
            f'size to begin with; leave it out.'
        )
    if getattr(args, 'attention_output_gate', None) is True:
        raise ValueError(
            f'{WARM_START}: a Mamba layer can not begin with an attention that has an output gate '
            f'(--attention-output-gate); leave it out.'
        )
    warm_start = dict(_mamba_layers(layer_maps))
    if not warm_start:
        raise ValueError(
            f'{WARM_START}: no Mamba layer of the pattern {layer_maps.symbols!r} stands in the '
            f'place of an attention (with {REPLACE_ATTENTION}, in a block without one); leave it '
            f'out.'
        )
    sizes = _attention_sizes(layer_maps, layout, args, query_groups)
    found = _mamba_sizes(args)
    fitting = {
        'mamba_num_heads': sizes.heads,
        'mamba_head_dim': sizes.channels,
        'mamba_state_dim': sizes.channels,
        'mamba_num_groups': sizes.heads,
    }
    if found != fitting:
        raise ValueError(
            f'{WARM_START}: the attention has {sizes.heads} heads of {sizes.channels} channels, '
            f'the Mamba layers have {found["mamba_num_heads"]} heads of '
            f'{found["mamba_head_dim"]}, states of {found["mamba_state_dim"]} and '
            f'{found["mamba_num_groups"]} groups; pass {_as_options(fitting)}.'
        )
    ranks = getattr(args, 'tensor_model_parallel_size', None)
    if isinstance(ranks, int) and ranks > 1 and sizes.query_groups % ranks:
        raise ValueError(
            f'{WARM_START}: {sizes.query_groups} groups of query heads can not be divided among '
            f'{ranks} tensor parallel ranks; pass a --tensor-model-parallel-size that divides '
            f'{sizes.query_groups}.'
        )
    return replace(layer_maps, warm_start=warm_start, attention_sizes=sizes)


def _mamba_layers(layer_maps: GPTCompatLayerMaps):
    for gpt, block in layer_maps.replaced.items():
        mamba = [hybrid for hybrid in block if layer_maps.symbols[hybrid] == Symbols.MAMBA]
        if len(mamba) > 1:
            raise ValueError(
                f'{WARM_START}: layers {mamba[0]} and {mamba[1]} both stand in the place of the '
                f'attention of GPT layer {gpt}, and one can begin with it; leave one Mamba layer '
                f'there.'
            )
        if mamba:
            yield mamba[0], gpt


def _attention_sizes(
    layer_maps: GPTCompatLayerMaps, layout: CheckpointLayout, args: Any, groups: Any
) -> AttentionSizes:
    heads: Any = getattr(args, 'num_attention_heads', None)
    hidden: Any = getattr(args, 'hidden_size', None)
    channels: Any = getattr(args, 'kv_channels', None)
    known = all(isinstance(number, int) and number > 0 for number in (heads, groups, hidden))
    if not known or not isinstance(channels, int | None):
        raise ValueError(
            f'{WARM_START}: no arguments say how many attention heads the checkpoint has and of '
            f'which size; expected --num-attention-heads and --hidden-size.'
        )
    channels = channels or hidden // heads
    rows = (heads + 2 * groups) * channels
    for gpt in layer_maps.replaced:
        key = f'{DECODER}.{f"{gpt}." if layout.indexed else ""}{_QKV}'
        shape = layout.sizes.get(key, ())
        if shape[-2:-1] != (rows,):
            raise ValueError(
                f'{WARM_START}: {key} has shape {tuple(shape)}, expected {rows} rows: the queries '
                f'of {heads} heads, the keys and values of {groups} groups, of {channels} channels '
                f'each. Give the run the --kv-channels of the one that saved it.'
            )
    return AttentionSizes(heads, groups, channels)


def _mamba_sizes(args: Any) -> dict[str, Any]:
    names = ('mamba_num_heads', 'mamba_head_dim', 'mamba_state_dim', 'mamba_num_groups')
    sizes: dict[str, Any] = {name: getattr(args, name, None) for name in names}
    head_dim = sizes['mamba_head_dim']
    if sizes['mamba_num_heads'] is None and isinstance(head_dim, int) and head_dim > 0:
        # MambaMixer's own rule
        sizes['mamba_num_heads'] = 2 * args.hidden_size // head_dim
    return sizes


def _as_options(sizes: dict[str, int]) -> str:
    return ' '.join(f'--{name.replace("_", "-")} {value}' for name, value in sizes.items())


def attention_part(part: str) -> str | None:
    """The attention's part from which a Mamba layer's ``part`` begins; None where it has none.

    Both are what follows the layer in a key.
    """
    return _SOURCES.get(part)


def built_from_attention(
    in_proj: ShardedTensorFactory, sizes: AttentionSizes
) -> ShardedTensorFactory:
    """A factory that asks for ``linear_qkv.weight`` and puts its rows into ``in_proj.weight``.

    Args:
        in_proj: MambaMixer's factory, whose parts are z, x, B, C and dt; of the weights or of main
            parameters of this rank.
        sizes: of the attention.

    Returns:
        a factory of one tensor under the same key, of shape ((heads + 2 * query_groups) *
        channels, hidden) over all tensor parallel ranks; it builds ``in_proj``'s data.
    """
    heads_per_group = sizes.heads // sizes.query_groups
    rows = (sizes.heads + 2 * sizes.query_groups) * sizes.channels
    parts = {part.key.rpartition('.')[2]: part for part in in_proj.build()}

    def build(key, data, replica_id, flattened_range):
        # heads of x lie on the ranks as the heads of the attention do
        x = parts['x']
        ranks = x.global_shape[0] // x.local_shape[0]
        rank = x.global_offset[0] // x.local_shape[0]
        qkv = torch.empty((rows // ranks, x.local_shape[1]), dtype=data.dtype, device=data.device)
        return ShardedTensor.from_rank_offsets(key, qkv, (0, rank, ranks), replica_id=replica_id)

    @torch.no_grad()
    def merge(qkv):
        # one query group after the other: its queries, its keys, its values
        groups = qkv.view(-1, heads_per_group + 2, sizes.channels, qkv_columns)
        queries, keys, values = groups.split([heads_per_group, 1, 1], dim=1)
        x, B = (shared.expand_as(queries).reshape(-1, qkv_columns) for shared in (values, keys))
        C = queries.reshape(-1, qkv_columns)
        return in_proj.merge_fn([parts['z'].data, x, B, C, parts['dt'].data])

    qkv_columns = parts['x'].local_shape[1]
    return ShardedTensorFactory(
        in_proj.key, in_proj.data, build, merge, in_proj.replica_id, in_proj.flattened_range
    )
