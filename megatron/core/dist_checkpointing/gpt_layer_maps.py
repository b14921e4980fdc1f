"""Which layer of a GPT model each layer of a hybrid pattern corresponds to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .checkpoint_layout import DENSE, MOE, CheckpointLayout
from .pattern_symbols import ParsedHybridPattern, Symbols, parse_hybrid_pattern

_MLP_KINDS = {Symbols.MLP: DENSE, Symbols.MOE: MOE}
_MLP_SYMBOLS = tuple(_MLP_KINDS)
_GPT_SOURCED_SYMBOLS = (Symbols.ATTENTION, *_MLP_SYMBOLS)
_FRESH_INIT_SYMBOLS = (Symbols.MAMBA,)
# HybridModel has it since megatron-core 0.19.
_LATENT_ATTENTION_SYMBOL = '+'


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
        mtp_pattern: layers of each multi-token prediction depth, one attention, one MLP and any
            that start fresh; empty where the depths aren't paired.
        mtp_depths: how many such depths the pattern has.
    """

    attention_to_gpt: Mapping[int, int]
    mlp_to_gpt: Mapping[int, int]
    fresh_init: frozenset[int]
    num_gpt_layers: int
    indexed: bool = False
    mtp_pattern: str = ''
    mtp_depths: int = 0

    @property
    def keeps_gpt_order(self) -> bool:
        """Whether the layers with a source are computed as in GPT, each MLP after its attention."""
        pairs = zip(self.attention_to_gpt, self.mlp_to_gpt, strict=True)
        in_gpt_order = [layer for pair in pairs for layer in pair]
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


def gpt_compatible_layer_maps(
    hybrid_layer_pattern: str, layout: CheckpointLayout | None = None
) -> GPTCompatLayerMaps:
    """Pair the layers of a hybrid pattern with those of a GPT model.

    Args:
        hybrid_layer_pattern: as in ``--hybrid-layer-pattern``; ``|`` separators don't matter.
        layout: of the checkpoint, where it is known. Its layers then have to be of the kinds that
            the pattern asks for, which also allows patterns that mix dense and MoE MLPs,
            multi-latent attention (``+``), and an MTP part, if the checkpoint has MTP depths.

    Raises:
        ValueError: the pattern is empty or None, has an MTP part without a source, has a symbol
            that GPT layers can't provide, mixes dense and MoE MLPs, has unequal or zero numbers
            of attention and MLP positions, or differs from ``layout``.
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
    if parsed.mtp_num_depths and (layout is None or not layout.mtp_depths):
        raise refuse(f'its MTP part {parsed.mtp_pattern!r} has no source; leave that part out.')
    symbols = (parsed.main_pattern or '').replace(Symbols.PIPE, '')
    if not symbols:
        raise refuse('it has no layers; set --hybrid-layer-pattern.')
    latent = layout is not None and layout.latent_attention
    attention_symbol = _LATENT_ATTENTION_SYMBOL if latent else Symbols.ATTENTION
    mtp_symbols = parsed.mtp_pattern or ''
    if layout is not None:
        other = Symbols.ATTENTION if latent else _LATENT_ATTENTION_SYMBOL
        if other in symbols + mtp_symbols:
            raise refuse(
                f'the attention of the checkpoint is {"" if latent else "not "}multi-latent '
                f'(MLA), so it goes into {attention_symbol!r} layers, not into {other!r}.'
            )
    supported = [attention_symbol, *_MLP_SYMBOLS, *_FRESH_INIT_SYMBOLS]
    strangers = sorted(set(symbols + mtp_symbols).difference(supported))
    if strangers:
        raise refuse(f'its layers {strangers} cannot be translated; supported are {supported}.')
    if layout is not None and parsed.mtp_num_depths:
        _check_mtp(parsed, attention_symbol, layout, refuse)
    if all(kind in symbols for kind in _MLP_SYMBOLS) and not (layout and layout.indexed):
        raise refuse(
            "it mixes dense and MoE MLPs, GPT layers are all alike; use only one of '-' or 'E'."
        )
    attention = [i for i, symbol in enumerate(symbols) if symbol == attention_symbol]
    mlp = [i for i, symbol in enumerate(symbols) if symbol in _MLP_SYMBOLS]
    if not attention or len(attention) != len(mlp):
        raise refuse(
            f'it has {len(attention)} attention ({attention_symbol!r}) and {len(mlp)} MLP '
            f"('-' or 'E') positions; a GPT layer has one of each, so it needs an equal, nonzero "
            f'number of both.'
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
        mtp_pattern=mtp_symbols,
        mtp_depths=parsed.mtp_num_depths if mtp_symbols else 0,
    )


def _check_mtp(
    parsed: ParsedHybridPattern,
    attention_symbol: str,
    layout: CheckpointLayout,
    refuse: Callable[[str], ValueError],
) -> None:
    # A layer that all depths share (--mtp-use-repeated-layer) is stored once.
    if layout.mtp_depths not in (1, parsed.mtp_num_depths):
        raise refuse(
            f'it has {parsed.mtp_num_depths} MTP depths, the checkpoint {layout.mtp_depths}.'
        )
    attention = parsed.mtp_pattern.count(attention_symbol)
    mlp = sum(parsed.mtp_pattern.count(symbol) for symbol in _MLP_SYMBOLS)
    if (attention, mlp) != (1, 1):
        raise refuse(
            f'an MTP depth of a GPT model is one layer, with one attention and one MLP, but the '
            f'MTP part {parsed.mtp_pattern!r} has {attention} attention ({attention_symbol!r}) '
            f"and {mlp} MLP ('-' or 'E') positions."
        )
