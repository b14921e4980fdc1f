"""Writing a checkpoint from several ranks, published as one or not at all."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ..common import publish
from ..common.errors import CheckpointError
from ..common.paths import CONFIG_NAME, METADATA_NAME
from ..common.progress import peak_memory, progress_bar
from ..common.publish import Interrupted, Publication
from ..common.stored import check_files
from .common_state import save_common_state
from .places import Places, stored_places
from .plan import MergePlan, RankShare
from .ranks import RankLost, Ranks
from .report import Timings
from .source import Slice
from .validate import validate_output
from .writer import ChunkMaker, MergePlanner, MergeWriter, save_merged

MAX_THREADS = 4  # more contend for the interpreter; add ranks instead


def fingerprints(directories: Iterable[Path], ranks: Ranks) -> dict[Path, str]:
    """What ``check_visible`` compares; nothing where there is one rank."""
    return {path: _fingerprint(path) for path in directories} if ranks.size > 1 else {}


def _fingerprint(directory: Path) -> str:
    """Of the metadata, which names the save, so that no two checkpoints have the same."""
    with open(directory / METADATA_NAME, 'rb') as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()


def check_visible(seen: Mapping[Path, str], pieces: Iterable[tuple[Path, Slice]]) -> None:
    """This rank sees the inputs that rank 0 sees, and every file that it is to read, in full.

    Args:
        seen: rank 0's ``fingerprints``
        pieces: file and bytes of what this rank is to read
    """
    for directory, expected in seen.items():
        if _fingerprint(directory) != expected:
            raise CheckpointError(
                f'{directory / METADATA_NAME}: another checkpoint than rank 0 sees there; the '
                'inputs must be on storage that all ranks share'
            )
    check_files((path, piece.end) for path, piece in pieces)


class _Result(Protocol):
    timings: Timings
    bytes_read: int
    peak_memory: list[int]


@dataclass
class Figures:
    """One rank's part of a report: seconds, bytes."""

    load: float
    accumulate: float
    save: float
    verify: float
    bytes_read: int
    peak_memory: int
    own_memory: int


def publish_together[R: _Result](
    ranks: Ranks,
    target: Path,
    trackers: Mapping[Path, str] | None,
    fill: Callable[[Path], R | None],
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
            assert publication is not None and result is not None
            publication.commit()
            result.timings.publish = perf_counter() - started
            result.timings.total = perf_counter() - begin
            return result

        try:
            result = ranks.agree(commit, root_only=True)
            return ranks.broadcast(result)
        except RankLost as error:
            if publication is not None and publication.committed and result is not None:
                return result
            raise RankLost(
                f'rank 0 was lost while publishing; see whether {target} exists'
            ) from error


def write_share[M: ChunkMaker](
    ranks: Ranks,
    share: RankShare,
    plan: MergePlan | None,
    staging: Path,
    target: Path,
    threads: int | None,
    new_maker: Callable[[threading.Event], M],
    common_state: Callable[[], Mapping[str, Any] | None],
    verify: Callable[[Iterable[_StorageInfo], Callable[[int], object]], object] | None,
    what: str,
    memory: int,
) -> tuple[Sequence[M], Figures]:
    """Write this rank's chunks into the staging directory, and check them; collective.

    Args:
        plan: of the whole output; on rank 0
        target: where ``staging`` will stand
        threads: that write; None for torch's number of threads, at most ``MAX_THREADS``
        new_maker: makes what fills chunks in one thread, until the event is set
        common_state: gives that of the output, on rank 0; None where there is none to save
        verify: looks at what was written, where the metadata says, and tells the bytes of each
            chunk
        what: is being done, for the progress bar
        memory: that the process held at the beginning

    Returns:
        what filled the chunks, and the figures of it
    """
    started = perf_counter()
    stop = threading.Event()
    writer = MergeWriter(staging, target, threads or _default_threads(), stop)

    def complete() -> list[Places] | None:
        assert plan is not None
        state = common_state()
        if state is not None:
            save_common_state(state, staging)
            (staging / CONFIG_NAME).write_text(json.dumps(plan.config))
        storage = validate_output(staging, plan)
        return stored_places(plan, storage) if verify else None

    total = share.source_bytes * (2 if verify else 1)
    with progress_bar(total, what, unit='B', rank=ranks.rank) as bar:
        planner = MergePlanner(share, plan, lambda: new_maker(stop), stop, bar.update)
        ranks.agree(lambda: save_on_ranks(planner, writer, ranks))
        publish.step('written')
        places = ranks.agree(complete, root_only=True)
        publish.step('completed')
        written = perf_counter()
        if verify is not None:
            own = ranks.scatter(places)
            ranks.agree(lambda: verify(own, bar.update))
    makers = planner.mergers
    load = sum(maker.read_seconds for maker in makers) / max(len(makers), 1)
    accumulate = sum(maker.math_seconds for maker in makers) / max(len(makers), 1)
    copied = sum(job.length for job in share.byte_entries)
    return makers, Figures(
        load,
        accumulate,
        max(written - started - load - accumulate, 0.0),
        perf_counter() - written,
        sum(maker.bytes_read for maker in makers) + copied,
        peak_memory(),
        peak_memory() - memory,
    )


def _default_threads() -> int:
    return min(torch.get_num_threads(), MAX_THREADS)


def summarise(result: _Result, figures: Sequence[Figures]) -> None:
    """Put all ranks' figures into the result."""
    result.timings.load = max(figure.load for figure in figures)
    result.timings.accumulate = max(figure.accumulate for figure in figures)
    result.timings.save = max(figure.save for figure in figures)
    result.timings.verify = figures[0].verify
    result.bytes_read = sum(figure.bytes_read for figure in figures)
    result.peak_memory = [figure.peak_memory for figure in figures]


def _check_staging(staging: Path) -> None:
    if not staging.is_dir():
        raise CheckpointError(
            f"{staging.parent}: not shared: this rank doesn't see what rank 0 made there"
        )


def save_on_ranks(planner: MergePlanner, writer: MergeWriter, ranks: Ranks) -> None:
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
