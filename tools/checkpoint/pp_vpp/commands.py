"""The three conversions as requests: which sources, which outputs, and how a plan follows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import CheckpointError
from .layout import ChunkId, OutputSide, Plan, interleaved, one_to_one, resplit
from .survey import (
    SideSurvey,
    check_layers,
    every_chunk,
    require_chunks,
    require_contiguous,
    require_middle,
    require_standard,
)

Surveys = Mapping[str, SideSurvey]


@dataclass(frozen=True)
class Request:
    """A conversion as the command line states it.

    Attributes:
        sources: root of each source side: 'edge' and 'cloud', or ''
        outputs: root of each output side, likewise
        plan: makes the plan once the sources are surveyed
    """

    sources: dict[str, Path]
    outputs: dict[str, Path]
    plan: Callable[[Surveys], Plan]


def merge_sides(
    edge_stages: Sequence[int],
    cloud_stages: Sequence[int],
    middle_stages: Sequence[int],
    sources: dict[str, Path],
    outputs: dict[str, Path],
) -> Request:
    """Stages to chunks of edge rank 0, and to chunks of cloud rank 0 or to cloud ranks 1, 2, ….

    Args:
        edge_stages: ``--merge-stages``
        cloud_stages: ``--merge-cloud-stages``; empty where ``--middle-stages`` is given
        middle_stages: ``--middle-stages``; empty where ``--merge-cloud-stages`` is given
        sources: roots for 'edge' and 'cloud'
        outputs: roots for 'edge' and 'cloud'
    """

    def plan(surveys: Surveys) -> Plan:
        edge, cloud = surveys['edge'], surveys['cloud']
        others, flag = (
            (cloud_stages, '--merge-cloud-stages')
            if cloud_stages
            else (middle_stages, '--middle-stages')
        )
        _require_rising('--merge-stages', edge_stages)
        _require_rising(flag, others)
        for side, stages, name in ((edge, edge_stages, '--merge-stages'), (cloud, others, flag)):
            for stage in stages:
                side.stage(stage, name)
        _require_cover(surveys, {*edge_stages}, {*others}, flag)
        _require_ends(edge_stages, others, flag)
        targets = {stage: ChunkId('edge', 0, i) for i, stage in enumerate(edge_stages)}
        targets |= {
            stage: ChunkId('cloud', 0, i) if cloud_stages else ChunkId('cloud', i + 1, 0)
            for i, stage in enumerate(others)
        }
        home = {stage: surveys[target.side] for stage, target in targets.items()}
        order = sorted(targets)
        chunks = [require_standard(home[stage], [stage], flag)[0] for stage in order]
        cloud_side = (
            OutputSide('cloud', 1, len(cloud_stages))
            if cloud_stages
            else OutputSide('cloud', 1 + len(middle_stages), 1)
        )
        return _checked(
            one_to_one(
                chunks,
                [targets[stage] for stage in order],
                _layers(surveys, chunks),
                [OutputSide('edge', 1, len(edge_stages)), cloud_side],
                [ChunkId('cloud', rank + 1, 1) for rank in range(len(middle_stages))],
            ),
            edge,
        )

    return Request(sources, outputs, plan)


def split_sides(
    edge_rank: int,
    cloud_rank: int,
    cloud_chunks: int,
    middle_ranks: Sequence[int],
    sources: dict[str, Path],
    output: Path,
) -> Request:
    """Chunks 0 and 1 of an edge rank, and chunks or ranks of the cloud between them, to stages.

    Args:
        edge_rank: ``--split-rank``
        cloud_rank: ``--split-cloud-rank``
        cloud_chunks: ``--num-cloud-vpp-chunks``
        middle_ranks: ``--middle-ranks``; where given, the two before are not used
        sources: roots for 'edge' and 'cloud'
        output: root of the output
    """

    def plan(surveys: Surveys) -> Plan:
        edge, cloud = surveys['edge'], surveys['cloud']
        first, last = require_chunks(edge, edge_rank, 2, '--split-rank takes model0 and model1')
        if middle_ranks:
            _require_rising('--middle-ranks', middle_ranks)
            between = require_middle(cloud, middle_ranks, '--middle-ranks')
        else:
            between = require_chunks(
                cloud, cloud_rank, cloud_chunks, '--num-cloud-vpp-chunks', of_merged_stages=True
            )
        taken = {'edge': {edge_rank}, 'cloud': {chunk.rank for chunk in between}}
        _require_all_taken(surveys, taken)
        chunks = [first, *between, last]
        targets = [ChunkId('', stage) for stage in range(len(chunks))]
        side = OutputSide('', len(chunks), None)
        return _checked(one_to_one(chunks, targets, _layers(surveys, chunks), [side]), edge)

    return Request(sources, {'': output}, plan)


def merge_plain(pipeline_size: int, source: Path, output: Path) -> Request:
    """Stages to chunks in Megatron's interleaved order.

    Args:
        pipeline_size: pipeline ranks of the output
        source: root of the source
        output: root of the output
    """

    def plan(surveys: Surveys) -> Plan:
        side = surveys['']
        stages = sorted(side.stages)
        require_contiguous(side.source.directory, stages, side.args())
        if len(stages) % pipeline_size or len(stages) == pipeline_size:
            raise CheckpointError(
                f'--pipeline-size {pipeline_size}: {side.source.directory} has {len(stages)} '
                'stages, expected a multiple with at least two chunks a rank'
            )
        chunks = require_standard(side, stages, '--pipeline-size')
        virtual_size = len(stages) // pipeline_size
        return _checked(
            one_to_one(
                chunks,
                interleaved(pipeline_size, virtual_size),
                _layers(surveys, chunks),
                [OutputSide('', pipeline_size, virtual_size)],
            ),
            side,
        )

    return Request({'': source}, {'': output}, plan)


def split_plain(source: Path, output: Path) -> Request:
    """Chunks in Megatron's interleaved order to stages.

    Args:
        source: root of the source
        output: root of the output
    """

    def plan(surveys: Surveys) -> Plan:
        side = surveys['']
        chunks = every_chunk(side)
        if chunks[0].chunk is None:
            raise CheckpointError(
                f'{side.source.directory}: standard stages with key `model`, expected virtual '
                'chunks model0, model1, …; it is split already'
            )
        targets = [ChunkId('', stage) for stage in range(len(chunks))]
        output_side = OutputSide('', len(chunks), None)
        return _checked(one_to_one(chunks, targets, _layers(surveys, chunks), [output_side]), side)

    return Request({'': source}, {'': output}, plan)


def reshape(
    pipeline_size: int,
    virtual_size: int,
    layers_per_chunk: Sequence[int] | None,
    source: Path,
    output: Path,
) -> Request:
    """Any stages or chunks to any others, layer by layer.

    Args:
        pipeline_size: pipeline ranks of the output
        virtual_size: chunks of each rank; 1 for none
        layers_per_chunk: layers of each new chunk in pipeline order; default: equally many
        source: root of the source
        output: root of the output
    """

    def plan(surveys: Surveys) -> Plan:
        side = surveys['']
        chunks = every_chunk(side)
        layers = _layers(surveys, chunks)
        plan = resplit(chunks, layers, pipeline_size, virtual_size, layers_per_chunk)
        same = [move.target for move in plan.moves] == list(chunks) and plan.layers() == layers
        if same:
            raise CheckpointError(
                f'{side.source.directory}: has this layout already; nothing to convert'
            )
        return _checked(plan, side)

    return Request({'': source}, {'': output}, plan)


def _checked(plan: Plan, side: SideSurvey) -> Plan:
    check_layers(sum(plan.layers()), side.args(), side.source.directory)
    return plan


def _layers(surveys: Surveys, chunks: Sequence[ChunkId]) -> list[int]:
    return [surveys[chunk.side].stages[chunk.rank].layers[chunk.chunk] for chunk in chunks]


def _require_rising(flag: str, numbers: Sequence[int]) -> None:
    for one, two in zip(numbers, numbers[1:], strict=False):
        if one == two:
            raise CheckpointError(f'{flag}: {one} is named twice')
        if one > two:
            raise CheckpointError(f'{flag}: {one} before {two}; name them in pipeline order')


def _require_cover(surveys: Surveys, edge: set[int], others: set[int], flag: str) -> None:
    """Each stage of either source goes to exactly one side, and none is missing in between."""
    if both := sorted(edge & others):
        raise CheckpointError(f'stage {both[0]} is named by --merge-stages and by {flag}')
    found = {stage: side.source.directory for side in surveys.values() for stage in side.stages}
    if left := sorted(found.keys() - edge - others):
        raise CheckpointError(
            f'{found[left[0]]}: stage {left[0]} is named by neither --merge-stages nor {flag}; '
            'name every stage'
        )
    require_contiguous(
        surveys['edge'].source.directory, sorted(edge | others), surveys['edge'].args()
    )


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


def _require_all_taken(surveys: Surveys, taken: dict[str, set[int]]) -> None:
    directories: dict[Path, tuple[set[int], set[int]]] = {}
    for name, side in surveys.items():
        found, used = directories.setdefault(side.source.directory.resolve(), (set(), set()))
        found |= set(side.stages)
        used |= taken[name]
    for directory, (found, used) in directories.items():
        if left := sorted(found - used):
            raise CheckpointError(
                f'{directory}: pipeline rank {left[0]} would be left out (found '
                f'{", ".join(map(str, sorted(found)))}); name every rank'
            )
