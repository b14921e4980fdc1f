"""Files in the directories of other ranks, as far as files tell.

``args.rank`` is the number of the saving process in the whole run, from which its pipeline, tensor
and expert rank follow. Checkpoints that never were a run's have one number in all files, or none:
only files that are exactly each other's prove anything.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import CheckpointError
from ..common.numbers import number_in
from .torch_file import fingerprint

# The (pipeline, tensor, expert) rank of a directory's name to the file in it and its ``args``.
Placed = dict[tuple[int, int, int], tuple[Path, Any]]


@dataclass(frozen=True)
class GlobalRank:
    """Where a process stands among those of its run.

    Attributes:
        stage_size: processes of a stage that follow one another
        replica: which of several whole pipelines
        pipeline_rank: its stage
        within: its number in the stage
    """

    stage_size: int
    replica: int
    pipeline_rank: int
    within: int


def global_rank(args: Any) -> GlobalRank | None:
    """``args.rank`` taken apart; None where ``args`` lack a number or contradict themselves.

    Stages follow one another, each with all its replicas; with ``--use-tp-pp-dp-mapping`` whole
    pipelines follow one another.
    """
    rank, world = _number(args, 'rank'), _number(args, 'world_size')
    stages = _number(args, 'pipeline_model_parallel_size')
    tensor_size = _number(args, 'tensor_model_parallel_size')
    mapping = getattr(args, 'use_tp_pp_dp_mapping', False)
    pipelines = _number(args, 'data_parallel_size') if mapping else 1
    if rank is None or not (world and stages and tensor_size and pipelines) or rank >= world:
        return None
    stage_size, left = divmod(world, stages * pipelines)
    if left or not stage_size or stage_size % tensor_size:
        return None
    return GlobalRank(
        stage_size, rank // stage_size // stages, rank // stage_size % stages, rank % stage_size
    )


def _number(args: Any, name: str) -> int | None:
    value = number_in(args, name)
    return value if value is not None and value >= 0 else None


def refuse_misplaced_files(files: Placed) -> None:
    """Refuse directories that are exchanged, and a file that was copied over another.

    Raises:
        CheckpointError: names the first one
    """
    ranks = {_number(args, 'rank') for _, args in files.values()}
    if len(ranks) == 1 or None in ranks:  # saved by a tool, which may have repeated a stage
        for stage in {(pipeline, expert) for pipeline, _, expert in files}:
            _refuse_copies([files[at] for at in sorted(files) if (at[0], at[2]) == stage])
        return
    _refuse_exchanged(files)
    _refuse_copies([files[at] for at in sorted(files)])


def _refuse_exchanged(files: Placed) -> None:
    saved = {place: _saved_at(args) for place, (_, args) in files.items()}
    if {*saved.values()} != saved.keys():
        return
    moved = {place: found for place, found in saved.items() if found and found != place}
    # Ranks numbered in an order that isn't Megatron's would seem moved along two axes, most of
    # them.
    axes = {i for a, b in moved.items() for i in range(3) if a[i] != b[i]}
    if not moved or (len(axes) > 1 and 2 * len(moved) >= len(saved)):
        return
    place, found = min(moved.items())
    (path, args), (home, home_args) = files[place], files[found]
    expected = next(files[a][1].rank for a, b in moved.items() if b == place)
    raise CheckpointError(
        f'{path}: args.rank is {args.rank}, expected {expected}: the process of '
        f'{home.parent.name} saved it (whose file has args.rank {home_args.rank}); the '
        'directories are exchanged, rename them by args.rank'
    )


def _refuse_copies(files: Iterable[tuple[Path, Any]]) -> None:
    by_rank: dict[int | None, list[Path]] = {}
    for path, args in files:
        by_rank.setdefault(_number(args, 'rank'), []).append(path)
    for rank, paths in by_rank.items():
        seen: dict[Any, Path] = {}
        for path in paths if len(paths) > 1 else []:
            content = fingerprint(path)
            if content is not None and content in seen:
                raise CheckpointError(
                    f'{path}: a copy of the file in {seen[content].parent.name} (args.rank '
                    f'{rank} and all else are the same), expected that of another rank; '
                    'restore the file that was replaced'
                )
            seen[content] = path


def _saved_at(args: Any) -> tuple[int, int, int] | None:
    """Pipeline, tensor and expert rank of the process that saved a file."""
    found = global_rank(args)
    if found is None:
        return None
    tensor_size = _number(args, 'tensor_model_parallel_size') or 1
    experts = _number(args, 'expert_model_parallel_size') or 1
    expert_tensor_size = _number(args, 'expert_tensor_parallel_size') or tensor_size
    return (
        found.pipeline_rank,
        found.within % tensor_size,
        found.within // expert_tensor_size % experts,
    )
