"""Settings of the optimizers, which the older formats store for each model-parallel position."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import parse_position

from ..common.errors import CheckpointError, shown
from ..common.stored import read_object
from ..merge.common_state import without_optimizer_classes
from .checkpoint import Checkpoint

# Marks a group of parameters: of experts on ranks of their own.
OF_EXPERTS = 'is_expert_parallel'
_OF_BUCKETS = ('per_bucket_numel', 'per_bucket_numel_unpadded', 'param_state')


def read_settings(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """For each optimizer of the chain what is stored of it besides tensors, of its first position.

    The positions' steps agree; megatron-core itself keeps the first one's when it saves
    ``fully_reshardable``.

    Raises:
        CheckpointError: an object is missing or damaged, or positions disagree on a step
    """
    found: dict[int, dict[int, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for key, piece in checkpoint.optimizer_objects.items():
        own = parse_position(key)
        if own is None or own.entry in _OF_BUCKETS:
            continue
        value = read_object(checkpoint.directory, piece, key)
        found[own.chain][own.group][own.entry] = without_optimizer_classes(value)
    if sorted(found) != list(range(len(found))) or not found:
        raise CheckpointError(
            f'{checkpoint.directory}: settings of the optimizers {sorted(found)} are stored, '
            'expected those of all, counted from 0'
        )
    return [_of_chain(checkpoint, index, found[index]) for index in sorted(found)]


def _of_chain(
    checkpoint: Checkpoint, index: int, positions: Mapping[int, dict[str, Any]]
) -> dict[str, Any]:
    first = positions[min(positions)]
    groups = _groups(checkpoint, first)
    for position, settings in positions.items():
        steps = {_number(group.get('step')) for group in _groups(checkpoint, settings)}
        if len(steps | {_number(group.get('step')) for group in groups} - {None}) > 1:
            raise CheckpointError(
                f'{checkpoint.directory}: optimizer {index}: the step is {sorted(map(str, steps))} '
                f'in dp_group_idx_{position}, and another in dp_group_idx_{min(positions)}; the '
                'parts are of different saves'
            )
    return first


def _groups(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    optimizer = settings.get('optimizer')
    groups = optimizer.get('param_groups') if isinstance(optimizer, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(
            f'{checkpoint.directory}: settings of an optimizer hold {shown(optimizer)}, expected '
            'param_groups'
        )
    return groups


def is_of_experts(settings: Mapping[str, Any]) -> bool:
    """Whether an optimizer of the chain has the expert-parallel parameters."""
    groups = settings['optimizer']['param_groups']
    return bool(groups) and all(group.get(OF_EXPERTS) is True for group in groups)


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None
