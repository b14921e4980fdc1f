"""What the sources hold: stages, chunks, layers, ranks, and that all of it belongs together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import CheckpointError
from ..common.numbers import number_in, whole
from ..common.paths import parse_iteration_dirname
from .discover import Source, find_source
from .layout import ChunkId, first_missing
from .model_state import count_layers, is_prediction
from .rank_file import chunk_numbers
from .torch_file import read


@dataclass(frozen=True)
class StageSurvey:
    """One pipeline rank of a source, as its first shard has it.

    Attributes:
        path: the file
        layers: layers of each chunk by number; None is the number of plain ``model``
        empty: numbers of the chunks that hold nothing
        predicts: numbers of the chunks with multi-token prediction
        args: the file's ``args``; None without
    """

    path: Path
    layers: dict[int | None, int]
    empty: frozenset[int | None]
    predicts: frozenset[int | None]
    args: Any


@dataclass(frozen=True)
class SideSurvey:
    """A source.

    Attributes:
        name: 'edge', 'cloud' or ''
        source: its files
        stages: its pipeline ranks
    """

    name: str
    source: Source
    stages: dict[int, StageSurvey]

    def args(self) -> Any:
        """``args`` of the first pipeline rank; None without."""
        return self.stages[min(self.stages)].args

    @property
    def tensor_size(self) -> int:
        """Tensor ranks of the stage that has most of them."""
        return max(len({tp for tp, _ in self.source.shards(rank)}) for rank in self.stages)

    def stage(self, rank: int, flag: str) -> StageSurvey:
        """A pipeline rank that a flag names.

        Raises:
            CheckpointError: there is no such rank
        """
        if rank not in self.stages:
            raise CheckpointError(
                f'{self.source.directory}: {flag} names pipeline rank {rank}, found '
                f'{_list(self.stages)}'
            )
        return self.stages[rank]


def survey(name: str, root: Path, iteration: int | str | None, trust: bool) -> SideSurvey:
    """Look at the first shard of every pipeline rank of a source.

    Args:
        name: 'edge', 'cloud' or ''
        root: checkpoint root
        iteration: iteration or ``'release'``; the tracker's where None
        trust: load without restriction on classes

    Raises:
        CheckpointError: no legacy checkpoint, or a file that isn't a rank's
    """
    source = find_source(root, iteration, lambda path: read(path, trust).state)
    return survey_source(name, source, trust)


def survey_source(name: str, source: Source, trust: bool) -> SideSurvey:
    """Look at the first shard of every pipeline rank of a source whose files are known.

    Raises:
        CheckpointError: a file that isn't a rank's
    """
    stages = {}
    for rank in source.pipeline_ranks:
        tp, ep = source.shards(rank)[0]
        path = source.files[rank, tp, ep]
        state = read(path, trust).state
        layers, empty, predicts = {}, set(), set()
        _check_sizes(path, state.get('args'))
        for number in chunk_numbers(path, state):
            key = 'model' if number is None else f'model{number}'
            layers[number] = count_layers(state[key], f'{path}, {key}')
            if not state[key]:
                empty.add(number)
            if any(map(is_prediction, state[key])):
                predicts.add(number)
        stages[rank] = StageSurvey(
            path, layers, frozenset(empty), frozenset(predicts), state.get('args')
        )
    return SideSurvey(name, source, stages)


def _check_sizes(path: Path, args: Any) -> None:
    """What is read of ``args`` as a number is one, or None."""
    for name in (
        'pipeline_model_parallel_size',
        'virtual_pipeline_model_parallel_size',
        'tensor_model_parallel_size',
        'expert_model_parallel_size',
        'num_layers',
    ):
        value = getattr(args, name, None)
        if value is not None and whole(value) is None:
            raise CheckpointError(
                f'{path}: args.{name} is {value!r:.99}, expected a number; the file is damaged'
            )


def require_standard(side: SideSurvey, ranks: Iterable[int], flag: str) -> list[ChunkId]:
    """The plain ``model`` of the given stages.

    Raises:
        CheckpointError: a stage is missing, has virtual chunks already, or holds nothing
    """
    chunks = []
    for rank in ranks:
        stage = side.stage(rank, flag)
        if None not in stage.layers:
            raise CheckpointError(
                f'{stage.path}: has virtual chunks (model0 … model{len(stage.layers) - 1}), '
                'expected a standard stage with key `model`; use split or reshape'
            )
        _refuse_unproven_empty(stage)
        chunks.append(ChunkId(side.name, rank))
    return chunks


def require_chunks(
    side: SideSurvey, rank: int, count: int, flag: str, *, of_merged_stages: bool = False
) -> list[ChunkId]:
    """The chunks of one pipeline rank.

    Args:
        side: the side
        rank: its pipeline rank
        count: chunks that it should have
        flag: what names the rank
        of_merged_stages: the stages between first and last, of which some may have no layers; they
            are rank 0, where a stage kept as a rank of its own never is

    Raises:
        CheckpointError: the rank is missing, or has another number of chunks, or an empty one that
            is no stage
    """
    stage = side.stage(rank, flag)
    if None in stage.layers:
        raise CheckpointError(
            f'{stage.path}: a standard stage with key `model`, expected virtual chunks model0, '
            'model1, …; it is split already'
        )
    if len(stage.layers) != count:
        raise CheckpointError(
            f'{stage.path}: has {len(stage.layers)} chunks, expected {count} ({flag})'
        )
    if of_merged_stages and rank == 0:
        _refuse_unproven_empty(stage)
    elif stage.empty:
        raise CheckpointError(
            f'{stage.path}: key `model{next(iter(stage.empty))}` is empty, so rank {rank} has no '
            f'such stage ({flag}); for a rank kept as it is use --middle-ranks'
        )
    return [ChunkId(side.name, rank, number) for number in range(count)]


def require_middle(side: SideSurvey, ranks: Iterable[int], flag: str) -> list[ChunkId]:
    """``model0`` of ranks whose other chunks are empty; a stage without layers may be empty too.

    Raises:
        CheckpointError: a rank is missing, has no ``model0`` or something in another chunk
    """
    chunks = []
    for rank in ranks:
        stage = side.stage(rank, flag)
        filled = set(stage.layers) - stage.empty
        if not filled <= {0} or 0 not in stage.layers:
            found = ', '.join(
                'model' if number is None else f'model{number}'
                for number in stage.layers
                if number in filled
            )
            raise CheckpointError(
                f'{stage.path}: {flag} needs a stage in `model0` and nothing in other chunks, '
                f'found {found or "nothing"}'
            )
        if not filled:
            _refuse_unproven_empty(stage)
        chunks.append(ChunkId(side.name, rank, 0))
    return chunks


def every_chunk(side: SideSurvey) -> list[ChunkId]:
    """Every chunk of a whole model in pipeline order.

    Raises:
        CheckpointError: a rank is missing; ranks with different numbers of chunks; empty chunks
    """
    ranks = sorted(side.stages)
    require_contiguous(side.source.directory, ranks, side.args())
    first = side.stages[0]
    for stage in side.stages.values():
        if stage.layers.keys() != first.layers.keys():
            raise CheckpointError(
                f'{stage.path}: has {len(stage.layers)} chunks, {first.path} has '
                f'{len(first.layers)}; expected the same number on each rank'
            )
        _refuse_unproven_empty(stage)
    virtual = number_in(side.args(), 'virtual_pipeline_model_parallel_size') or 1
    if side.args() is not None and virtual != len(first.layers):
        raise CheckpointError(
            f'{first.path}: has {len(first.layers)} chunks, but args say '
            f'virtual_pipeline_model_parallel_size {virtual}; the checkpoint is damaged'
        )
    return [ChunkId(side.name, rank, number) for number in first.layers for rank in ranks]


def _refuse_unproven_empty(stage: StageSurvey) -> None:
    """An empty stage is one of a layout that has such, or a lost one; the layer count tells."""
    if stage.empty and number_in(stage.args, 'num_layers') is None:
        raise CheckpointError(
            f'{stage.path}: a chunk is empty, and without num_layers in args nothing tells '
            'whether it lost its layers'
        )


def require_contiguous(where: Path, ranks: Sequence[int], args: Any) -> None:
    """Refuse a gap in the pipeline ranks, and ranks missing at the end.

    Raises:
        CheckpointError: names the missing rank
    """
    expected = number_in(args, 'pipeline_model_parallel_size') or max(ranks) + 1
    missing = first_missing(ranks, expected)
    if missing is not None:
        raise CheckpointError(
            f'{where}: pipeline stage {missing} is missing (found {_list(ranks)}, expected '
            f'{expected} stages)'
        )
    if len(ranks) > expected:
        raise CheckpointError(
            f'{where}: has {len(ranks)} pipeline stages, but args say '
            f"pipeline_model_parallel_size {expected}; remove what doesn't belong"
        )


def require_shards(
    side: SideSurvey, ranks: Iterable[int], largest: int
) -> list[tuple[int, int | None]]:
    """The (tensor, expert) ranks that all given pipeline ranks of a side have.

    Stages of one run may have tensor sizes of their own, and then ``args`` of all of them hold the
    largest: the directories decide, where some stage has as many ranks as ``args`` say.

    Args:
        side: the side
        ranks: pipeline ranks
        largest: tensor ranks of the stage that has most of them, of all sides of the model

    Raises:
        CheckpointError: they differ between stages, or one is missing
    """
    ranks = sorted(set(ranks))
    directory, shards = side.source.directory, side.source.shards(ranks[0])
    for rank in ranks[1:]:
        other = side.source.shards(rank)
        if other != shards:
            raise CheckpointError(
                f'{directory}: stage {rank} has tensor-parallel ranks {_shards(other)}, stage '
                f'{ranks[0]} has {_shards(shards)}; stages of one side need the same'
            )
    args = side.stages[ranks[0]].args
    stated = number_in(args, 'tensor_model_parallel_size') or 1
    for kind, found, size in (
        ('tensor', {tp for tp, _ in shards}, stated if stated > largest else 1),
        (
            'expert',
            {ep or 0 for _, ep in shards},
            number_in(args, 'expert_model_parallel_size') or 1,
        ),
    ):
        size = max(size, 1 + max(found))
        missing = first_missing(found, size)
        if missing is not None:
            raise CheckpointError(
                f'{directory}: {kind}-parallel rank {missing} of stage {ranks[0]} is missing '
                f'(found {_shards(shards)}, expected {size} ranks)'
            )
    return shards


def check_iteration(path: Path, state: Any, directory: Path) -> None:
    """Refuse a file whose ``iteration`` isn't its directory's.

    Raises:
        CheckpointError: they differ
    """
    expected = parse_iteration_dirname(directory.name)
    found = state.get('iteration', expected)
    if expected is not None and whole(found) != expected:
        raise CheckpointError(
            f'{path}: key `iteration` is {found!r:.99}, expected {expected} as in '
            f'{directory.name}; a copy under another name, or damaged'
        )


def check_layers(total: int, args: Any, where: Path) -> None:
    """Refuse a model whose layers aren't as many as ``args`` say.

    Raises:
        CheckpointError: they aren't
    """
    expected = number_in(args, 'num_layers')
    if expected is not None and total != expected:
        raise CheckpointError(
            f'{where}: the stages hold {total} layers, but args say num_layers {expected}; a '
            'stage is missing or damaged'
        )


def _list(ranks: Iterable[int]) -> str:
    return ', '.join(map(str, sorted(ranks)))


def _shards(shards: Iterable[tuple[int, int | None]]) -> str:
    return ', '.join(str(tp) if ep is None else f'{tp}/{ep}' for tp, ep in shards)
