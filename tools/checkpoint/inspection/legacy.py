"""Summary of a legacy (``--ckpt-format torch``) checkpoint, from its mapped rank files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import chunk_key
from megatron_overlay.standalone.dist_checkpointing.checkpoint_layout import (
    CheckpointLayout,
    layout_from_keys,
)
from megatron_overlay.standalone.dist_checkpointing.format_names import LEGACY, NO_STATE
from megatron_overlay.standalone.dist_checkpointing.load_plan import LEGACY_REFUSAL

from ..common.directory import FoundCheckpoint
from ..common.errors import CheckpointError
from ..common.numbers import number_in, whole
from ..common.paths import parse_iteration_dirname
from ..pp_vpp.checks import checked_shards
from ..pp_vpp.keys import chunk_numbers, layer_of, renumber
from ..pp_vpp.layout import one_to_one
from ..pp_vpp.rank_file import RankFile, take_apart
from ..pp_vpp.sources import FILE_NAME, Side, look_at, refuse_other_files, shard_paths, shards_of
from ..pp_vpp.torch_file import MappedFile, read, tensors
from . import uses
from .summary import (
    Amount,
    CheckpointSummary,
    ModelSummary,
    OptimizerState,
    Use,
    amounts,
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
    side = look_at('', directory, lambda path: read(path, False))
    files = {path: read(path, False) for path in side.files.values()}
    chunks = [file.state[key] for file in files.values() for key in _chunk_keys(file)]
    iteration = whole(next(iter(files.values())).state.get('iteration'))
    if iteration is None:
        iteration = parse_iteration_dirname(directory.name)
    optimizer = _optimizer(files)
    rest = [
        {k: v for k, v in file.state.items() if k != 'optimizer' and k not in _chunk_keys(file)}
        for file in files.values()
    ]
    number_of_files, file_bytes = count_files(directory)
    return CheckpointSummary(
        directory=directory,
        load=found.load,
        format=LEGACY,
        iteration=iteration,
        model=ModelSummary.of(_layout(side)),
        parallel=_parallel(side),
        parallel_from='the rank files',
        weights=_amounts(chunks),
        optimizer=optimizer,
        other_bytes=sum(amount.bytes for amount in _amounts(rest).values()),
        common_state='in each rank file',
        manifest_files=None,
        files=number_of_files,
        file_bytes=file_bytes,
        uses=[
            uses.weighted_merge(directory),
            _converter(side, files),
            Use(uses.INTEROP, False, LEGACY_REFUSAL),
            _resume(optimizer, side, files),
        ],
    )


def _chunk_keys(file: MappedFile) -> list[str]:
    return [chunk_key(number) for number in chunk_numbers(file.state, file.path)]


def _layout(side: Side) -> CheckpointLayout:
    """Layout of the whole model: chunks follow one another in pipeline order."""
    order = sorted(
        (number or 0, rank, number)
        for rank, stage in side.stages.items()
        for number in stage.layers
    )
    sizes: dict[str, tuple[int, ...]] = {}
    first_layer = 0
    for _, rank, number in order:
        for key, value in side.stages[rank].chunks[number].items():
            layer = layer_of(key)
            if layer is not None:
                key = renumber(key, first_layer + layer)
            sizes[key] = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        first_layer += side.stages[rank].layers[number]
    return layout_from_keys(sizes)


def _parallel(side: Side) -> dict[str, int]:
    shards = [shard for rank in side.stages for shard in shards_of(side.files, rank)]
    chunks = max(len(stage.layers) for stage in side.stages.values())
    found = {'TP': len({tp for tp, _ in shards}), 'PP': len(side.stages)}
    if chunks > 1:
        found['VPP'] = chunks
    experts = {ep for _, ep in shards if ep is not None}
    if experts:
        found['EP'] = len(experts)
    sizes = parallel_sizes(side.args)
    return found | {name: sizes[name] for name in ('CP', 'DP', 'ranks') if name in sizes}


def _optimizer(files: Mapping[Path, MappedFile]) -> OptimizerState:
    states = [file.state['optimizer'] for file in files.values() if file.state.get('optimizer')]
    beside = {other.name for path in files for other in path.parent.iterdir()} - {FILE_NAME}
    separate = sorted(name for name in beside if 'optim' in name)
    format_ = IN_RANK_FILES if states else NO_STATE
    return OptimizerState(separate[0] if separate else format_, None, _amounts(states))


def _amounts(states: Iterable[Any]) -> dict[str, Amount]:
    return amounts((t.dtype, t.numel() * t.element_size()) for t in tensors(list(states)))


def _converter(side: Side, files: Mapping[Path, MappedFile]) -> Use:
    """Whether the converter takes the checkpoint, by the checks it makes itself."""
    try:
        _check(side, files, drop_optimizer=False)
    except CheckpointError as with_optimizer:
        try:
            _check(side, files, drop_optimizer=True)
        except CheckpointError as error:
            total = sum(sum(stage.layers.values()) for stage in side.stages.values())
            expected = number_in(side.args, 'num_layers')
            hint = ''
            if expected is not None and total < expected:
                hint = '; if it is one side of an edge/cloud pair, `split` takes both'
            return Use(uses.CONVERTER, False, f'{error}{hint}')
        return Use(uses.CONVERTER, True, f'with --drop-optimizer: {with_optimizer}')
    chunked = any(None not in stage.layers for stage in side.stages.values())
    return Use(uses.CONVERTER, True, 'split, reshape' if chunked else 'merge, reshape')


def _check(side: Side, files: Mapping[Path, MappedFile], *, drop_optimizer: bool) -> None:
    """The converter's checks, but for those that compare values of tensors."""
    chunks = side.every_chunk()
    layers = [side.layers(chunk) for chunk in chunks]
    side.require_layers(sum(layers))
    as_it_is = one_to_one(chunks, chunks, layers, [])
    shards = shard_paths({'': side}, as_it_is)
    refuse_other_files(files, drop_optimizer)

    def taken_apart(path: Path) -> RankFile:
        return take_apart(files[path], with_optimizer=not drop_optimizer)

    for _ in checked_shards(shards, as_it_is, taken_apart):
        pass


def _resume(optimizer: OptimizerState, side: Side, files: Mapping[Path, MappedFile]) -> Use:
    """Whether a run goes on from it: as the converter sees which ranks are missing."""
    try:
        side.require_contiguous(side.stages)
        side.shards(side.stages, side.tensor_size)
    except CheckpointError as error:
        return Use(uses.RESUME, False, str(error))
    if optimizer.format == NO_STATE:
        return Use(uses.RESUME, False, 'no optimizer state; load with --no-load-optim')
    without = [path for path, file in files.items() if file.state.get('optimizer') is None]
    if optimizer.format == IN_RANK_FILES and without:
        reason = f'no optimizer state in {without[0]}, but in others; load with --no-load-optim'
        return Use(uses.RESUME, False, reason)
    sizes = 'TP, PP, VPP and EP' + ('' if optimizer.format == IN_RANK_FILES else ', and DP')
    return Use(uses.RESUME, True, f'with the same {sizes}')
