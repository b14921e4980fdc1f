"""The sources of a conversion: their rank files, and what each stage holds."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_overlay.standalone.dist_checkpointing.format_names import LEGACY, TORCH_DIST

from megatron_overlay.commands import command_of

from ..common.directory import find_checkpoint
from ..common.errors import CheckpointError
from ..common.numbers import number_in
from ..common.paths import (
    RELEASE,
    TRACKER_NAME,
    is_rank_dirname,
    iteration_dir,
    iteration_dirname,
    iterations_in,
    parse_iteration_dirname,
    real_path,
)
from .keys import is_embedding, layer_of
from .layout import ChunkId, Plan, first_missing
from .rank_file import RankFile, take_apart
from .torch_file import MappedFile

FILE_NAME = 'model_optim_rng.pt'

_RANK_DIR = re.compile(r'mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?', re.ASCII)
_SEPARATE_OPTIMIZER = re.compile(r'distrib_optim\.pt|layer_wise_optimizer_\d+\.pt')

# Tensor and expert rank; the latter None without expert parallelism.
ShardRank = tuple[int, int | None]
# Rank files of one tensor and expert rank, by side and pipeline rank; of all of them, by side, too.
ShardPaths = Mapping[tuple[str, int], Path]
Shards = Mapping[tuple[str, ShardRank], ShardPaths]
MapFile = Callable[[Path], MappedFile]


@dataclass(frozen=True, order=True)
class RankId:
    """Parallel ranks that a file is for.

    Attributes:
        tp: tensor-parallel rank
        pp: pipeline rank; None without a pipeline
        ep: expert-parallel rank; None without expert parallelism
    """

    tp: int
    pp: int | None
    ep: int | None = None

    @property
    def dirname(self) -> str:
        """The directory that Megatron reads: ``mp_rank_TT[_PPP][_EEE]``."""
        fields = [f'mp_rank_{self.tp:02d}']
        fields += [f'{rank:03d}' for rank in (self.pp, self.ep) if rank is not None]
        return '_'.join(fields)


@dataclass(frozen=True)
class Side:
    """A source: one iteration of a checkpoint, whole or the edge or cloud side of a model.

    Attributes:
        name: 'edge', 'cloud' or ''
        directory: of the iteration
        files: path of each rank file, by (pipeline rank, tensor rank, expert rank or None)
        stages: by pipeline rank the first of its files, without optimizer state
    """

    name: str
    directory: Path
    files: Mapping[tuple[int, int, int | None], Path]
    stages: Mapping[int, RankFile]

    @property
    def args(self) -> Any:
        """``args`` of the first pipeline rank; None without."""
        return self.stages[min(self.stages)].args

    @property
    def tensor_size(self) -> int:
        """Tensor ranks of the stage that has most of them."""
        return max(len({tp for tp, _ in shards_of(self.files, rank)}) for rank in self.stages)

    def layers(self, chunk: ChunkId) -> int:
        return self.stages[chunk.rank].layers[chunk.chunk]

    def stage(self, rank: int, flag: str) -> RankFile:
        """A pipeline rank that a flag names.

        Raises:
            CheckpointError: there is no such rank
        """
        if rank not in self.stages:
            raise CheckpointError(
                f'{self.directory}: {flag} names pipeline rank {rank}, found {_list(self.stages)}'
            )
        return self.stages[rank]

    def every_chunk(self) -> list[ChunkId]:
        """Every chunk of a whole model in pipeline order.

        Raises:
            CheckpointError: a rank is missing; ranks with different numbers of chunks; empty chunks
        """
        ranks = sorted(self.stages)
        self.require_contiguous(ranks)
        first = self.stages[0]
        for stage in self.stages.values():
            if stage.layers.keys() != first.layers.keys():
                raise CheckpointError(
                    f'{stage.path}: has {len(stage.layers)} chunks, {first.path} has '
                    f'{len(first.layers)}; expected the same number on each rank'
                )
            stage.refuse_unproven_empty()
        virtual = number_in(self.args, 'virtual_pipeline_model_parallel_size') or 1
        if self.args is not None and virtual != len(first.layers):
            raise CheckpointError(
                f'{first.path}: has {len(first.layers)} chunks, but args say '
                f'virtual_pipeline_model_parallel_size {virtual}; the checkpoint is damaged'
            )
        return [ChunkId(self.name, rank, number) for number in first.layers for rank in ranks]

    def require_contiguous(self, ranks: Collection[int]) -> None:
        """Refuse pipeline ranks with a gap, too few at the end, or too many.

        Raises:
            CheckpointError: names the missing rank
        """
        expected = number_in(self.args, 'pipeline_model_parallel_size') or max(ranks) + 1
        missing = first_missing(ranks, expected)
        if missing is not None:
            raise CheckpointError(
                f'{self.directory}: pipeline stage {missing} is missing (found {_list(ranks)}, '
                f'expected {expected} stages)'
            )
        if len(ranks) > expected:
            raise CheckpointError(
                f'{self.directory}: has {len(ranks)} pipeline stages, but args say '
                f"pipeline_model_parallel_size {expected}; remove what doesn't belong"
            )

    def require_layers(self, total: int) -> None:
        """Refuse a model whose layers aren't as many as ``args`` say.

        Raises:
            CheckpointError: they aren't
        """
        expected = number_in(self.args, 'num_layers')
        if expected is not None and total != expected:
            raise CheckpointError(
                f'{self.directory}: the stages hold {total} layers, but args say num_layers '
                f'{expected}; a stage is missing or damaged'
            )

    def shards(self, ranks: Collection[int], largest: int) -> list[ShardRank]:
        """The (tensor, expert) ranks that all given pipeline ranks have.

        Stages of one run may have tensor sizes of their own, and then ``args`` of all of them hold
        the largest: the directories decide, where some stage has as many ranks as ``args`` say.

        Args:
            largest: tensor ranks of the stage that has most of them, of all sides of the model

        Raises:
            CheckpointError: they differ between stages, or one is missing
        """
        start, *others = sorted(ranks)
        shards = shards_of(self.files, start)
        for rank in others:
            other = shards_of(self.files, rank)
            if other != shards:
                raise CheckpointError(
                    f'{self.directory}: stage {rank} has tensor-parallel ranks {_shown(other)}, '
                    f'stage {start} has {_shown(shards)}; stages of one side need the same'
                )
        args = self.stages[start].args
        stated = number_in(args, 'tensor_model_parallel_size') or 1
        experts = number_in(args, 'expert_model_parallel_size') or 1
        for kind, found, size in (
            ('tensor', {tp for tp, _ in shards}, stated if stated > largest else 1),
            ('expert', {ep or 0 for _, ep in shards}, experts),
        ):
            size = max(size, 1 + max(found))
            missing = first_missing(found, size)
            if missing is not None:
                raise CheckpointError(
                    f'{self.directory}: {kind}-parallel rank {missing} of stage {start} is missing '
                    f'(found {_shown(shards)}, expected {size} ranks)'
                )
        return shards


def shards_of(files: Iterable[tuple[int, int, int | None]], pipeline_rank: int) -> list[ShardRank]:
    """The (tensor, expert) ranks of one pipeline rank."""
    found = [(tp, ep) for pp, tp, ep in files if pp == pipeline_rank]
    return sorted(found, key=lambda shard: (shard[0], shard[1] or 0))


def shard_paths(sides: Mapping[str, Side], plan: Plan) -> Shards:
    """The rank files of a plan's sources by side and shard, and then by side and pipeline rank.

    Raises:
        CheckpointError: stages of one side have different tensor or expert ranks, or lack some
    """
    used: dict[str, set[int]] = {}
    for chunk in plan.sources:
        used.setdefault(chunk.side, set()).add(chunk.rank)
    largest = max(side.tensor_size for side in sides.values())
    return {
        (name, shard): {(name, rank): sides[name].files[rank, *shard] for rank in sorted(ranks)}
        for name, ranks in used.items()
        for shard in sides[name].shards(ranks, largest)
    }


def split_path(path: Path) -> tuple[Path, int | str | None]:
    """Root and iteration of a path: that of an iteration's own directory names both.

    Returns:
        the root, and the iteration or ``'release'``; None where the path is the root
    """
    real = real_path(path)
    iteration = RELEASE if real.name == RELEASE else parse_iteration_dirname(real.name)
    if iteration is None or (path / TRACKER_NAME).exists():
        return path, None
    return real.parent, iteration


def find_directory(root: Path, iteration: int | str | None) -> Path:
    """The directory of the iteration to convert.

    Args:
        root: checkpoint root, or the iteration's own directory
        iteration: iteration or ``'release'``; the tracker's where None

    Raises:
        CheckpointError: no such iteration, one that was not finished, or another format
    """
    home, named = split_path(root)
    if named is not None and iteration not in (None, named):
        raise CheckpointError(
            f'{root}: names {iteration_dirname(named)}, but the iteration to convert is '
            f'{iteration} (--iteration, or that of the edge); name the root {home}'
        )
    iteration = named if iteration is None else iteration
    if iteration is None and not (root / TRACKER_NAME).exists():
        if (known := iterations_in(root)) != 'none':
            raise CheckpointError(
                f'{root / TRACKER_NAME}: no such file; iterations in {root}: {known}; name one '
                'with --iteration'
            )
    found = find_checkpoint(root if iteration is None else iteration_dir(home, iteration))
    if found.format == TORCH_DIST:
        raise CheckpointError(
            f'{found.directory}: a torch_dist checkpoint (metadata.json), expected legacy `torch` '
            '(mp_rank_*); torch_dist loads into any pipeline layout as it is, and '
            f'{command_of("weighted_merge")} merges it'
        )
    if found.format != LEGACY:
        raise CheckpointError(
            f'{found.directory}: a {found.format} checkpoint, expected legacy `torch` '
            '(mp_rank_*); it loads into any pipeline layout as it is'
        )
    if found.directory.name != RELEASE and parse_iteration_dirname(found.directory.name) is None:
        raise CheckpointError(
            f'{found.directory}: has the name of no iteration, by which Megatron would load what '
            'is made of it; rename it to iter_XXXXXXX'
        )
    return found.directory


def look_at(name: str, directory: Path, read: MapFile) -> Side:
    """The rank files of a legacy checkpoint, and what the first of each stage holds.

    Args:
        name: 'edge', 'cloud' or ''
        directory: ``iter_XXXXXXX``, ``release``, or one of any other name

    Raises:
        CheckpointError: a directory name that isn't one of Megatron's; a rank without its file;
            a file that isn't a rank's
    """
    names = sorted(entry.name for entry in directory.iterdir() if is_rank_dirname(entry.name))
    ranks = [_parse(directory, entry) for entry in names]
    paths = [directory / entry / FILE_NAME for entry in names]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f'{path.parent}: no {FILE_NAME}; the checkpoint is damaged')
    two_fields = all(rank.ep is None and rank.pp is not None for rank in ranks)
    if two_fields and _are_of_experts(paths, read):
        ranks = [RankId(rank.tp, None, rank.pp) for rank in ranks]
    if len({(rank.pp is None, rank.ep is None) for rank in ranks}) > 1:
        raise CheckpointError(
            f'{directory}: directories with different numbers of fields '
            f"({names[0]} … {names[-1]}); expected one layout, remove what doesn't belong"
        )
    files = {
        (rank.pp or 0, rank.tp, rank.ep): path for rank, path in zip(ranks, paths, strict=True)
    }
    stages = {
        rank: take_apart(read(files[rank, *shards_of(files, rank)[0]]), with_optimizer=False)
        for rank in sorted({pp for pp, _, _ in files})
    }
    return Side(name, directory, files, stages)


def _parse(directory: Path, name: str) -> RankId:
    match = _RANK_DIR.fullmatch(name)
    fields = match.groups() if match else (None, None, None)
    tp, pp, ep = (None if field is None else int(field) for field in fields)
    rank = RankId(tp or 0, pp, ep)
    if rank.dirname != name:  # 2-digit and 3-digit numbers, more digits only where needed
        raise CheckpointError(
            f'{directory / name}: not a rank directory; expected mp_rank_TT, mp_rank_TT_PPP or '
            'mp_rank_TT_PPP_EEE'
        )
    return rank


def _are_of_experts(files: Sequence[Path], read: MapFile) -> bool:
    """Whether the second field of the directories' names is an expert rank, by ``args`` or keys."""
    args = read(files[0]).state.get('args')
    pipeline_size = number_in(args, 'pipeline_model_parallel_size')
    if pipeline_size is not None:
        return pipeline_size == 1 and (number_in(args, 'expert_model_parallel_size') or 1) > 1
    # stages differ in their ends, ranks of experts hold the same keys and both ends
    keys = {_model_keys(read(file).state) for file in files}
    ends = {is_embedding(key) for found in keys for key in found if layer_of(key) is None}
    return len(files) > 1 and len(keys) == 1 and ends == {True, False}


def _model_keys(state: Mapping[str, Any]) -> frozenset[str]:
    model = state.get('model')
    keys = model if isinstance(model, Mapping) else ()
    return frozenset(key for key in keys if isinstance(key, str))


def refuse_other_files(paths: Iterable[Path], drop_optimizer: bool) -> None:
    """Refuse files beside the rank files that hold state this tool would lose.

    Raises:
        CheckpointError: names the first one
    """
    for path in paths:
        for other in sorted(path.parent.iterdir()):
            if _SEPARATE_OPTIMIZER.fullmatch(other.name):
                if drop_optimizer:
                    continue
                raise CheckpointError(
                    f'{other}: optimizer state in a file of its own, which is laid out by rank '
                    "and can't be carried; convert with --drop-optimizer, or train with "
                    '--ckpt-format torch_dist, which loads into any layout'
                )
            if other.name != FILE_NAME and other.suffix == '.pt':
                raise CheckpointError(
                    f'{other}: not a file that this tool knows (expected {FILE_NAME} only); '
                    "move it away if it isn't needed"
                )


def _list(ranks: Iterable[int]) -> str:
    return ', '.join(map(str, sorted(ranks)))


def _shown(shards: Iterable[ShardRank]) -> str:
    return ', '.join(str(tp) if ep is None else f'{tp}/{ep}' for tp, ep in shards)
