"""Which optimizer slot belongs to which parameter: proven by order and shapes, or refused.

Within a group parameters stand in model order, chunk after chunk, so the groups are subsequences
of the model's tensors. All ways to deal the tensors out to the groups are followed at once; exactly
one must remain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import is_buffer, is_extra_state

from ..common.errors import CheckpointError
from .optimizer_state import WAY_OUT, Group, Slot

_MAX_STATES = 4096


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a rank's model.

    Attributes:
        chunk: key of its chunk, such as ``model1``
        name: key in the chunk
        tensor: the value
    """

    chunk: str
    name: str
    tensor: torch.Tensor


def candidates(chunk: str, state: Mapping[str, Any]) -> list[NamedTensor]:
    """Tensors of a chunk that can be parameters, in model order."""
    return [
        NamedTensor(chunk, name, value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and not is_extra_state(name)
        and not is_buffer(name)
    ]


@dataclass(frozen=True)
class _Path:
    """One way to deal out the tensors up to here: a linked list, newest first."""

    previous: '_Path | None'
    group: int  # -1: the tensor is in no group
    unique: bool


def match(
    tensors: Sequence[NamedTensor], groups: Sequence[tuple[Group, Sequence[Slot]]], where: str
) -> list[Slot | None]:
    """The slot of each tensor; None for a tensor that the optimizer doesn't train.

    Args:
        tensors: the rank's tensors in model order, chunk after chunk
        groups: the groups of all its optimizers, with their slots in order

    Raises:
        CheckpointError: no way fits, or several do
    """
    total = sum(len(slots) for _, slots in groups)
    if total > len(tensors):
        raise CheckpointError(
            f'{where}: has state of {total} parameters, but the model has {len(tensors)}; {WAY_OUT}'
        )
    spare = len(tensors) - total
    with_experts = any(group.fields.get('is_expert_parallel') and slots for group, slots in groups)
    states: Mapping[tuple[int, ...], _Path | None] = {(0,) * len(groups): None}
    for index, tensor in enumerate(tensors):
        following: dict[tuple[int, ...], _Path] = {}
        for positions, path in states.items():
            unique = path is None or path.unique
            if index - sum(positions) < spare:
                _follow(following, positions, _Path(path, -1, unique))
            for number, (group, slots) in enumerate(groups):
                if positions[number] < len(slots) and _fits(
                    tensor, group, slots[positions[number]], with_experts
                ):
                    moved = positions[:number] + (positions[number] + 1,) + positions[number + 1 :]
                    _follow(following, moved, _Path(path, number, unique))
        if not following:
            raise _misfit(tensor, groups, states, where)
        if len(following) > _MAX_STATES:
            raise _ambiguous(where)
        states = following
    (positions, last), *rest = states.items()
    if rest or (last is not None and not last.unique):
        raise _ambiguous(where)
    assigned: list[int] = []
    while last is not None:
        assigned.append(last.group)
        last = last.previous
    taken = [iter(slots) for _, slots in groups]
    return [None if number < 0 else next(taken[number]) for number in reversed(assigned)]


def _follow(states: dict[tuple[int, ...], _Path], positions: tuple[int, ...], path: _Path) -> None:
    if positions in states:  # a second way to the same place
        path = _Path(path.previous, path.group, False)
    states[positions] = path


def _fits(tensor: NamedTensor, group: Group, slot: Slot, with_experts: bool) -> bool:
    if with_experts:
        is_expert = '.experts.' in tensor.name
        if is_expert != bool(group.fields.get('is_expert_parallel')):
            return False
    return slot.shape is None or slot.shape == tensor.tensor.shape


def _misfit(
    tensor: NamedTensor,
    groups: Sequence[tuple[Group, Sequence[Slot]]],
    states: Mapping[tuple[int, ...], _Path | None],
    where: str,
) -> CheckpointError:
    positions = next(iter(states))
    expected = [
        str(tuple(slots[at].shape or ()))
        for (_, slots), at in zip(groups, positions, strict=True)
        if at < len(slots)
    ]
    return CheckpointError(
        f"{where}: the shapes don't follow the model: {tensor.chunk} {tensor.name} has shape "
        f'{tuple(tensor.tensor.shape)}, expected {" or ".join(expected) or "no more parameters"}; '
        f'{WAY_OUT}'
    )


def _ambiguous(where: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: which parameter its entries belong to can't be proven by their shapes (frozen "
        f'parameters, or parameter groups with equal shapes); {WAY_OUT}'
    )
