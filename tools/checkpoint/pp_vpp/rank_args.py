"""The ``args`` of a new file: a copy in which every size that the new layout contradicts is set."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..common.errors import shown
from ..common.numbers import number_in
from .rank_order import global_rank

_REPLICATION = ('context_parallel_size', 'gtp_weight_remat_size')


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Sizes of an output, for one of its rank files.

    Attributes:
        tensor: tensor-parallel size of the file's stage
        pipeline: pipeline ranks
        virtual: chunks of each rank; None without
        tensor_ranks: tensor ranks of all stages together
        tensor_ranks_before: those of the stages before the file's
        layers: layers of each chunk of the output in pipeline order
        complete: the output holds the whole model, not one side of it
        resplit: some layers stand in another chunk than before
        prediction: which of those chunks has multi-token prediction; None for the last
    """

    tensor: int
    pipeline: int
    virtual: int | None
    tensor_ranks: int
    tensor_ranks_before: int = 0
    layers: Sequence[int]
    complete: bool
    resplit: bool = False
    prediction: int | None = None


def rewrite(args: Any, sizes: ParallelSizes) -> Any:
    """A copy of ``args`` that agrees with ``sizes``.

    Fields that ``args`` doesn't have are not added, but for the three parallel sizes. Where the
    sizes already are those of the layout and each chunk keeps its layers nothing changes, so that
    uneven stages keep their flags.

    Args:
        args: a namespace, or None
    """
    if args is None:
        return None
    new = copy.copy(args)
    fields = {
        'tensor_model_parallel_size': sizes.tensor,
        'pipeline_model_parallel_size': sizes.pipeline,
        'virtual_pipeline_model_parallel_size': sizes.virtual,
    }
    same_sizes = all(getattr(args, name, None) == size for name, size in fields.items())
    world_size, rank = _world_size(args, sizes), _rank(args, sizes)
    for name, size in fields.items():
        setattr(new, name, size)
    _set(new, 'transformer_pipeline_model_parallel_size', sizes.pipeline)
    if world_size is not None:
        _set(new, 'world_size', world_size)
        if getattr(args, 'inprocess_active_world_size', None) == getattr(args, 'world_size', None):
            _set(new, 'inprocess_active_world_size', world_size)
    if rank is not None:
        new.rank = rank
    if sizes.resplit or not same_sizes:
        _set_stages(new, sizes)
    return new


def _world_size(args: Any, sizes: ParallelSizes) -> int | None:
    """Ranks of the new layout, with as much data and context parallelism as before."""
    old = _size(args, 'world_size')
    if not old:
        return None
    copies = _size(args, 'data_parallel_size')
    if copies:
        for name in _REPLICATION:
            copies *= _size(args, name) or 1
    else:
        before = (number_in(args, 'tensor_model_parallel_size') or 1) * (
            number_in(args, 'pipeline_model_parallel_size') or 1
        )
        copies = max(1, old // before)
    return copies * sizes.tensor_ranks


def _size(args: Any, name: str) -> int | None:
    size = number_in(args, name)
    if size is None and getattr(args, name, None) is not None:
        raise ValueError(f'args.{name} is {shown(getattr(args, name))}, expected a number')
    return size


def _rank(args: Any, sizes: ParallelSizes) -> int | None:
    """The rank that saves such a file in a run of the new layout."""
    old = global_rank(args)
    if old is None or number_in(args, 'tensor_model_parallel_size') != sizes.tensor:
        return None  # stages have tensor sizes of their own: ranks aren't numbered evenly
    copies = old.stage_size // sizes.tensor
    before = old.replica * sizes.tensor_ranks + sizes.tensor_ranks_before
    return copies * before + old.within


def _set_stages(args: Any, sizes: ParallelSizes) -> None:
    """How layers are dealt out: evenly by the sizes alone, or by an explicit stage layout."""
    for name in (
        'num_layers_per_virtual_pipeline_stage',
        'num_virtual_stages_per_pipeline_rank',
        'pipeline_model_parallel_layout',
        'decoder_first_pipeline_num_layers',
        'decoder_last_pipeline_num_layers',
    ):
        _set(args, name, None)
    for name in ('account_for_embedding_in_pipeline_split', 'account_for_loss_in_pipeline_split'):
        _set(args, name, False)
    even = len(set(sizes.layers)) == 1
    pattern = getattr(args, 'hybrid_layer_pattern', None)
    if pattern:
        if sizes.complete:
            args.hybrid_layer_pattern = split_pattern(pattern, sizes.layers)
    elif not even and sizes.complete:
        mtp = number_in(args, 'mtp_num_layers') or 0
        layers = stage_string(sizes.layers, mtp, sizes.prediction)
        _set(args, 'pipeline_model_parallel_layout', layers)
    elif even and sizes.virtual is not None:
        _set(args, 'num_layers_per_virtual_pipeline_stage', sizes.layers[0] or None)


def stage_string(layers: Sequence[int], mtp_layers: int = 0, prediction: int | None = None) -> str:
    """``--pipeline-model-parallel-layout`` of chunks in pipeline order, such as ``Et|tt|tL``.

    Args:
        layers: decoder layers of each chunk
        mtp_layers: layers of multi-token prediction
        prediction: the chunk that has them; the last where None
    """
    stages = ['t' * count for count in layers]
    stages[0] = 'E' + stages[0]
    stages[-1 if prediction is None else prediction] += 'm' * mtp_layers
    stages[-1] += 'L'
    return '|'.join(stages)


def split_pattern(pattern: str, layers: Sequence[int]) -> str:
    """``--hybrid-layer-pattern`` with a ``|`` where a new chunk begins.

    Patterns that don't spell out one character a layer are returned as they are.
    """
    main, *mtp = pattern.split('/')
    symbols = main.replace('|', '')
    if len(symbols) != sum(layers):
        return pattern
    parts, at = [], 0
    for count in layers:
        parts.append(symbols[at : at + count])
        at += count
    return '/'.join(['|'.join(parts), *mtp])


def _set(args: Any, name: str, value: Any) -> None:
    if hasattr(args, name):
        setattr(args, name, value)
