"""Writing a checkpoint from several ranks, published as one or not at all."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch

from ..common.errors import CheckpointError
from ..common.paths import METADATA_NAME
from ..common.publish import Interrupted, Publication
from ..common.stored import check_file
from .ranks import RankLost, Ranks
from .report import Timings
from .source import Slice
from .writer import MergePlanner, MergeWriter, save_merged


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
    needed: Counter[Path] = Counter()
    for path, piece in pieces:
        needed[path] = max(needed[path], piece.offset + piece.length)
    for path, size in needed.items():
        check_file(path, size)


class _Result(Protocol):
    timings: Timings


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
        staging = ranks.scatter([publication.path(target)] * ranks.size if publication else None)
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
            return ranks.scatter([result] * ranks.size if result else None)
        except RankLost as error:
            if publication is not None and publication.committed and result is not None:
                return result
            raise RankLost(
                f'rank 0 was lost while publishing; see whether {target} exists'
            ) from error


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
