"""Writing a checkpoint from several ranks, published as one or not at all."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch

from ..common.errors import CheckpointError
from ..common.publish import Interrupted, Publication
from .ranks import RankLost, Ranks
from .report import Timings
from .writer import MergePlanner, MergeWriter, save_merged


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
