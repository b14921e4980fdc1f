"""``fully_sharded_model_space``, megatron-core's default up to 0.14: state by parameter, flattened.

Core cuts a weight into a regular grid of shards, one for each layer, expert and tensor-parallel
rank (two of each rank, for gate and up of a gated MLP), flattens each, and cuts that where a
data-parallel rank's part ends. Stored is a tensor of the grid's shape with one more axis: of a
weight of [2, 128, 32] in a grid of [2, 4, 1] it is [2, 4, 1, 1024], and its chunk at [0, 3, 0, 384]
begins with element 384 of the shard [0:1, 96:128, 0:32]. Seen on files of megatron-core 0.12, 0.13
and 0.14. Up to 0.10 state of a one-dimensional weight has the weight's shape, cut likewise.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import (
    FP32_PARAM,
    PARAM,
    parse_key,
    state_key,
)

from ..common.errors import CheckpointError, shown
from ..merge.geometry import Box
from ..merge.plan import OutputTensor
from .checkpoint import Checkpoint
from .plan import OptimizerPlan, Piece, Position, output_chunks, stored_chunk

# `fully_reshardable` has `param`: without content metadata it passes for its forerunner.
_STATES = {FP32_PARAM: PARAM, PARAM: PARAM, 'exp_avg': 'exp_avg', 'exp_avg_sq': 'exp_avg_sq'}
_STEP = 'step'


def plan_optimizer(checkpoint: Checkpoint) -> OptimizerPlan:
    """The plan, derived from the metadata.

    Raises:
        CheckpointError: the place of a parameter can't be derived, or a state of it is missing
    """
    plan = OptimizerPlan({}, [], _settings(checkpoint))
    weights_of: dict[str, list[str]] = defaultdict(list)
    for weight, (optimizer, keys) in _stored_states(checkpoint).items():
        entry = checkpoint.weights[weight]
        pieces = {state: _pieces(checkpoint, key, weight) for state, key in keys.items()}
        for box in entry.chunks:
            of_box = {state: shards[box] for state, shards in pieces.items()}
            plan.chunks += output_chunks(checkpoint, weight, box, of_box, {})
        output = OutputTensor(entry.shape, torch.float32, tuple(entry.chunks))
        plan.tensors |= {state_key(state, weight): output for state in keys}
        weights_of[optimizer].append(weight)
    for optimizer, weights in sorted(weights_of.items()):
        elements = sum(math.prod(checkpoint.weights[weight].shape) for weight in weights)
        plan.positions.append(Position(optimizer, len(weights), elements, 0))
    with_state = {weight for weights in weights_of.values() for weight in weights}
    plan.without_state = sorted(checkpoint.weights.keys() - with_state)
    return plan


def _stored_states(checkpoint: Checkpoint) -> dict[str, tuple[str, dict[str, str]]]:
    """By weight: the optimizer that has it, and the keys of its three states."""
    directory = checkpoint.directory
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for key in [*checkpoint.optimizer, *checkpoint.optimizer_objects]:
        own = parse_key(key)
        if own.optimizer is None or own.state not in _STATES or key in checkpoint.optimizer_objects:
            raise CheckpointError(
                f'{directory}: {key}: expected tensors optimizer.state.<state>.<weight> with '
                f'{", ".join(_STATES)} only; the state of another optimizer than Adam has no place '
                'in fully_reshardable'
            )
        optimizer, state, weight = own.optimizer, own.state, own.weight
        if weight not in checkpoint.weights:
            raise CheckpointError(
                f'{directory}: {key}: there is no weight {weight}; the checkpoint is damaged, take '
                'another'
            )
        owner, keys = found.setdefault(weight, (optimizer, {}))
        if owner != optimizer:
            raise CheckpointError(f'{directory}: {key}: {owner} has state of {weight}, too')
        keys[_STATES[state]] = key
    for weight, (optimizer, keys) in found.items():
        for name, state in _STATES.items():
            if state not in keys and name != PARAM:
                raise CheckpointError(
                    f'{directory}: no {optimizer}.state.{name}.{weight}, but '
                    f'{next(iter(keys.values()))}; the checkpoint is damaged, take another'
                )
    return found


def _pieces(checkpoint: Checkpoint, key: str, weight: str) -> dict[Box, list[Piece]]:
    """What fills each shard of a weight, in the weight's own chunks."""
    entry, stored = checkpoint.weights[weight], checkpoint.optimizer[key]
    where = f'{checkpoint.directory}: {key}'
    if stored.dtype != torch.float32:
        raise CheckpointError(f'{where}: {stored.dtype}, expected torch.float32')
    if stored.shape == entry.shape and stored.chunks.keys() == entry.chunks.keys():
        return {
            box: [Piece(stored_chunk(checkpoint, stored, box), key, 0, box.numel, 0)]
            for box in stored.chunks
        }
    if len(stored.shape) == 1 and stored.shape == entry.shape:
        return _unflattened(checkpoint, key, weight)
    grid, numel = stored.shape[:-1], stored.shape[-1] if stored.shape else 0
    sizes = _shard_sizes(entry.shape, grid)
    if sizes is None or math.prod(sizes) != numel:
        raise CheckpointError(
            f'{where}: shape {list(stored.shape)} is no grid of flattened shards of {weight}, '
            f'which is {list(entry.shape)}; the checkpoint is damaged, or of another model'
        )
    recorded = checkpoint.flattened_from(key)
    if recorded not in (None, entry.shape):
        raise CheckpointError(
            f'{where}: core recorded the shape {shown(recorded)}, {weight} is {list(entry.shape)}; '
            'the checkpoint is damaged, or of another model'
        )
    shards: dict[Box, list[Piece]] = defaultdict(list)
    for chunk in sorted(stored.chunks):
        if math.prod(chunk.sizes[:-1]) != 1:
            raise CheckpointError(
                f'{where} at {list(chunk.offsets)}: a chunk of {list(chunk.sizes)}, expected '
                'elements of one shard'
            )
        offsets = tuple(n * size for n, size in zip(chunk.offsets[:-1], sizes, strict=True))
        shards[Box(offsets, sizes)].append(
            Piece(
                stored_chunk(checkpoint, stored, chunk), key, 0, chunk.sizes[-1], chunk.offsets[-1]
            )
        )
    if shards.keys() != entry.chunks.keys():
        other = min(shards.keys() ^ entry.chunks.keys())
        raise CheckpointError(
            f'{where}: in shards of {list(sizes)}, {weight} is stored in other chunks (such as '
            f'{list(other.sizes)} at {list(other.offsets)}); they belong to different layouts'
        )
    return shards


def _unflattened(checkpoint: Checkpoint, key: str, weight: str) -> dict[Box, list[Piece]]:
    """The same where the chunks are those of a one-dimensional weight, cut further."""
    stored = checkpoint.optimizer[key]
    shards: dict[Box, list[Piece]] = defaultdict(list)
    whole = sorted(checkpoint.weights[weight].chunks)
    for chunk in sorted(stored.chunks):
        box = whole[bisect_right(whole, chunk.offsets, key=lambda box: box.offsets) - 1]
        if chunk.ends > box.ends:
            raise CheckpointError(
                f'{checkpoint.directory}: {key} at {list(chunk.offsets)}: ends in another chunk of '
                f'{weight} than it begins in; they belong to different layouts'
            )
        at = chunk.offsets[0] - box.offsets[0]
        piece = stored_chunk(checkpoint, stored, chunk)
        shards[box].append(Piece(piece, key, 0, chunk.sizes[0], at))
    return shards


def _shard_sizes(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, ...] | None:
    """Size of every shard; None where the grid isn't one of the shape."""
    if len(shape) != len(grid) or 0 in grid:
        return None
    if any(size % n for size, n in zip(shape, grid, strict=True)):
        return None
    return tuple(size // n for size, n in zip(shape, grid, strict=True))


def _settings(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """What the common state keeps of each optimizer, without numbers that the groups have, too."""
    state = checkpoint.common.state.get('optimizer')
    optimizers = [state]
    if isinstance(state, Mapping) and state and all(isinstance(key, int) for key in state):
        optimizers = [state[key] for key in sorted(state)]
    return [_settings_of_one(checkpoint, optimizer) for optimizer in optimizers]


def _settings_of_one(checkpoint: Checkpoint, state: Any) -> dict[str, Any]:
    where = f'{checkpoint.directory}: common state'
    try:
        groups = state['optimizer']['param_groups']
        group_steps = {float(group[_STEP]) for group in groups if _STEP in group}
        steps = {
            float(value)
            for entry in state.get('param_state', {}).values()
            for value in _steps(entry)
        }
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f'{where}: optimizer: {shown(state)}, expected its parameter groups and the steps of '
            'its parameters; the checkpoint is damaged, take another'
        ) from error
    if steps - group_steps:
        raise CheckpointError(
            f'{where}: optimizer: steps {sorted(steps)} of parameters, {sorted(group_steps)} of '
            'parameter groups, expected the same; fully_reshardable keeps those of groups only'
        )
    return {key: value for key, value in state.items() if key != 'param_state'}


def _steps(entry: Mapping[str, Any]) -> list[Any]:
    if entry.keys() - {_STEP}:
        raise ValueError
    return list(entry.values())
