"""A merge from beginning to end, collectively over all ranks."""

import hashlib
import json
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from ..common import publish
from ..common.errors import CheckpointError
from ..common.paths import CONFIG_NAME, METADATA_NAME
from ..common.progress import peak_memory, progress_bar, resident_memory
from ..common.stored import check_file
from .accumulate import ChunkMerger
from .collective import publish_together, save_on_ranks
from .common_state import output_common_state, save_common_state
from .integrity import verify_manifests, write_manifest
from .places import Places, stored_places
from .plan import RankShare
from .prepare import MAX_THREADS, Prepared, Request, prepare
from .ranks import Ranks, joined_ranks
from .report import MergeResult
from .validate import validate_output
from .verify import verify_share
from .writer import MergePlanner, MergeWriter


@dataclass
class _Orders:
    """What rank 0 tells each rank."""

    share: RankShare
    directories: tuple[Path, ...]
    weights: tuple[float, ...]
    target: Path
    fingerprints: list[str]


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
        ranks.agree(lambda: _check_visible(orders))
        if request.dry_run:
            return ranks.broadcast(prepared.result if prepared else None)
        result = _write(request, ranks, prepared, orders, begin, memory)
    return result


def _orders(prepared: Prepared, ranks: Ranks) -> list[_Orders]:
    inputs = prepared.inputs
    seen = [_fingerprint(path) for path in inputs.directories] if ranks.size > 1 else []
    return [
        _Orders(share, inputs.directories, inputs.weights, prepared.target, seen)
        for share in prepared.plan.shares
    ]


def _fingerprint(directory: Path) -> str:
    """Of the metadata, which names the save, so that no two checkpoints have the same."""
    with open(directory / METADATA_NAME, 'rb') as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()


def _check_visible(orders: _Orders) -> None:
    """This rank sees the inputs that rank 0 sees, and every file that it is to read, in full."""
    share = orders.share
    for directory, expected in zip(orders.directories, orders.fingerprints, strict=False):
        if _fingerprint(directory) != expected:
            raise CheckpointError(
                f'{directory / METADATA_NAME}: another checkpoint than rank 0 sees there; the '
                'inputs must be on storage that all ranks share'
            )
    needed: Counter[Path] = Counter()
    pieces = [(part.path, part.piece) for job in share.chunks for s in job.stored for part in s]
    for path, piece in [*pieces, *((job.path, job.piece) for job in share.byte_entries)]:
        needed[path] = max(needed[path], piece.offset + piece.length)
    for path, size in needed.items():
        check_file(path, size)


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
    started = perf_counter()
    stop = threading.Event()
    threads = request.threads or min(torch.get_num_threads(), MAX_THREADS)
    bar_total = orders.share.source_bytes * (2 if request.verify else 1)
    with progress_bar(bar_total, 'merging', unit='B', rank=ranks.rank) as bar:
        planner = MergePlanner(
            orders.share,
            prepared.plan if prepared else None,
            lambda: ChunkMerger(
                orders.weights,
                block_elements=request.block_elements,
                allow_nonfinite=request.allow_nonfinite,
                stop=stop,
            ),
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
            ranks.agree(
                lambda: verify_share(staging, orders.share, own, orders.weights, bar.update)
            )
    if request.save_integrity:
        write_manifest(staging, ranks)
    figures = ranks.gather(
        _figures(request, ranks, planner, orders, staging, written - started, memory)
    )
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
    assert prepared is not None
    save_common_state(
        output_common_state(prepared.common, prepared.provenance(), prepared.output_iteration),
        staging,
    )
    (staging / CONFIG_NAME).write_text(json.dumps(prepared.plan.config))
    storage = validate_output(staging, prepared.plan)
    return stored_places(prepared.plan, storage) if request.verify else None


@dataclass
class _Figures:
    """One rank's part of the report."""

    load: float
    accumulate: float
    save: float
    bytes_read: int
    bytes_written: int
    peak_memory: int
    merge_memory: int
    nonfinite: Counter[str]


def _figures(
    request: Request,
    ranks: Ranks,
    planner: MergePlanner[ChunkMerger],
    orders: _Orders,
    staging: Path,
    wall: float,
    memory: int,
) -> _Figures:
    mergers = planner.mergers
    load = sum(merger.read_seconds for merger in mergers) / max(len(mergers), 1)
    accumulate = sum(merger.math_seconds for merger in mergers) / max(len(mergers), 1)
    nonfinite: Counter[str] = Counter()
    for merger in mergers:
        nonfinite.update({f'{path}: {key}': n for (path, key), n in merger.nonfinite.items()})
    written = 0
    if request.byte_accounting in ('each-rank', 'all'):
        written = _size_of(staging, f'__{ranks.rank}_*')
        if ranks.rank == 0:
            written += _size_of(staging, '[!_]*')
    elif request.byte_accounting == 'rank0' and ranks.rank == 0:
        written = _size_of(staging, '*')
    return _Figures(
        load,
        accumulate,
        max(wall - load - accumulate, 0.0),
        sum(merger.bytes_read for merger in mergers)
        + sum(job.piece.length for job in orders.share.byte_entries),
        written,
        peak_memory(),
        peak_memory() - memory,
        nonfinite,
    )


def _size_of(directory: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in directory.glob(pattern))


def _summarise(result: MergeResult, figures: list[_Figures]) -> None:
    result.timings.load = max(figure.load for figure in figures)
    result.timings.accumulate = max(figure.accumulate for figure in figures)
    result.timings.save = max(figure.save for figure in figures)
    result.bytes_read = sum(figure.bytes_read for figure in figures)
    result.bytes_written = sum(figure.bytes_written for figure in figures) or result.bytes_written
    result.peak_memory = [figure.peak_memory for figure in figures]
    result.merge_memory = [figure.merge_memory for figure in figures]
    total: Counter[str] = Counter()
    for figure in figures:
        total.update(figure.nonfinite)
    result.nonfinite_inputs = dict(total)
