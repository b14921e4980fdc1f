"""A merge from beginning to end, collectively over all ranks."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from ..common.progress import resident_memory
from .accumulate import ChunkMerger
from .collective import check_visible, fingerprints, publish_together, summarise, write_share
from .common_state import output_common_state
from .integrity import verify_manifests, write_manifest
from .plan import RankShare
from .prepare import Prepared, Request, prepare
from .ranks import Ranks, joined_ranks
from .report import MergeResult
from .source import Slice
from .verify import verify_share


@dataclass
class _Orders:
    """What rank 0 tells each rank."""

    share: RankShare
    directories: tuple[Path, ...]
    weights: tuple[float, ...]
    target: Path
    fingerprints: dict[Path, str]


def run_merge(request: Request) -> MergeResult:
    """Merge, collectively over all ranks.

    Raises:
        CheckpointError: anything a user can cause; the same on every rank; nothing is published
        Interrupted: a signal; nothing is published
    """
    begin, memory = perf_counter(), resident_memory()
    with joined_ranks() as ranks:
        prepared = ranks.agree(lambda: prepare(request, ranks.size), root_only=True)
        if request.verify:
            verify_manifests(prepared.inputs.directories if prepared else None, ranks)
        if prepared is not None:
            prepared.result.timings.discovery = perf_counter() - begin
            request.on_plan(prepared.result)
        orders = ranks.scatter(_orders(prepared, ranks) if prepared else None)
        ranks.agree(lambda: check_visible(orders.fingerprints, _pieces(orders.share)))
        if request.dry_run:
            return ranks.broadcast(prepared.result if prepared else None)
        result = _write(request, ranks, prepared, orders, begin, memory)
    return result


def _orders(prepared: Prepared, ranks: Ranks) -> list[_Orders]:
    inputs = prepared.inputs
    seen = fingerprints(inputs.directories, ranks)
    return [
        _Orders(share, inputs.directories, inputs.weights, prepared.target, seen)
        for share in prepared.plan.shares
    ]


def _pieces(share: RankShare) -> Iterator[tuple[Path, Slice]]:
    for job in share.chunks:
        yield from ((part.path, part.piece) for stored in job.stored for part in stored)
    yield from (place for job in share.byte_entries for place in job.places)


def _write(
    request: Request,
    ranks: Ranks,
    prepared: Prepared | None,
    orders: _Orders,
    begin: float,
    memory: int,
) -> MergeResult:
    return publish_together(
        ranks,
        orders.target,
        prepared.trackers if prepared else None,
        lambda staging: _fill(request, ranks, prepared, orders, staging, memory),
        begin,
    )


def _fill(
    request: Request,
    ranks: Ranks,
    prepared: Prepared | None,
    orders: _Orders,
    staging: Path,
    memory: int,
) -> MergeResult | None:
    """Write and check the output in the staging directory; its figures on rank 0."""
    mergers, figures = write_share(
        ranks,
        orders.share,
        prepared.plan if prepared else None,
        staging,
        orders.target,
        request.threads,
        lambda stop: ChunkMerger(
            orders.weights,
            block_elements=request.block_elements,
            allow_nonfinite=request.allow_nonfinite,
            stop=stop,
        ),
        lambda: _common_state(prepared),
        partial(verify_share, staging, orders.share, orders.weights) if request.verify else None,
        'merging',
        memory,
    )
    checking = perf_counter()
    if request.save_integrity:
        write_manifest(staging, ranks)
    nonfinite: Counter[str] = Counter()
    for merger in mergers:
        nonfinite.update({f'{path}: {key}': n for (path, key), n in merger.nonfinite.items()})
    written = _bytes_written(request.byte_accounting, ranks.rank, staging)
    of_ranks = ranks.gather((figures, written, nonfinite))
    if prepared is None or of_ranks is None:
        return None
    result = prepared.result
    summarise(result, [figures for figures, _, _ in of_ranks])
    result.timings.verify += perf_counter() - checking
    result.merge_memory = [figures.own_memory for figures, _, _ in of_ranks]
    result.bytes_written = sum(written for _, written, _ in of_ranks) or result.bytes_written
    result.nonfinite_inputs = dict(sum((found for _, _, found in of_ranks), Counter()))
    return result


def _common_state(prepared: Prepared | None) -> dict[str, Any]:
    assert prepared is not None and prepared.provenance is not None
    return output_common_state(prepared.common, prepared.provenance, prepared.output_iteration)


def _bytes_written(accounting: str, rank: int, staging: Path) -> int:
    """Size of the files that this rank looks at."""
    patterns: list[str] = []
    if accounting in ('each-rank', 'all'):
        patterns = [f'__{rank}_*', *(['[!_]*'] if rank == 0 else [])]
    elif accounting == 'rank0' and rank == 0:
        patterns = ['*']
    return sum(path.stat().st_size for pattern in patterns for path in staging.glob(pattern))
