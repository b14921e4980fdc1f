"""Work of all ranks together: planned by the first, done by each, published as one or not at all.

What a command adds to that is a ``Work``: a merge and a conversion each have theirs.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ..common import publish
from ..common.errors import CheckpointError
from ..common.paths import CONFIG_NAME, METADATA_NAME
from ..common.progress import peak_memory, progress_bar, resident_memory
from ..common.publish import Interrupted, Publication
from ..common.stored import check_files
from .common_state import save_common_state
from .payload import OpenFiles
from .places import WrittenPlaces, stored_places
from .plan import ChunkJob, MergePlan, RankShare
from .ranks import RankLost, Ranks, joined_ranks
from .report import Result
from .request import Request
from .source import StoredChunk
from .validate import validate_output
from .verify import verify_share
from .writer import ChunkMaker, MergePlanner, MergeWriter, save_merged

MAX_THREADS = 4  # more contend for the interpreter; add ranks instead


@dataclass
class Prepared[R: Result]:
    """What rank 0 found out.

    Attributes:
        plan: None where there is nothing to do
        result: what is known of it so far
        trackers: of the output, as ``Publication`` has them
        directories: of the checkpoints that are read
    """

    plan: MergePlan | None
    result: R
    trackers: Mapping[Path, str]
    directories: Sequence[Path]


@dataclass
class Orders:
    """What rank 0 tells each rank.

    Attributes:
        share: what it writes
        fingerprints: of the checkpoints' metadata as rank 0 sees it
    """

    share: RankShare
    fingerprints: dict[Path, str]


@dataclass
class Figures:
    """One rank's part of a report: seconds, bytes, and what the command itself counts."""

    load: float
    accumulate: float
    save: float
    verify: float
    bytes_read: int
    peak_memory: int
    own_memory: int
    counted: Any = None


class Work[M: ChunkMaker, R: Result]:
    """What a command does besides what all do.

    Args:
        request: what is asked for
        ranks: that do it

    Attributes:
        doing: what the progress bar says
    """

    doing: str

    def __init__(self, request: Any, ranks: Ranks) -> None:
        self.request = request
        self.ranks = ranks

    def prepare(self) -> Prepared[R]:
        """Plan, on rank 0."""
        raise NotImplementedError

    def check(self, prepared: Prepared[R] | None) -> None:
        """Look at the inputs once more; collective."""

    def maker(self, result: R, stop: threading.Event) -> M:
        """What fills chunks in one thread, until the event is set."""
        raise NotImplementedError

    def fault(self, result: R, job: ChunkJob, written: StoredChunk, files: OpenFiles) -> str | None:
        """What is wrong with a chunk that was written, if anything."""
        raise NotImplementedError

    def complete(self, staging: Path) -> None:
        """Write what the output has besides; collective."""

    def count(self, makers: Sequence[M], staging: Path) -> Any:
        """What this rank counted."""
        raise NotImplementedError

    def summarise(self, result: R, figures: Sequence[Figures]) -> None:
        """Put what all ranks counted into the result."""
        raise NotImplementedError


def run_together[R: Result](work_of: Callable[[Any, Ranks], Work[Any, R]], request: Request) -> R:
    """Do a work, collectively over all ranks.

    Raises:
        CheckpointError: anything a user can cause; the same on every rank; nothing is published
        Interrupted: a signal; nothing is published
    """
    begin, memory = perf_counter(), resident_memory()
    with joined_ranks() as ranks:
        work = work_of(request, ranks)
        ranks.agree(lambda: _refuse_threads(request.threads))
        prepared = ranks.agree(work.prepare, root_only=True)
        work.check(prepared)
        if prepared is not None:
            prepared.result.timings.discovery = perf_counter() - begin
            request.on_plan(prepared.result)
        result = ranks.broadcast(prepared.result if prepared else None)
        own = ranks.scatter(orders(prepared, ranks) if prepared else None)
        if own is None:
            return result
        ranks.agree(lambda: check_visible(own))
        if request.dry_run:
            return result
        plan, trackers = (prepared.plan, prepared.trackers) if prepared else (None, None)
        fill = partial(_write, work, plan, result, own.share, memory)
        return _publish_together(ranks, result.output_dir, trackers, fill, begin)


def _refuse_threads(threads: int | None) -> None:
    if threads is not None and threads < 1:
        raise CheckpointError(f'{threads} writer threads: expected 1 or more')


def orders(prepared: Prepared, ranks: Ranks) -> Sequence[Orders | None]:
    """For each rank what it does; None where there is nothing to do."""
    if prepared.plan is None:
        return [None] * ranks.size
    # where there is one rank, it has just read them
    seen = {path: _fingerprint(path) for path in prepared.directories} if ranks.size > 1 else {}
    return [Orders(share, seen) for share in prepared.plan.shares]


def _fingerprint(directory: Path) -> str:
    """Of the metadata, which names the save, so that no two checkpoints have the same."""
    with open(directory / METADATA_NAME, 'rb') as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()


def check_visible(own: Orders) -> None:
    """This rank sees the inputs that rank 0 sees, and every file that it is to read, in full."""
    for directory, expected in own.fingerprints.items():
        if _fingerprint(directory) != expected:
            raise CheckpointError(
                f'{directory / METADATA_NAME}: another checkpoint than rank 0 sees there; the '
                'inputs must be on storage that all ranks share'
            )
    check_files((path, piece.end) for job in own.share.entries for path, piece in job.places)


def _publish_together[R: Result](
    ranks: Ranks,
    target: Path,
    trackers: Mapping[Path, str] | None,
    fill: Callable[[Path], R],
    begin: float,
) -> R:
    """Let every rank write into one staging directory, and publish that; collective.

    Args:
        trackers: as ``Publication`` has them; on rank 0
        fill: writes this rank's part into the staging directory; the result on rank 0
        begin: when the work began, for the result's total time

    Returns:
        what ``fill`` returned on rank 0, on every rank

    Raises:
        CheckpointError: it failed somewhere; nothing is published
        RankLost: rank 0 was lost while publishing
    """
    with ExitStack() as stack:
        publication = ranks.agree(
            lambda: stack.enter_context(Publication([target], trackers)), root_only=True
        )
        staging = ranks.broadcast(publication.path(target) if publication else None)
        ranks.agree(lambda: _check_staging(staging))
        result = fill(staging)
        started = perf_counter()

        def commit() -> R:
            assert publication is not None
            publication.commit()
            result.timings.publish = perf_counter() - started
            result.timings.total = perf_counter() - begin
            return result

        try:
            return ranks.broadcast(ranks.agree(commit, root_only=True))
        except RankLost as error:
            if publication is not None and publication.committed:
                return result
            raise RankLost(
                f'rank 0 was lost while publishing; see whether {target} exists'
            ) from error


def _check_staging(staging: Path) -> None:
    if not staging.is_dir():
        raise CheckpointError(
            f"{staging.parent}: not shared: this rank doesn't see what rank 0 made there"
        )


def _write[R: Result](
    work: Work[Any, R],
    plan: MergePlan | None,
    result: R,
    share: RankShare,
    memory: int,
    staging: Path,
) -> R:
    """Write this rank's chunks into the staging directory, and check them; collective.

    Args:
        plan: of the whole output; on rank 0
        memory: that the process held at the beginning

    Returns:
        the result, on rank 0 with all ranks' figures
    """
    started = perf_counter()
    stop, ranks, verify = threading.Event(), work.ranks, work.request.verify
    threads = work.request.threads or min(torch.get_num_threads(), MAX_THREADS)
    writer = MergeWriter(staging, result.output_dir, threads, stop)

    def finish() -> list[WrittenPlaces] | None:
        assert plan is not None
        if plan.common_state is not None:
            save_common_state(plan.common_state, staging)
            (staging / CONFIG_NAME).write_text(json.dumps(plan.config))
        storage = validate_output(staging, plan)
        return stored_places(plan, storage) if verify else None

    total = share.source_bytes * (2 if verify else 1)
    with progress_bar(total, work.doing, unit='B', rank=ranks.rank) as bar:
        planner = MergePlanner(
            share, plan, threads, lambda: work.maker(result, stop), stop, bar.update
        )
        ranks.agree(lambda: _save(planner, writer, ranks))
        publish.step('written')
        places = ranks.agree(finish, root_only=True)
        publish.step('completed')
        written = perf_counter()
        if verify:
            own = ranks.scatter(places)
            fault = partial(work.fault, result)
            ranks.agree(lambda: verify_share(staging, share, own, fault, bar.update))
    work.complete(staging)
    makers = planner.mergers
    load = sum(maker.read_seconds for maker in makers) / max(len(makers), 1)
    accumulate = sum(maker.math_seconds for maker in makers) / max(len(makers), 1)
    copied = sum(job.length for job in share.byte_entries)
    figures = Figures(
        load,
        accumulate,
        max(written - started - load - accumulate, 0.0),
        perf_counter() - written,
        sum(maker.bytes_read for maker in makers) + copied,
        peak_memory(),
        peak_memory() - memory,
        work.count(makers, staging),
    )
    of_ranks = ranks.gather(figures)
    if of_ranks is not None:
        _summarise(result, of_ranks)
        work.summarise(result, of_ranks)
    return result


def _summarise(result: Result, figures: Sequence[Figures]) -> None:
    result.timings.load = max(figure.load for figure in figures)
    result.timings.accumulate = max(figure.accumulate for figure in figures)
    result.timings.save = max(figure.save for figure in figures)
    result.timings.verify = figures[0].verify
    result.bytes_read = sum(figure.bytes_read for figure in figures)
    result.peak_memory = [figure.peak_memory for figure in figures]


def _save(planner: MergePlanner, writer: MergeWriter, ranks: Ranks) -> None:
    """Run the save with one thread for each writer thread's arithmetic.

    Raises:
        CheckpointError: what stopped this rank, in one line
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        save_merged(planner, writer, ranks.group)
    except (CheckpointError, Interrupted):
        raise
    except BaseException as error:  # DCP wraps errors of all ranks in one of its own
        causes = [cause for cause, _ in getattr(error, 'failures', {}).values()]
        for cause in causes:
            if isinstance(cause, (CheckpointError, Interrupted)):
                raise cause from error
        raise CheckpointError(f"{writer.path}: can't be written: {[*causes, error][0]}") from error
    finally:
        torch.set_num_threads(before)
