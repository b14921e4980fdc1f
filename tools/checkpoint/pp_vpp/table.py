"""The mapping table of a plan, as ``--dry-run`` prints it."""

from collections.abc import Sequence
from pathlib import Path

from ..common.paths import TRACKER_NAME
from ..common.trackers import content
from .convert import CheckedConversion
from .layout import ChunkId, Move


def mapping_table(checked: CheckedConversion) -> str:
    """One line for each run of layers: old (TP, PP, chunk), global layers, new (TP, PP, chunk).

    TP ranks keep their numbers, so one line stands for all of them.
    """
    tp: dict[tuple[str, int], list[int]] = {}
    for job in checked.jobs:
        tp.setdefault((job.side, job.rank.pp or 0), []).append(job.rank.tp)
    rows = [('old (TP, PP, chunk)', 'layers', 'new (TP, PP, chunk)', 'with')]
    for move in checked.plan.moves:
        ranks = _range(tp[move.target.side, move.target.rank])
        new, layer = _chunk(ranks, move.target), move.first_layer
        if not move.pieces:
            rows.append(('-', '-', new, '(empty)' if move.empty else _extras(move)))
        for index, piece in enumerate(move.pieces):
            count = piece.last - piece.first
            rows.append(
                (
                    _chunk(ranks, piece.source),
                    _layers(layer, count),
                    new,
                    _extras(move, index == 0, index == len(move.pieces) - 1),
                )
            )
            layer += count
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    rows.insert(1, ('-' * widths[0], '-' * widths[1], '-' * widths[2], '----'))
    return '\n'.join(
        f'{old:{widths[0]}}  {layers:{widths[1]}}  {new:{widths[2]}}  {extras}'.rstrip()
        for old, layers, new, extras in rows
    )


def outputs_summary(checked: CheckedConversion) -> list[str]:
    """One line an output: directory, number of files, sizes, and what it replaces."""
    lines = []
    for side, target in checked.targets.items():
        files = [job for job in checked.jobs if job.side == side]
        sizes = files[0].sizes
        virtual = '' if sizes.virtual is None else f', VPP {sizes.virtual}'
        lines.append(
            f'{target}: {len(files)} rank file{"s" * (len(files) != 1)}, TP {sizes.tensor}, '
            f'PP {sizes.pipeline}{virtual}{_replaced(checked, target)}'
        )
    return lines


def trackers_summary(checked: CheckedConversion) -> list[str]:
    """One line for each tracker that says something else so far."""
    found = {root: content(root / TRACKER_NAME) for root in checked.trackers}
    return [
        f'{root / TRACKER_NAME}: says {found[root]}, would say {text}'
        for root, text in checked.trackers.items()
        if found[root] not in ('', text)
    ]


def _replaced(checked: CheckedConversion, target: Path) -> str:
    return ', replacing what was there' if target in checked.replaced else ''


def _chunk(tp: str, chunk: ChunkId) -> str:
    side = f'{chunk.side} ' if chunk.side else ''
    return f'{side}({tp}, {chunk.rank}, {"-" if chunk.chunk is None else chunk.chunk})'


def _layers(first: int, count: int) -> str:
    if count == 0:
        return '-'
    return str(first) if count == 1 else f'{first}-{first + count - 1}'


def _range(ranks: Sequence[int]) -> str:
    first, last = min(ranks), max(ranks)
    return str(first) if first == last else f'{first}-{last}'


def _extras(move: Move, at_start: bool = True, at_end: bool = True) -> str:
    extras = []
    if move.is_first and at_start:
        extras.append('embedding')
    if move.is_last and at_end:
        extras.append('final norm, head')
    return ', '.join(extras)
