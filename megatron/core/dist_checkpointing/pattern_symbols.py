"""The grammar of ``--hybrid-layer-pattern``, as megatron-core's ``hybrid_layer_allocation`` has it.

That module can't be imported without all of core, which takes seconds. Which symbols this core has
is read off its compiled code; the tests compare both.
"""

from dataclasses import dataclass

import megatron_overlay
from megatron_overlay._guard import Upstream

_UPSTREAM = 'megatron.core.models.hybrid.hybrid_layer_allocation'


class Symbols:
    """Symbols of layers, by core's names for them, and separators."""

    MAMBA = 'M'
    GDN = 'G'
    ATTENTION = '*'
    DS_ATTENTION = 'D'
    MLA = '+'
    MLP = '-'
    MOE = 'E'
    PIPE = '|'
    MTP_SEPARATOR = '/'


def _known_layers() -> frozenset[str]:
    layers = {
        name: symbol
        for name, symbol in vars(Symbols).items()
        if name.isupper() and symbol not in (Symbols.PIPE, Symbols.MTP_SEPARATOR)
    }
    known = Upstream(megatron_overlay.finder.upstream_spec).methods(_UPSTREAM, 'Symbols')
    return frozenset(symbol for name, symbol in layers.items() if not known or name in known)


VALID_LAYERS = _known_layers()
"""Symbols of the layers that this megatron-core has; all of them where there is none."""


@dataclass(frozen=True)
class ParsedHybridPattern:
    """A pattern's parts.

    Attributes:
        main_pattern: the decoder's layers, with ``|`` between pipeline stages.
        mtp_pattern: layers of each multi-token prediction depth; empty without such depths.
        mtp_num_depths: their number.
    """

    main_pattern: str
    mtp_pattern: str
    mtp_num_depths: int


def parse_hybrid_pattern(pattern: str) -> ParsedHybridPattern:
    """Take a pattern apart.

    Raises:
        ValueError: a symbol that this megatron-core doesn't have, depths that aren't all alike, or
            attention of two kinds in one model.
    """
    main, *depths = pattern.split(Symbols.MTP_SEPARATOR)
    _check('main', main, VALID_LAYERS | {Symbols.PIPE})
    if not any(depths):
        return ParsedHybridPattern(main, '', 0)
    other = next((depth for depth in depths if depth != depths[0]), None)
    if other is not None:
        raise ValueError(f'its MTP parts {depths[0]!r} and {other!r} differ, all have to be alike')
    _check('MTP', depths[0], VALID_LAYERS)
    return ParsedHybridPattern(main, depths[0], len(depths))


def _check(part: str, pattern: str, valid: frozenset[str]) -> None:
    for symbol in pattern:
        if symbol not in valid:
            raise ValueError(
                f'{symbol!r} in its {part} part is no layer symbol; valid are '
                f'{" ".join(sorted(valid))}.'
            )
    if Symbols.ATTENTION in pattern and {Symbols.DS_ATTENTION, Symbols.MLA}.intersection(pattern):
        raise ValueError(f'its {part} part has attention of more than one kind (* and + or D).')
