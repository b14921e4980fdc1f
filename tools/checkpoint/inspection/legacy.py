"""Summary of a legacy (``--ckpt-format torch``) checkpoint, from its mapped rank files."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_layout import (
    CheckpointLayout,
    layout_from_keys,
)
from megatron_overlay.standalone.dist_checkpointing.load_plan import LEGACY_REFUSAL

from ..common.directory import LEGACY, FoundCheckpoint
from ..common.errors import CheckpointError
from ..common.numbers import number_in, whole
from ..common.paths import parse_iteration_dirname
from ..pp_vpp import model_state
from ..pp_vpp.convert import Ranks, check_chunks
from ..pp_vpp.discover import FILE_NAME, rank_files, refuse_other_files
from ..pp_vpp.layout import one_to_one
from ..pp_vpp.rank_file import chunk_numbers, take_apart
from ..pp_vpp.same_model import SameModel
from ..pp_vpp.survey import (
    SideSurvey,
    check_iteration,
    check_layers,
    every_chunk,
    require_contiguous,
    require_shards,
    survey_source,
)
from ..pp_vpp.torch_file import MappedFile, read, tensors
from . import uses
from .model import describe_model
from .summary import (
    Amount,
    CheckpointSummary,
    OptimizerState,
    Use,
    count_files,
    parallel_sizes,
)

IN_RANK_FILES = 'in rank files'


def summarise_legacy(found: FoundCheckpoint) -> CheckpointSummary:
    """Look at a checkpoint; its rank files are mapped, no tensor is read.

    Raises:
        CheckpointError: a file is missing, cut short, damaged, or would have to be run
    """
    directory = found.directory
    source = rank_files(directory, lambda path: read(path, False).state)
    side = survey_source('', source, False)
    ranks = {home: read(path, False) for home, path in source.files.items()}
    chunks = [rank.state[key] for rank in ranks.values() for key in _keys(rank)]
    first = next(iter(ranks.values())).state
    iteration = whole(first.get('iteration'))
    if iteration is None:
        iteration = parse_iteration_dirname(directory.name)
    beside = sorted({p.name for r in ranks.values() for p in r.path.parent.iterdir()} - {FILE_NAME})
    optimizer = _optimizer(ranks.values(), beside)
    rest = [
        {k: v for k, v in rank.state.items() if k != 'optimizer' and k not in _keys(rank)}
        for rank in ranks.values()
    ]
    files, file_bytes = count_files(directory)
    return CheckpointSummary(
        directory=directory,
        load=found.load,
        format=LEGACY,
        iteration=iteration,
        model=describe_model(_layout(side, ranks)),
        parallel=_parallel(side),
        parallel_from='the rank files',
        weights=_amounts(chunks),
        optimizer=optimizer,
        other_bytes=sum(amount.bytes for amount in _amounts(rest).values()),
        common_state='in each rank file',
        manifest_files=None,
        files=files,
        file_bytes=file_bytes,
        uses=[
            uses.weighted_merge(directory),
            _converter(side, ranks),
            Use(uses.INTEROP, False, LEGACY_REFUSAL),
            _resume(optimizer, side),
        ],
    )


def _keys(rank: MappedFile) -> list[str]:
    numbers = chunk_numbers(rank.path, rank.state)
    return ['model' if number is None else f'model{number}' for number in numbers]


def _layout(side: SideSurvey, ranks: Mapping[Any, MappedFile]) -> CheckpointLayout:
    """Layout of the whole model: chunks follow one another in pipeline order."""
    order = sorted(
        (number or 0, rank, number)
        for rank, stage in side.stages.items()
        for number in stage.layers
    )
    sizes: dict[str, tuple[int, ...]] = {}
    first_layer = 0
    for _, rank, number in order:
        home = (rank, *side.source.shards(rank)[0])
        state = ranks[home].state['model' if number is None else f'model{number}']
        for key, value in state.items():
            layer = model_state.layer_of(key)
            if layer is not None:
                key = model_state.renumber(key, first_layer + layer)
            sizes[key] = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        first_layer += side.stages[rank].layers[number]
    return layout_from_keys(sizes)


def _parallel(side: SideSurvey) -> dict[str, int]:
    shards = [shard for rank in side.stages for shard in side.source.shards(rank)]
    chunks = max(len(stage.layers) for stage in side.stages.values())
    found = {'TP': len({tp for tp, _ in shards}), 'PP': len(side.stages)}
    if chunks > 1:
        found['VPP'] = chunks
    experts = {ep for _, ep in shards if ep is not None}
    return found | ({'EP': len(experts)} if experts else {}) | _only_in_args(side)


def _only_in_args(side: SideSurvey) -> dict[str, int]:
    sizes = parallel_sizes(side.args())
    return {name: sizes[name] for name in ('CP', 'DP', 'ranks') if name in sizes}


def _optimizer(ranks: Iterable[MappedFile], beside: list[str]) -> OptimizerState:
    states = [rank.state['optimizer'] for rank in ranks if rank.state.get('optimizer')]
    separate = [name for name in beside if 'optim' in name]
    format_ = IN_RANK_FILES if states else 'none'
    return OptimizerState(separate[0] if separate else format_, None, _amounts(states))


def _amounts(states: Iterable[Any]) -> dict[str, Amount]:
    found: dict[str, Amount] = {}
    for tensor in tensors(list(states)):
        name = str(tensor.dtype).removeprefix('torch.')
        before = found.get(name, Amount(0, 0))
        size = before.bytes + tensor.numel() * tensor.element_size()
        found[name] = Amount(before.tensors + 1, size)
    return found


def _converter(side: SideSurvey, ranks: Mapping[tuple[int, int, int | None], MappedFile]) -> Use:
    """Whether the converter takes the checkpoint, by the checks it makes itself."""
    try:
        _check(side, ranks, drop_optimizer=False)
    except CheckpointError as with_optimizer:
        try:
            _check(side, ranks, drop_optimizer=True)
        except CheckpointError as error:
            total = sum(sum(stage.layers.values()) for stage in side.stages.values())
            expected = number_in(side.args(), 'num_layers')
            hint = ''
            if expected is not None and total < expected:
                hint = '; if it is one side of an edge/cloud pair, `split` takes both'
            return Use(uses.CONVERTER, False, f'{error}{hint}')
        return Use(uses.CONVERTER, True, f'with --drop-optimizer: {with_optimizer}')
    chunked = any(None not in stage.layers for stage in side.stages.values())
    return Use(uses.CONVERTER, True, 'split, reshape' if chunked else 'merge, reshape')


def _check(
    side: SideSurvey,
    ranks: Mapping[tuple[int, int, int | None], MappedFile],
    *,
    drop_optimizer: bool,
) -> None:
    """The converter's checks, but for those that compare values of tensors."""
    chunks = every_chunk(side)
    layers = [side.stages[chunk.rank].layers[chunk.chunk] for chunk in chunks]
    check_layers(sum(layers), side.args(), side.source.directory)
    shards = require_shards(side, side.stages, side.tensor_size)
    refuse_other_files([rank.path for rank in ranks.values()], drop_optimizer)
    as_it_is = one_to_one(chunks, chunks, layers, [])
    tensor_size = len({tp for tp, _ in shards})
    same_model = SameModel()
    for tp, ep in shards:
        shard: Ranks = {}
        for stage in side.stages:
            mapped = ranks[stage, tp, ep]
            check_iteration(mapped.path, mapped.state, mapped.path.parent.parent)
            shard['', stage] = take_apart(mapped.path, mapped.state, not drop_optimizer)
            same_model.check(shard['', stage], (stage, tp, ep or 0), '', tensor_size)
        check_chunks(as_it_is, shard)
    same_model.finish()


def _resume(optimizer: OptimizerState, side: SideSurvey) -> Use:
    """Whether a run goes on from it: as the converter sees which ranks are missing."""
    try:
        require_contiguous(side.source.directory, sorted(side.stages), side.args())
        require_shards(side, side.stages, side.tensor_size)
    except CheckpointError as error:
        return Use(uses.RESUME, False, str(error))
    if optimizer.format == 'none':
        return Use(uses.RESUME, False, 'no optimizer state; load with --no-load-optim')
    sizes = 'TP, PP, VPP and EP' + ('' if optimizer.format == IN_RANK_FILES else ', and DP')
    return Use(uses.RESUME, True, f'with the same {sizes}')
