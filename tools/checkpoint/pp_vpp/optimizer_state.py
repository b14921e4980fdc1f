"""Optimizer state of one rank: taken apart into parameters, and put together for new chunks.

A legacy file numbers optimizer state by integers and names nothing. Two layouts are known:
``FP32Optimizer`` (torch's own ``state`` and ``param_groups``) and
``Float16OptimizerWithFloat16Params`` (the same under ``optimizer``, with the fp32 masters of the
half-precision parameters); each alone or in the list that ``ChainedOptimizer`` makes of several.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from ..common.errors import CheckpointError
from ..common.tensors import same_bits

_INNER = ('optimizer', 'optimizer_state_dict')
_MASTERS = ('fp32_from_fp16_params', 'fp32_from_fp16')
_HALF = (torch.float16, torch.bfloat16)
WAY_OUT = 'convert with --drop-optimizer to leave the optimizer behind'


@dataclass(frozen=True)
class Group:
    """Header of one parameter group, equal on all ranks.

    Attributes:
        optimizer: number of the optimizer in the chain
        number: number of the group in that optimizer
        fields: everything but ``params``
        empty: whether the group has no parameters here
    """

    optimizer: int
    number: int
    fields: Mapping[str, Any]
    empty: bool


@dataclass(frozen=True)
class Slot:
    """Optimizer state of one parameter.

    Attributes:
        optimizer: number of the optimizer in the chain
        group: number of the group
        number: the parameter's number in the file
        shape: the parameter's shape; None where no tensor tells
        state: moments and step by name; None where there is none yet
        master: fp32 copy of a half-precision parameter
    """

    optimizer: int
    group: int
    number: int
    shape: torch.Size | None
    state: Mapping[str, Any] | None
    master: torch.Tensor | None = None


@dataclass(frozen=True)
class Part:
    """One optimizer of a rank.

    Attributes:
        inner: key of what surrounds ``state`` and ``param_groups``; None where nothing does
        masters_key: key of the fp32 masters; None without
        others: what stands beside both (the gradient scaler)
        groups: the headers
        slots: per group, the parameters in order
        masters: per group, the masters in order; None without
    """

    inner: str | None
    masters_key: str | None
    others: Mapping[str, Any]
    groups: Sequence[Group]
    slots: Sequence[Sequence[Slot]] = ()
    masters: Sequence[Sequence[torch.Tensor]] | None = None


@dataclass(frozen=True)
class RankOptimizer:
    """Optimizer state of one rank file, before its parameters have names.

    Attributes:
        chained: whether the file holds a list (or dict) of optimizers
        parts: the optimizers
    """

    chained: bool
    parts: Sequence[Part]

    def members(self) -> list[tuple[Group, Sequence[Slot]]]:
        """Every group with its parameters in order."""
        return [
            member for part in self.parts for member in zip(part.groups, part.slots, strict=True)
        ]


def parse(state: Any, where: str) -> RankOptimizer:
    """Take a rank's ``optimizer`` entry apart.

    Raises:
        CheckpointError: the layout isn't one of those known
    """
    if isinstance(state, Mapping) and state and all(isinstance(key, int) for key in state):
        state = [state[key] for key in sorted(state)]
    if not isinstance(state, list):
        return RankOptimizer(False, [_parse_one(0, state, where)])
    return RankOptimizer(True, [_parse_one(i, s, f'{where}[{i}]') for i, s in enumerate(state)])


def _parse_one(index: int, part: Any, where: str) -> Part:
    if not isinstance(part, Mapping):
        raise _unknown(where, type(part).__name__)
    if 'param_state' in part or 'param_state_sharding_type' in part:
        raise CheckpointError(
            f'{where}: written by the distributed optimizer, whose state is laid out by rank and '
            f"can't be carried; {WAY_OUT}"
        )
    inner_key = next((key for key in _INNER if key in part), None)
    masters_key = next((key for key in _MASTERS if key in part), None)
    if inner_key is None:
        groups, slots = _parse_groups(index, part, where)
        return Part(None, None, {}, groups, slots)
    if masters_key is None:
        raise CheckpointError(
            f'{where}: has `{inner_key}` but no {_MASTERS[0]}, as the distributed optimizer '
            f"writes it; its state is laid out by rank and can't be carried; {WAY_OUT}"
        )
    others = {key: part[key] for key in part if key not in (inner_key, masters_key)}
    if unknown := [key for key in others if key != 'grad_scaler']:
        raise _unknown(where, f'key {unknown[0]}')
    groups, slots = _parse_groups(index, part[inner_key], where)
    masters = part[masters_key]
    if not isinstance(masters, list) or len(masters) != len(groups):
        raise _unknown(where, f'{masters_key} without one list for each of {len(groups)} groups')
    slots = [
        # shapes that the state doesn't tell, where every parameter has a master
        [replace(s, shape=s.shape or m.shape) for s, m in zip(group, copies, strict=True)]
        if len(group) == len(copies)
        else group
        for group, copies in zip(slots, masters, strict=True)
    ]
    return Part(inner_key, masters_key, others, groups, slots, masters)


def _parse_groups(index: int, inner: Any, where: str) -> tuple[list[Group], list[list[Slot]]]:
    if not isinstance(inner, Mapping) or set(inner) != {'state', 'param_groups'}:
        found = ', '.join(map(str, inner)) if isinstance(inner, Mapping) else type(inner).__name__
        raise _unknown(where, f'keys {found}')
    state = inner['state']
    groups: list[Group] = []
    slots: list[list[Slot]] = []
    seen: set[int] = set()
    for number, header in enumerate(inner['param_groups']):
        params = header.get('params') if isinstance(header, Mapping) else None
        if not isinstance(params, list):
            raise _unknown(where, f'param_groups[{number}] without `params`')
        fields = {key: value for key, value in header.items() if key != 'params'}
        groups.append(Group(index, number, fields, not params))
        slots.append([])
        for param_id in params:
            if param_id in seen:
                raise _unknown(where, f'parameter {param_id} in two groups')
            seen.add(param_id)
            values = state.get(param_id)
            shape = _shape(values, f'{where}, parameter {param_id}')
            slots[-1].append(Slot(index, number, param_id, shape, values))
    orphans = [key for key in state if key not in seen]
    if orphans:
        raise _unknown(where, f'state of {orphans[0]!r}, which is in no group')
    return groups, slots


def _shape(values: Any, where: str) -> torch.Size | None:
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise _unknown(where, type(values).__name__)
    shapes = {
        value.shape for value in values.values() if isinstance(value, torch.Tensor) and value.dim()
    }
    if len(shapes) > 1:
        raise _unknown(where, f'tensors of different shapes {sorted(map(tuple, shapes))}')
    return shapes.pop() if shapes else None


def assign_masters(
    rank: RankOptimizer, named: Sequence[tuple[torch.Tensor, Slot]], where: str
) -> list[Slot]:
    """Give each half-precision parameter its fp32 master.

    Args:
        named: each parameter of the model with its slot, in model order

    Returns:
        the slots, in the same order

    Raises:
        CheckpointError: number or shapes of the masters don't fit
    """
    iterators = [
        None if part.masters is None else list(map(iter, part.masters)) for part in rank.parts
    ]
    result = []
    for tensor, slot in named:
        masters = iterators[slot.optimizer]
        if masters is None or tensor.dtype not in _HALF:
            result.append(slot)
            continue
        master = next(masters[slot.group], None)
        if master is None or master.shape != tensor.shape:
            found = 'none left' if master is None else f'shape {tuple(master.shape)}'
            raise CheckpointError(
                f"{where}, group {slot.group}: fp32 masters don't fit the parameters (found "
                f'{found}, expected {tuple(tensor.shape)}); {WAY_OUT}'
            )
        result.append(replace(slot, master=master))
    for masters in iterators:
        for number, group in enumerate(masters or []):
            if next(group, None) is not None:
                raise CheckpointError(
                    f'{where}, group {number}: more fp32 masters than half-precision parameters; '
                    f'{WAY_OUT}'
                )
    return result


def join_headers(ranks: Sequence[tuple[str, RankOptimizer]]) -> RankOptimizer:
    """The frame that several ranks' optimizers have in common: headers, scaler, names of keys.

    A group's ``step`` (FusedAdam's convention) counts only where the group has parameters, so it
    is taken from those ranks.

    Args:
        ranks: name for error messages and state of each rank

    Raises:
        CheckpointError: they differ in anything that one rank can hold only once
    """
    first_name, first = ranks[0]
    for name, other in ranks[1:]:
        other_frame = _frame(other)
        for what, expected in _frame(first).items():
            if not equal(other_frame[what], expected):
                raise CheckpointError(
                    f'{name}: {what} is {_short(other_frame[what])}, expected {_short(expected)} '
                    f"as in {first_name}; stages with different optimizer settings can't share a "
                    f'rank; {WAY_OUT}'
                )
    parts = []
    for i, part in enumerate(first.parts):
        same = [
            [(name, rank.parts[i].groups[g]) for name, rank in ranks]
            for g in range(len(part.groups))
        ]
        parts.append(replace(part, groups=list(map(_join_group, same))))
    return RankOptimizer(first.chained, parts)


def _frame(rank: RankOptimizer) -> dict[str, Any]:
    return {
        'whether the optimizer is a chain': rank.chained,
        'number of optimizers': len(rank.parts),
        'numbers of parameter groups': [len(part.groups) for part in rank.parts],
        'layout of the optimizer': [[p.inner, p.masters_key, p.others] for p in rank.parts],
    }


def _join_group(headers: Sequence[tuple[str, Group]]) -> Group:
    filled = [(name, group) for name, group in headers if not group.empty]
    first_name, first = (filled or headers)[0]
    for name, group in headers:
        ignored = {'step'} if group.empty else set()
        for key in sorted(first.fields.keys() | group.fields.keys() - ignored, key=str):
            if key in ignored:
                continue
            one, two = (g.fields.get(key) for g in (first, group))
            if not equal(one, two):
                raise CheckpointError(
                    f'{name}: optimizer group {group.number} has {key} {_short(two)}, expected '
                    f'{_short(one)} as in {first_name}; stages with different optimizer settings '
                    f"can't share a rank; {WAY_OUT}"
                )
    return Group(first.optimizer, first.number, first.fields, not filled)


def build(frame: RankOptimizer, slots: Sequence[Slot]) -> Any:
    """A rank's ``optimizer`` entry.

    Args:
        frame: headers and form, as ``join_headers`` returns them
        slots: optimizer state of every parameter of the rank, in model order, chunk after chunk
    """
    parts = [
        _build_one(part, [slot for slot in slots if slot.optimizer == index])
        for index, part in enumerate(frame.parts)
    ]
    return parts if frame.chained else parts[0]


def _build_one(part: Part, slots: Sequence[Slot]) -> Any:
    state: dict[int, Any] = {}
    param_groups, masters, param_id = [], [], 0
    for group in part.groups:
        members = [slot for slot in slots if slot.group == group.number]
        ids = range(param_id, param_id + len(members))
        param_id += len(members)
        state |= {
            i: slot.state for i, slot in zip(ids, members, strict=True) if slot.state is not None
        }
        fields = dict(group.fields)
        if not members:
            fields.pop('step', None)  # as FusedAdam leaves a group that it never steps
        param_groups.append({**fields, 'params': list(ids)})
        masters.append([slot.master for slot in members if slot.master is not None])
    inner = {'state': state, 'param_groups': param_groups}
    if part.inner is None:
        return inner
    return {part.inner: inner, **part.others, part.masters_key: masters}


def equal(one: Any, other: Any) -> bool:
    """Equal values; tensors, also in containers, bit for bit, NaNs and signed zeros included."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return tensors and same_bits(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(numpy.all(one == other))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + '…'


def _unknown(where: str, found: str) -> CheckpointError:
    return CheckpointError(
        f'{where}: optimizer layout not known ({found}), expected that of FP32Optimizer or '
        f'Float16OptimizerWithFloat16Params; {WAY_OUT}'
    )
