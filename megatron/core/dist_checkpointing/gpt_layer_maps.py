"""Which layer of a GPT model each layer of a hybrid pattern corresponds to.

A pattern is taken apart into symbols, the symbols are paired with GPT layers, and the pairs are
compared with the layers of a checkpoint:

    pattern                        '*-*-'    'M-*-', with attention replaced
    GPT layer 0: attention, MLP     0, 1      none (0 in its place), 1
    GPT layer 1: attention, MLP     2, 3      2, 3
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .checkpoint_keys import DECODER, Key, parse_key
from .checkpoint_layout import DENSE, MOE, CheckpointLayout
from .pattern_symbols import ParsedHybridPattern, Symbols, parse_hybrid_pattern

_MLP_KINDS = {Symbols.MLP: DENSE, Symbols.MOE: MOE}
_MLP_SYMBOLS = tuple(_MLP_KINDS)
_GPT_SOURCED_SYMBOLS = (Symbols.ATTENTION, *_MLP_SYMBOLS)
_FRESH_INIT_SYMBOLS = (Symbols.MAMBA, Symbols.GDN)
# HybridModel has the first since megatron-core 0.19. The second has an indexer beside it.
_LATENT_ATTENTION_SYMBOLS = ('+', Symbols.DS_ATTENTION)
_INDEXER = 'self_attention.core_attention.indexer.'

# How keys of a GPT layer's attention go on, and of the input norm where that stands alone.
ATTENTION_PARTS = ('input_layernorm.', 'self_attention.')
REPLACE_ATTENTION = '--replace-gpt-attention'


@dataclass(frozen=True)
class AttentionSizes:
    """Of a GPT model's attention: heads, groups of them that share keys and values, channels."""

    heads: int
    query_groups: int
    channels: int


@dataclass(frozen=True)
class GPTCompatLayerMaps:
    """Which GPT layer each layer of a hybrid pattern reads.

    Layer indices are global (over all pipeline stages) and count from 0.

    Attributes:
        attention_to_gpt: hybrid layer of an attention position -> its GPT layer.
        mlp_to_gpt: hybrid layer of the i-th MLP position, dense or MoE -> i.
        fresh_init: hybrid layers that keep their initialisation; of those in ``warm_start``, what
            an attention doesn't have.
        num_gpt_layers: layers of the GPT checkpoint.
        indexed: the checkpoint stores the layer as an index in the key, as GPTModel does for
            layers that differ from one another, instead of as the leading axis.
        mtp_pattern: layers of each multi-token prediction depth, one attention, one MLP and any
            that start fresh; empty where the depths aren't paired.
        mtp_depths: how many such depths the pattern has.
        symbols: of the pattern's layers.
        replaced: GPT layer whose attention has no position -> the hybrid layers in its place.
        fresh_indexers: indexers of sparse attention, which the checkpoint doesn't have.
        warm_start: hybrid Mamba layer -> GPT layer whose attention it begins with.
        attention_sizes: of that attention.
    """

    attention_to_gpt: Mapping[int, int]
    mlp_to_gpt: Mapping[int, int]
    fresh_init: frozenset[int]
    num_gpt_layers: int
    indexed: bool = False
    mtp_pattern: str = ''
    mtp_depths: int = 0
    symbols: str = field(default='', compare=False)
    replaced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    fresh_indexers: bool = False
    warm_start: Mapping[int, int] = field(default_factory=dict)
    attention_sizes: AttentionSizes | None = None

    @property
    def keeps_gpt_order(self) -> bool:
        """Whether the layers with a source are computed as in GPT, each MLP after its attention."""
        # an attention comes before the MLP of the same GPT layer
        places = [(gpt, 0, hybrid) for hybrid, gpt in self.attention_to_gpt.items()]
        places += [(gpt, 1, hybrid) for hybrid, gpt in self.mlp_to_gpt.items()]
        in_gpt_order = [hybrid for _, _, hybrid in sorted(places)]
        of_mtp = [symbol for symbol in self.mtp_pattern if symbol not in _FRESH_INIT_SYMBOLS]
        mtp_begins_with_mlp = bool(of_mtp) and of_mtp[0] in _MLP_SYMBOLS
        return in_gpt_order == sorted(in_gpt_order) and not mtp_begins_with_mlp

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

    def is_fresh_indexer(self, part: str) -> bool:
        """Whether ``part``, the rest of a key after the layer, is of an indexer without source."""
        return self.fresh_indexers and part.startswith(_INDEXER)

    def may_be_partly_read(self, key: Key) -> bool:
        """Whether of the GPT checkpoint's weight ``key`` some layers are read and others not."""
        return bool(self.replaced) and key.layer is None and _is_of_attention(key)

    def may_be_unread(self, key: str) -> bool:
        """Whether nothing needs to read the GPT checkpoint's weight ``key``."""
        own = parse_key(key)
        if own.prefix or not _is_of_attention(own):
            return False
        if not self.indexed:
            return 0 < len(self.replaced) == self.num_gpt_layers
        return own.layer in self.replaced


def _is_of_attention(key: Key) -> bool:
    return key.block == DECODER and key.part.startswith(ATTENTION_PARTS)


class _PatternRefusedError(Exception):
    pass


def gpt_compatible_layer_maps(
    hybrid_layer_pattern: str,
    layout: CheckpointLayout | None = None,
    replace_attention: bool = False,
) -> GPTCompatLayerMaps:
    """Pair the layers of a hybrid pattern with those of a GPT model.

    With as many attention as MLP positions the i-th of each is GPT layer i's. With fewer, each MLP
    ends a block, and the i-th block is GPT layer i's.

    Args:
        hybrid_layer_pattern: as in ``--hybrid-layer-pattern``; ``|`` separators don't matter.
        layout: of the checkpoint, where it is known. Its layers then have to be of the kinds that
            the pattern asks for, which also allows patterns that mix dense and MoE MLPs, gated
            delta nets (``G``), multi-latent attention (``+``, ``D``), and an MTP part, if the
            checkpoint has MTP depths.
        replace_attention: blocks may be without attention, and that of the GPT layer is not read.

    Raises:
        ValueError: the pattern is empty or None, has an MTP part without a source, has a symbol
            that GPT layers can't provide, mixes dense and MoE MLPs, has numbers of attention and
            MLP positions that don't go together, a block with two attentions, an attention after
            the last block, or differs from ``layout``.
    """
    try:
        parsed = _parse(hybrid_layer_pattern)
        symbols = (parsed.main_pattern or '').replace(Symbols.PIPE, '')
        mtp_symbols = parsed.mtp_pattern or ''
        if parsed.mtp_num_depths and (layout is None or not layout.mtp_depths):
            raise _PatternRefusedError(
                f'its MTP part {parsed.mtp_pattern!r} has no source; leave that part out.'
            )
        if not symbols:
            raise _PatternRefusedError('it has no layers; set --hybrid-layer-pattern.')
        attention_symbols = _check_kinds(symbols + mtp_symbols, layout)
        if layout is not None and parsed.mtp_num_depths:
            _check_mtp(parsed, attention_symbols, layout)
        if all(kind in symbols for kind in _MLP_SYMBOLS) and not (layout and layout.indexed):
            raise _PatternRefusedError(
                "it mixes dense and MoE MLPs, GPT layers are all alike; use only one of '-' or 'E'."
            )
        attention, mlp, replaced = _pair(symbols, attention_symbols, replace_attention)
        if layout is not None:
            _compare(symbols, mlp, layout, bool(replaced))
    except _PatternRefusedError as reason:
        raise ValueError(
            f"Hybrid layer pattern {hybrid_layer_pattern!r} doesn't fit a GPT checkpoint: {reason}"
        ) from reason.__cause__
    return GPTCompatLayerMaps(
        attention_to_gpt=attention,
        mlp_to_gpt=mlp,
        fresh_init=frozenset(
            i for i, symbol in enumerate(symbols) if symbol in _FRESH_INIT_SYMBOLS
        ),
        num_gpt_layers=len(mlp),
        indexed=layout is not None and layout.indexed,
        mtp_pattern=mtp_symbols,
        mtp_depths=parsed.mtp_num_depths if mtp_symbols else 0,
        symbols=symbols,
        replaced=replaced,
        fresh_indexers=layout is not None and not any(_INDEXER in key for key in layout.keys),
    )


def _parse(hybrid_layer_pattern: str) -> ParsedHybridPattern:
    if not hybrid_layer_pattern:
        raise _PatternRefusedError('it is empty; set --hybrid-layer-pattern.')
    try:
        return parse_hybrid_pattern(hybrid_layer_pattern)
    except ValueError as error:
        raise _PatternRefusedError(str(error)) from error


def _check_kinds(symbols: str, layout: CheckpointLayout | None) -> tuple[str, ...]:
    """Make sure that each layer has a source or needs none; returns the attention's symbols."""
    latent = layout is not None and layout.latent_attention
    attention = _LATENT_ATTENTION_SYMBOLS if latent else (Symbols.ATTENTION,)
    if layout is not None:
        others = {Symbols.ATTENTION, *_LATENT_ATTENTION_SYMBOLS}.difference(attention)
        found = next((symbol for symbol in symbols if symbol in others), None)
        if found is not None:
            raise _PatternRefusedError(
                f'the attention of the checkpoint is {"" if latent else "not "}multi-latent '
                f'(MLA), so it goes into {" or ".join(map(repr, attention))} layers, not into '
                f'{found!r}.'
            )
    # Without a layout the answers are upstream's.
    fresh = _FRESH_INIT_SYMBOLS if layout is not None else (Symbols.MAMBA,)
    supported = [*attention, *_MLP_SYMBOLS, *fresh]
    strangers = sorted(set(symbols).difference(supported))
    if strangers:
        raise _PatternRefusedError(
            f'its layers {strangers} cannot be translated; supported are {supported}.'
        )
    return attention


def _pair(
    symbols: str, attention_symbols: tuple[str, ...], replace_attention: bool
) -> tuple[dict[int, int], dict[int, int], dict[int, tuple[int, ...]]]:
    """GPT layer by attention and by MLP position; hybrid layers in an attention's place by GPT's.

    Raises:
        _PatternRefusedError: the numbers of attention and MLP positions don't go together.
    """
    attention = [i for i, symbol in enumerate(symbols) if symbol in attention_symbols]
    mlp = [i for i, symbol in enumerate(symbols) if symbol in _MLP_SYMBOLS]
    mlp_to_gpt = {hybrid: gpt for gpt, hybrid in enumerate(mlp)}
    if attention and len(attention) == len(mlp):
        return {hybrid: gpt for gpt, hybrid in enumerate(attention)}, mlp_to_gpt, {}
    has_fewer = len(attention) < len(mlp)
    if has_fewer and replace_attention:
        attention_to_gpt, replaced = _pair_blocks(symbols, attention, mlp)
        return attention_to_gpt, mlp_to_gpt, replaced
    way_out = f', or pass {REPLACE_ATTENTION} to leave the others unread' if has_fewer else ''
    raise _PatternRefusedError(
        f'it has {len(attention)} attention ({" or ".join(map(repr, attention_symbols))}) and '
        f"{len(mlp)} MLP ('-' or 'E') layers; a GPT layer has one of each, so it needs an "
        f'equal, nonzero number of both{way_out}.'
    )


def _pair_blocks(
    symbols: str, attention: list[int], mlp: list[int]
) -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
    """GPT layer by attention position, and what stands in the place of attention by GPT layer."""
    attention_to_gpt, replaced, start = {}, {}, 0
    for gpt, end in enumerate(mlp):
        block = tuple(range(start, end))
        own = [hybrid for hybrid in block if hybrid in attention]
        if len(own) > 1:
            raise _PatternRefusedError(
                f'its layers {own[0]} and {own[1]} are attention before one MLP, layer {end}; with '
                f'fewer attention than MLP positions each MLP ends a block, the block of GPT layer '
                f'{gpt}, and that has one attention.'
            )
        if own:
            attention_to_gpt[own[0]] = gpt
        else:
            replaced[gpt] = block
        start = end + 1
    after = [hybrid for hybrid in attention if hybrid >= start]
    if after:
        raise _PatternRefusedError(
            f'its layer {after[0]} is attention after the last MLP; with fewer attention than MLP '
            f'positions each MLP ends the block of a GPT layer, so that none is left for it.'
        )
    return attention_to_gpt, replaced


def _compare(
    symbols: str, mlp: Mapping[int, int], layout: CheckpointLayout, replacing: bool
) -> None:
    """Make sure that the checkpoint has as many layers, with MLPs of the kinds in the pattern."""
    layers = layout.num_layers
    if layers != len(mlp):
        attention = '' if replacing else f'{layers} attention and '
        raise _PatternRefusedError(
            f'it is for {len(mlp)} GPT layer(s), the checkpoint has {layers} layers; give it '
            f'{attention}{layers} MLP layers.'
        )
    for hybrid, gpt in mlp.items():
        kind = layout.mlp_kinds.get(gpt)
        if kind != _MLP_KINDS[symbols[hybrid]]:
            use = [f'{kind}: use {symbol!r}' for symbol, of in _MLP_KINDS.items() if of == kind]
            raise _PatternRefusedError(
                f'its layer {hybrid} is {symbols[hybrid]!r}, the MLP of GPT layer {gpt} is '
                f'{"".join(use) or "missing"}.'
            )


def _check_mtp(
    parsed: ParsedHybridPattern, attention_symbols: tuple[str, ...], layout: CheckpointLayout
) -> None:
    # A layer that all depths share (--mtp-use-repeated-layer) is stored once.
    if layout.mtp_depths not in (1, parsed.mtp_num_depths):
        raise _PatternRefusedError(
            f'it has {parsed.mtp_num_depths} MTP depths, the checkpoint {layout.mtp_depths}.'
        )
    pattern = parsed.mtp_pattern or ''
    attention = sum(pattern.count(symbol) for symbol in attention_symbols)
    mlp = sum(pattern.count(symbol) for symbol in _MLP_SYMBOLS)
    if (attention, mlp) != (1, 1):
        raise _PatternRefusedError(
            f'an MTP depth of a GPT model is one layer, with one attention and one MLP, but the '
            f'MTP part {pattern!r} has {attention} attention '
            f'({" or ".join(map(repr, attention_symbols))}) '
            f"and {mlp} MLP ('-' or 'E') layers."
        )
