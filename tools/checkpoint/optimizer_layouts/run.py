"""A conversion from beginning to end, collectively over all ranks."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from ..common.progress import resident_memory
from ..merge.collective import (
    check_visible,
    fingerprints,
    publish_together,
    summarise,
    write_share,
)
from ..merge.plan import RankShare
from ..merge.ranks import Ranks, joined_ranks
from ..merge.source import Slice
from .assemble import Assembler
from .plan import OutputChunk
from .prepare import ConversionRequest, PreparedConversion, prepare
from .report import ConversionResult
from .verify import verify_share


def run_conversion(request: ConversionRequest) -> ConversionResult:
    """Convert, collectively over all ranks.

    Raises:
        CheckpointError: anything a user can cause; the same on every rank; nothing is published
        Interrupted: a signal; nothing is published
    """
    begin, memory = perf_counter(), resident_memory()
    with joined_ranks() as ranks:
        prepared = ranks.agree(lambda: prepare(request, ranks.size), root_only=True)
        if prepared is not None:
            prepared.result.timings.discovery = perf_counter() - begin
            request.on_plan(prepared.result)
        result = ranks.broadcast(prepared.result if prepared else None)
        if result.already:
            return result
        orders = ranks.scatter(_orders(prepared, ranks) if prepared else None)
        share = orders.share
        ranks.agree(lambda: check_visible(orders.fingerprints, _slices(share)))
        if request.dry_run:
            return result
        return publish_together(
            ranks,
            result.output_dir,
            prepared.trackers if prepared else None,
            lambda staging: _fill(
                request, ranks, prepared, share, staging, result.output_dir, memory
            ),
            begin,
        )


@dataclass
class _Orders:
    """What rank 0 tells each rank."""

    share: RankShare
    fingerprints: dict[Path, str]


def _orders(prepared: PreparedConversion, ranks: Ranks) -> list[_Orders]:
    assert prepared.plan is not None
    seen = fingerprints([prepared.checkpoint.directory], ranks)
    return [_Orders(share, seen) for share in prepared.plan.shares]


def _slices(share: RankShare) -> Iterator[tuple[Path, Slice]]:
    for job in share.chunks:
        assert isinstance(job, OutputChunk)
        for group in (job.pieces, *job.copies):
            yield from ((piece.stored.path, piece.stored.piece) for piece in group)
        yield from ((piece.stored.path, piece.stored.piece) for piece in job.proof)
    yield from (place for job in share.byte_entries for place in job.places)


def _fill(
    request: ConversionRequest,
    ranks: Ranks,
    prepared: PreparedConversion | None,
    share: RankShare,
    staging: Path,
    target: Path,
    memory: int,
) -> ConversionResult | None:
    """Write and check the output in the staging directory; its figures on rank 0."""
    assemblers, figures = write_share(
        ranks,
        share,
        prepared.plan if prepared else None,
        staging,
        target,
        request.threads,
        Assembler,
        lambda: _common_state(prepared),
        partial(verify_share, staging, share) if request.verify else None,
        'converting',
        memory,
    )
    different: Counter[str] = Counter()
    for assembler in assemblers:
        different.update(assembler.different_copies)
    proven = sum(assembler.proven for assembler in assemblers)
    of_ranks = ranks.gather((figures, proven, different))
    if prepared is None or of_ranks is None:
        return None
    result = prepared.result
    summarise(result, [figures for figures, _, _ in of_ranks])
    result.conversion_memory = [figures.own_memory for figures, _, _ in of_ranks]
    result.proven = sum(proven for _, proven, _ in of_ranks)
    result.different_copies = dict(sum((found for _, _, found in of_ranks), Counter()))
    return result


def _common_state(prepared: PreparedConversion | None) -> dict[str, Any] | None:
    assert prepared is not None and prepared.plan is not None
    return prepared.plan.common_state
