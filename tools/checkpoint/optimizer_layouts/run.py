"""A conversion from beginning to end, collectively over all ranks."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from ..common import publish
from ..common.paths import CONFIG_NAME
from ..common.progress import peak_memory, progress_bar, resident_memory
from ..common.stored import check_file
from ..merge.collective import publish_together, save_on_ranks
from ..merge.common_state import save_common_state
from ..merge.places import Places, stored_places
from ..merge.plan import RankShare
from ..merge.prepare import MAX_THREADS
from ..merge.ranks import Ranks, joined_ranks
from ..merge.source import Slice
from ..merge.validate import validate_output
from ..merge.writer import MergePlanner, MergeWriter
from .assemble import Assembler
from .common_state import converted_common_state
from .plan import OutputChunk
from .prepare import Prepared, Request, prepare
from .report import ConversionResult
from .verify import verify_share


@dataclass
class _Orders:
    """What rank 0 tells each rank."""

    share: RankShare
    target: Path


def run_conversion(request: Request) -> ConversionResult:
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
        orders = ranks.scatter(
            [_Orders(share, prepared.target) for share in prepared.plan.shares]
            if prepared and prepared.plan
            else None
        )
        ranks.agree(lambda: _check_visible(orders.share))
        if request.dry_run:
            return result
        return publish_together(
            ranks,
            orders.target,
            prepared.trackers if prepared else None,
            lambda staging: _fill(request, ranks, prepared, orders, staging, memory),
            begin,
        )


def _check_visible(share: RankShare) -> None:
    """This rank sees every file that it is to read, in full."""
    needed: Counter[Path] = Counter()
    for path, piece in _slices(share):
        needed[path] = max(needed[path], piece.offset + piece.length)
    for path, size in needed.items():
        check_file(path, size)


def _slices(share: RankShare) -> Iterator[tuple[Path, Slice]]:
    for job in share.chunks:
        assert isinstance(job, OutputChunk)
        for group in (job.pieces, *job.copies):
            yield from ((piece.stored.path, piece.stored.piece) for piece in group)
        if job.weight is not None:
            yield job.weight.path, job.weight.piece
    yield from ((job.path, job.piece) for job in share.byte_entries)


def _fill(
    request: Request,
    ranks: Ranks,
    prepared: Prepared | None,
    orders: _Orders,
    staging: Path,
    memory: int,
) -> ConversionResult | None:
    """Write and check the output in the staging directory; its figures on rank 0."""
    started = perf_counter()
    stop = threading.Event()
    threads = request.threads or min(torch.get_num_threads(), MAX_THREADS)
    bar_total = orders.share.source_bytes * (2 if request.verify else 1)
    with progress_bar(bar_total, 'converting', unit='B', rank=ranks.rank) as bar:
        planner = MergePlanner(
            orders.share,
            prepared.plan if prepared else None,
            lambda: Assembler(stop),
            stop,
            bar.update,
        )
        writer = MergeWriter(staging, orders.target, threads, stop)
        ranks.agree(lambda: save_on_ranks(planner, writer, ranks))
        publish.step('written')
        places = ranks.agree(lambda: _complete(request, prepared, staging), root_only=True)
        publish.step('completed')
        written = perf_counter()
        if request.verify:
            own = ranks.scatter(places)
            ranks.agree(lambda: verify_share(staging, orders.share, own, bar.update))
    figures = ranks.gather(_figures(planner.mergers, orders.share, written - started, memory))
    if prepared is None or figures is None:
        return None
    _summarise(prepared.result, figures)
    prepared.result.timings.verify = perf_counter() - written
    return prepared.result


def _complete(request: Request, prepared: Prepared | None, staging: Path) -> list[Places] | None:
    """Common state and format of the output, then its metadata against the plan.

    Returns:
        for ``--verify``, by rank, where the metadata on disk says that entries are stored
    """
    assert prepared is not None and prepared.plan is not None
    save_common_state(
        converted_common_state(prepared.checkpoint.common, prepared.plan.optimizer.settings),
        staging,
    )
    (staging / CONFIG_NAME).write_text(json.dumps(prepared.plan.config))
    storage = validate_output(staging, prepared.plan)
    return stored_places(prepared.plan, storage) if request.verify else None


@dataclass
class _Figures:
    """One rank's part of the report."""

    load: float
    proof: float
    save: float
    bytes_read: int
    proven: int
    different_copies: Counter[str]
    peak_memory: int
    memory: int


def _figures(assemblers: list[Assembler], share: RankShare, wall: float, memory: int) -> _Figures:
    threads = max(len(assemblers), 1)
    load = sum(assembler.read_seconds for assembler in assemblers) / threads
    proof = sum(assembler.math_seconds for assembler in assemblers) / threads
    different: Counter[str] = Counter()
    for assembler in assemblers:
        different.update(assembler.different_copies)
    return _Figures(
        load,
        proof,
        max(wall - load - proof, 0.0),
        sum(assembler.bytes_read for assembler in assemblers)
        + sum(job.piece.length for job in share.byte_entries),
        sum(assembler.proven for assembler in assemblers),
        different,
        peak_memory(),
        peak_memory() - memory,
    )


def _summarise(result: ConversionResult, figures: list[_Figures]) -> None:
    result.timings.load = max(figure.load for figure in figures)
    result.timings.accumulate = max(figure.proof for figure in figures)
    result.timings.save = max(figure.save for figure in figures)
    result.bytes_read = sum(figure.bytes_read for figure in figures)
    result.proven = sum(figure.proven for figure in figures)
    result.peak_memory = [figure.peak_memory for figure in figures]
    result.conversion_memory = [figure.memory for figure in figures]
    total: Counter[str] = Counter()
    for figure in figures:
        total.update(figure.different_copies)
    result.different_copies = dict(total)
