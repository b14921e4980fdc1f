"""The three commands as conversions: which sources, which outputs, and how a plan follows.

Sources and outputs are roots of checkpoints, by side: 'edge' and 'cloud', or '' for a whole model.
A plan raises ``CheckpointError`` where the sources don't hold what the command names.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import chunk_key

from ..common.errors import CheckpointError
from .layout import ChunkId, OutputSide, Plan, interleaved, one_to_one, resplit

if TYPE_CHECKING:  # it needs torch, which takes seconds to import
    from .sources import Side

Sides = Mapping[str, 'Side']


@dataclass(frozen=True)
class Conversion:
    """A conversion as the command line states it.

    Attributes:
        sources, outputs: root of each side
        plan: makes the plan once the sources are known
    """

    sources: dict[str, Path]
    outputs: dict[str, Path]
    plan: Callable[[Sides], Plan]


def merge_sides(
    edge_stages: Sequence[int],
    cloud_stages: Sequence[int],
    middle_stages: Sequence[int],
    sources: dict[str, Path],
    outputs: dict[str, Path],
) -> Conversion:
    """Stages to chunks of edge rank 0, and to chunks of cloud rank 0 or to cloud ranks 1, 2, ….

    Args:
        edge_stages: ``--merge-stages``
        cloud_stages: ``--merge-cloud-stages``; empty where ``--middle-stages`` is given
        middle_stages: ``--middle-stages``; empty where ``--merge-cloud-stages`` is given
    """
    flag, others = '--merge-cloud-stages', cloud_stages
    if not cloud_stages:
        flag, others = '--middle-stages', middle_stages

    def plan(sides: Sides) -> Plan:
        _require_rising('--merge-stages', edge_stages)
        _require_rising(flag, others)
        _require_cover(sides, edge_stages, others, flag)
        _require_ends(edge_stages, others, flag)
        targets = {stage: ChunkId('edge', 0, i) for i, stage in enumerate(edge_stages)}
        targets |= {
            stage: ChunkId('cloud', 0, i) if cloud_stages else ChunkId('cloud', i + 1, 0)
            for i, stage in enumerate(others)
        }
        order = sorted(targets)
        cloud = OutputSide('cloud', 1 + len(middle_stages), len(cloud_stages) or 1)
        return _whole_chunks(
            sides,
            [_standard(sides[targets[stage].side], stage, flag) for stage in order],
            [targets[stage] for stage in order],
            [OutputSide('edge', 1, len(edge_stages)), cloud],
            empty=[ChunkId('cloud', rank + 1, 1) for rank in range(len(middle_stages))],
        )

    return Conversion(sources, outputs, plan)


def split_sides(
    edge_rank: int,
    cloud_rank: int,
    cloud_chunks: int,
    middle_ranks: Sequence[int],
    sources: dict[str, Path],
    output: Path,
) -> Conversion:
    """Chunks 0 and 1 of an edge rank, and chunks or ranks of the cloud between them, to stages.

    Args:
        edge_rank: ``--split-rank``
        cloud_rank: ``--split-cloud-rank``
        cloud_chunks: ``--num-cloud-vpp-chunks``
        middle_ranks: ``--middle-ranks``; where given, the two before are not used
    """

    def plan(sides: Sides) -> Plan:
        first, last = _chunks(sides['edge'], edge_rank, 2, '--split-rank takes model0 and model1')
        if middle_ranks:
            _require_rising('--middle-ranks', middle_ranks)
            between = [_middle(sides['cloud'], rank) for rank in middle_ranks]
        else:
            flag = '--num-cloud-vpp-chunks'
            between = _chunks(sides['cloud'], cloud_rank, cloud_chunks, flag, of_merged_stages=True)
        taken = {'edge': {edge_rank}, 'cloud': {chunk.rank for chunk in between}}
        _require_all_taken(sides, taken)
        return _stages(sides, [first, *between, last])

    return Conversion(sources, {'': output}, plan)


def merge_plain(pipeline_size: int, source: Path, output: Path) -> Conversion:
    """Stages to chunks of ``pipeline_size`` ranks in Megatron's interleaved order."""

    def plan(sides: Sides) -> Plan:
        side = sides['']
        stages = sorted(side.stages)
        side.require_contiguous(stages)
        virtual_size, left = divmod(len(stages), pipeline_size)
        if left or virtual_size == 1:
            raise CheckpointError(
                f'--pipeline-size {pipeline_size}: {side.directory} has {len(stages)} stages, '
                'expected a multiple with at least two chunks a rank'
            )
        return _whole_chunks(
            sides,
            [_standard(side, stage, '--pipeline-size') for stage in stages],
            interleaved(pipeline_size, virtual_size),
            [OutputSide('', pipeline_size, virtual_size)],
        )

    return Conversion({'': source}, {'': output}, plan)


def split_plain(source: Path, output: Path) -> Conversion:
    """Chunks in Megatron's interleaved order to stages."""

    def plan(sides: Sides) -> Plan:
        chunks = sides[''].every_chunk()
        if chunks[0].chunk is None:
            raise CheckpointError(
                f'{sides[""].directory}: standard stages with key `model`, expected virtual '
                'chunks model0, model1, …; it is split already'
            )
        return _stages(sides, chunks)

    return Conversion({'': source}, {'': output}, plan)


def reshape(
    pipeline_size: int,
    virtual_size: int,
    layers_per_chunk: Sequence[int] | None,
    source: Path,
    output: Path,
) -> Conversion:
    """Any stages or chunks to any others, layer by layer.

    Args:
        pipeline_size: pipeline ranks of the output
        virtual_size: chunks of each rank; 1 for none
        layers_per_chunk: layers of each new chunk in pipeline order; default: equally many
    """

    def plan(sides: Sides) -> Plan:
        side = sides['']
        chunks = side.every_chunk()
        layers = [side.layers(chunk) for chunk in chunks]
        plan = resplit(chunks, layers, pipeline_size, virtual_size, layers_per_chunk)
        if [move.target for move in plan.moves] == list(chunks) and plan.layers() == layers:
            raise CheckpointError(f'{side.directory}: has this layout already; nothing to convert')
        side.require_layers(sum(layers))
        return plan

    return Conversion({'': source}, {'': output}, plan)


def _stages(sides: Sides, chunks: Sequence[ChunkId]) -> Plan:
    targets = [ChunkId('', stage) for stage in range(len(chunks))]
    return _whole_chunks(sides, chunks, targets, [OutputSide('', len(chunks), None)])


def _whole_chunks(
    sides: Sides,
    chunks: Sequence[ChunkId],
    targets: Sequence[ChunkId],
    outputs: Sequence[OutputSide],
    empty: Sequence[ChunkId] = (),
) -> Plan:
    layers = [sides[chunk.side].layers(chunk) for chunk in chunks]
    next(iter(sides.values())).require_layers(sum(layers))
    return one_to_one(chunks, targets, layers, outputs, empty)


def _standard(side: 'Side', rank: int, flag: str) -> ChunkId:
    """The plain ``model`` of a stage."""
    stage = side.stage(rank, flag)
    if None not in stage.layers:
        raise CheckpointError(
            f'{stage.path}: has virtual chunks (model0 … model{len(stage.layers) - 1}), '
            'expected a standard stage with key `model`; use split or reshape'
        )
    stage.refuse_unproven_empty()
    return ChunkId(side.name, rank)


def _chunks(
    side: 'Side', rank: int, count: int, flag: str, *, of_merged_stages: bool = False
) -> list[ChunkId]:
    """The chunks of one pipeline rank.

    Those of merged stages lie between first and last, and some may have no layers; they are rank 0,
    where a stage kept as a rank of its own never is.
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
        stage.refuse_unproven_empty()
    elif stage.empty:
        raise CheckpointError(
            f'{stage.path}: key `{chunk_key(stage.empty[0])}` is empty, so rank {rank} has no '
            f'such stage ({flag}); for a rank kept as it is use --middle-ranks'
        )
    return [ChunkId(side.name, rank, number) for number in range(count)]


def _middle(side: 'Side', rank: int) -> ChunkId:
    """``model0`` of a rank whose other chunks are empty; it may have no layers either."""
    stage = side.stage(rank, '--middle-ranks')
    filled = stage.layers.keys() - stage.empty
    if not filled <= {0} or 0 not in stage.layers:
        found = ', '.join(chunk_key(number) for number in stage.layers if number in filled)
        raise CheckpointError(
            f'{stage.path}: --middle-ranks needs a stage in `model0` and nothing in other chunks, '
            f'found {found or "nothing"}'
        )
    if not filled:
        stage.refuse_unproven_empty()
    return ChunkId(side.name, rank, 0)


def _require_rising(flag: str, numbers: Sequence[int]) -> None:
    for one, two in zip(numbers, numbers[1:], strict=False):
        if one == two:
            raise CheckpointError(f'{flag}: {one} is named twice')
        if one > two:
            raise CheckpointError(f'{flag}: {one} before {two}; name them in pipeline order')


def _require_cover(sides: Sides, edge: Collection[int], others: Collection[int], flag: str) -> None:
    """Each stage of either source goes to exactly one side, and none is missing in between."""
    for side, stages, name in (('edge', edge, '--merge-stages'), ('cloud', others, flag)):
        for stage in stages:
            sides[side].stage(stage, name)
    if both := sorted({*edge} & {*others}):
        raise CheckpointError(f'stage {both[0]} is named by --merge-stages and by {flag}')
    found = {stage: side.directory for side in sides.values() for stage in side.stages}
    if left := sorted(found.keys() - {*edge, *others}):
        raise CheckpointError(
            f'{found[left[0]]}: stage {left[0]} is named by neither --merge-stages nor {flag}; '
            'name every stage'
        )
    sides['edge'].require_contiguous([*edge, *others])


def _require_ends(edge: Sequence[int], others: Sequence[int], flag: str) -> None:
    """The edge has the ends of the model, the cloud one run of stages between them."""
    last = max(*edge, *others)
    for stage, end in ((0, 'first'), (last, 'last')):
        if stage in others:
            raise CheckpointError(
                f'{flag} names stage {stage}, the {end} of {last + 1}; the edge has the first and '
                'the last stages, the cloud those between: name it with --merge-stages'
            )
    for stage in edge:
        if others[0] < stage < others[-1]:
            raise CheckpointError(
                f'--merge-stages names stage {stage}, which lies between stages {others[0]} and '
                f'{others[-1]} of {flag}; the edge has the first and the last stages, the cloud '
                'those between'
            )


def _require_all_taken(sides: Sides, taken: Mapping[str, set[int]]) -> None:
    directories: dict[Path, tuple[set[int], set[int]]] = {}
    for name, side in sides.items():
        found, used = directories.setdefault(side.directory.resolve(), (set(), set()))
        found |= set(side.stages)
        used |= taken[name]
    for directory, (found, used) in directories.items():
        if left := sorted(found - used):
            raise CheckpointError(
                f'{directory}: pipeline rank {left[0]} would be left out (found '
                f'{", ".join(map(str, sorted(found)))}); name every rank'
            )
