"""The ``args`` of a new file: a copy in which every size that the new layout contradicts is set."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..common.errors import shown
from ..common.numbers import number_in
from .rank_order import global_rank

_REPLICATION = ('context_parallel_size', 'gtp_weight_remat_size')


@dataclass(frozen=True)
class Layout:
    """Sizes of one output, for one of its files.

    Attributes:
        tensor_size: tensor-parallel size of the file's stage
        pipeline_size: pipeline ranks
        virtual_size: chunks of each rank; None without
        model_parallel_ranks: tensor ranks of all stages together
        layers: layers of each chunk of the output in pipeline order
        complete: the output holds the whole model, not one side of it
        resplit: some layers stand in another chunk than before
        ranks_before: tensor ranks of the stages before the file's
        prediction: which of those chunks has multi-token prediction; None for the last
    """

    tensor_size: int
    pipeline_size: int
    virtual_size: int | None
    model_parallel_ranks: int
    layers: Sequence[int]
    complete: bool
    resplit: bool = False
    ranks_before: int = 0
    prediction: int | None = None


def rewrite(args: Any, layout: Layout) -> Any:
    """A copy of ``args`` that agrees with ``layout``.

    Fields that ``args`` doesn't have are not added, but for the three parallel sizes. Where the
    sizes already are those of the layout and each chunk keeps its layers nothing changes, so that
    uneven stages keep their flags.

    Args:
        args: a namespace, or None
    """
    if args is None:
        return None
    new = copy.copy(args)
    sizes = {
        'tensor_model_parallel_size': layout.tensor_size,
        'pipeline_model_parallel_size': layout.pipeline_size,
        'virtual_pipeline_model_parallel_size': layout.virtual_size,
    }
    same_sizes = all(getattr(args, name, None) == size for name, size in sizes.items())
    world_size, rank = _world_size(args, layout), _rank(args, layout)
    for name, size in sizes.items():
        setattr(new, name, size)
    _set(new, 'transformer_pipeline_model_parallel_size', layout.pipeline_size)
    if world_size is not None:
        _set(new, 'world_size', world_size)
        if getattr(args, 'inprocess_active_world_size', None) == getattr(args, 'world_size', None):
            _set(new, 'inprocess_active_world_size', world_size)
    if rank is not None:
        new.rank = rank
    if layout.resplit or not same_sizes:
        _set_stages(new, layout)
    return new


def _world_size(args: Any, layout: Layout) -> int | None:
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
    return copies * layout.model_parallel_ranks


def _size(args: Any, name: str) -> int | None:
    size = number_in(args, name)
    if size is None and getattr(args, name, None) is not None:
        raise ValueError(f'args.{name} is {shown(getattr(args, name))}, expected a number')
    return size


def _rank(args: Any, layout: Layout) -> int | None:
    """The rank that saves such a file in a run of the new layout."""
    old = global_rank(args)
    if old is None or number_in(args, 'tensor_model_parallel_size') != layout.tensor_size:
        return None  # stages have tensor sizes of their own: ranks aren't numbered evenly
    copies = old.stage_size // layout.tensor_size
    before = old.replica * layout.model_parallel_ranks + layout.ranks_before
    return copies * before + old.within


def _set_stages(args: Any, layout: Layout) -> None:
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
    even = len(set(layout.layers)) == 1
    pattern = getattr(args, 'hybrid_layer_pattern', None)
    if pattern:
        if layout.complete:
            args.hybrid_layer_pattern = split_pattern(pattern, layout.layers)
    elif not even and layout.complete:
        mtp = number_in(args, 'mtp_num_layers') or 0
        layers = stage_string(layout.layers, mtp, layout.prediction)
        _set(args, 'pipeline_model_parallel_layout', layers)
    elif even and layout.virtual_size is not None:
        _set(args, 'num_layers_per_virtual_pipeline_stage', layout.layers[0] or None)


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
