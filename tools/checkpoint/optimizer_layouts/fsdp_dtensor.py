"""``fsdp_dtensor``, Megatron-FSDP's format: a model's weights and optimizer state by name.

A parameter is stored once, in fp32: it is the main parameter, and cast to the model's dtype the
weight. Every stored chunk becomes a chunk of the stacked tensor, element for element, so that
nothing is reshaped; of Mamba layers it is cut where parts end. See ``fsdp_names`` for names and
places, ``mixer_parts`` for such parts.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import PARAM, state_key

from ..common.errors import CheckpointError
from ..merge.geometry import Box, runs
from ..merge.plan import MadeBytes, OutputTensor
from ..merge.source import TensorEntry
from .archived import archived
from .checkpoint import Checkpoint
from .fsdp_checkpoint import STATES, FsdpCheckpoint
from .fsdp_model import names_of_model
from .fsdp_names import Names, Place
from .fsdp_settings import random_objects, read_settings, scales_loss
from .mixer_parts import Section, stored_sections
from .plan import OptimizerPlan, OutputChunk, Piece, Position, stored_chunk


def plan_optimizer(checkpoint: Checkpoint) -> OptimizerPlan:
    """The plan of the whole ``torch_dist`` checkpoint, derived from names and shapes.

    Raises:
        CheckpointError: something isn't known, or is missing, or doesn't fit
    """
    assert isinstance(checkpoint, FsdpCheckpoint) and checkpoint.layout is not None
    args: Any = checkpoint.args
    names = names_of_model(args, checkpoint.layout, checkpoint.directory)
    if not checkpoint.states:
        checkpoint.settings = {}  # no step was made, with fp16 all of the first ones are skipped
    places = {name: _place(checkpoint, names, name) for name in checkpoint.weights}
    _check_states(checkpoint, places)
    _check_sizes(checkpoint, places)
    checkpoint.common.state['content_metadata'] = {'singleton_local_shards': False}
    plan = OptimizerPlan({}, [], read_settings(checkpoint), made=random_objects(checkpoint))
    parts: dict[str, dict[Place, str]] = defaultdict(dict)
    for name, place in places.items():
        other = parts[place.key].setdefault(place, name)
        if other != name:
            raise CheckpointError(
                f'{checkpoint.directory}: model.module.{name} and {other} are the same part of '
                f'{place.key}, and only one can be meant'
            )
    for key, of_key in parts.items():
        _check_complete(checkpoint, names, key, of_key)
        _add_tensors(checkpoint, plan, key, of_key)
    # Megatron-FSDP leaves it out; nothing is what it is without FP8.
    plan.made += [MadeBytes(key, archived([None])) for key in names.extra_states(parts)]
    with_state = [name for name in checkpoint.weights if name in checkpoint.states]
    elements = sum(math.prod(checkpoint.weights[name].shape) for name in with_state)
    plan.positions = [Position('parameters by name', len(with_state), elements, 0)]
    plan.without_state = sorted(checkpoint.weights.keys() - set(with_state))
    if not with_state:
        plan.notes += [
            'no optimizer state: weights are written in the dtype that they are stored in'
        ]
    elif scales_loss(args):
        plan.notes += [
            'Megatron-FSDP does not store the loss scale: the next run begins with its initial one'
        ]
    return plan


def _place(checkpoint: FsdpCheckpoint, names: Names, name: str) -> Place:
    place = names.place(name)
    if place is None:
        raise CheckpointError(
            f'{checkpoint.directory}: model.module.{name}: not known as a parameter of a '
            f'{names.family} model with {"--swiglu" if names.gated else "no --swiglu"} and '
            f'{names.experts} experts; how torch_dist stores it is not known here'
        )
    return place


def _base(name: str, place: Place) -> str:
    """The parameter's name in its model, which doesn't tell gate and up apart."""
    return name if place.half < 0 else name[:-2]


def _check_states(checkpoint: FsdpCheckpoint, places: Mapping[str, Place]) -> None:
    """Every parameter has all state or none, in its shape and in fp32, and its group's settings."""
    where = checkpoint.directory
    stored = {_base(name, places[name]) for name in checkpoint.states if name in places}
    for name in (checkpoint.states.keys() - places.keys()) | (checkpoint.settings.keys() - stored):
        raise CheckpointError(
            f'{where}: optimizer state or settings of {name}, but no such weight, or no state of '
            'it; the checkpoint is damaged, take another'
        )
    for name, states in checkpoint.states.items():
        weight = checkpoint.weights[name]
        for state in STATES:
            if state not in states:
                raise CheckpointError(f'{where}: no {state} of {name}; the checkpoint is damaged')
            if states[state].shape != weight.shape:
                raise CheckpointError(
                    f'{where}: {state} of {name} is {list(states[state].shape)}, the weight '
                    f'{list(weight.shape)}; the checkpoint is damaged'
                )
        for what, entry in ((name, weight), *((f'{s} of {name}', states[s]) for s in STATES)):
            if entry.dtype != torch.float32:
                raise CheckpointError(
                    f'{where}: {what}: {entry.dtype}, expected torch.float32; state of a run '
                    'without --megatron-fsdp-main-params-dtype fp32 is not converted'
                )
        if _base(name, places[name]) not in checkpoint.settings:
            raise CheckpointError(f'{where}: no param_to_group_meta of {name}, but its state')
    if checkpoint.states:
        trained = {places[name].key for name in checkpoint.states}
        for name, place in places.items():
            if name not in checkpoint.states and place.key in trained:
                raise CheckpointError(
                    f'{where}: no optimizer state of {name}, but of other parts of {place.key}'
                )


def _check_sizes(checkpoint: FsdpCheckpoint, places: Mapping[str, Place]) -> None:
    """``linear_fc1`` is as wide as ``linear_fc2``: both halves are there, or it has none."""
    for name, place in places.items():
        base = _base(name, place)
        other = checkpoint.weights.get(base.replace('linear_fc1', 'linear_fc2'))
        if not base.rstrip('0123456789').endswith('linear_fc1.weight') or other is None:
            continue
        found = checkpoint.weights[name].shape
        if len(found) != 2 or len(other.shape) != 2 or found[0] != other.shape[1]:
            raise CheckpointError(
                f'{checkpoint.directory}: {name} is {list(found)}, its linear_fc2 '
                f'{list(other.shape)}, expected rows as many as the columns there; '
                f'args.swiglu is {getattr(checkpoint.args, "swiglu", None)}'
            )


def _check_complete(
    checkpoint: FsdpCheckpoint, names: Names, key: str, of_key: Mapping[Place, str]
) -> None:
    """All layers, experts and halves of a tensor are there, alike."""
    for place, name in of_key.items():
        if place.layer >= names.layers or place.expert >= names.experts:
            raise CheckpointError(
                f'{checkpoint.directory}: model.module.{name}: args tell of {names.layers} layers '
                f'and {names.experts} experts, of which it is none'
            )
    for name, place in names.names(key):  # up to the first that is missing: any number is in args
        if place not in of_key:
            raise CheckpointError(
                f'{checkpoint.directory}: no model.module.{name}, which with '
                f'{next(iter(of_key.values()))} and others makes up {key}'
            )
    kinds = {
        (checkpoint.weights[name].shape, checkpoint.weights[name].dtype): name
        for name in of_key.values()
    }
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise CheckpointError(
            f'{checkpoint.directory}: {first} is {list(one[0])} in {one[1]}, {second} '
            f'{list(other[0])} in {other[1]}, expected the same: both are parts of {key}'
        )


def _add_tensors(
    checkpoint: FsdpCheckpoint, plan: OptimizerPlan, key: str, of_key: Mapping[Place, str]
) -> None:
    """A weight, stacked or in its parts, and its state."""
    name = next(iter(of_key.values()))
    weight = checkpoint.weights[name]
    outputs = [('', weight.dtype)]
    if name in checkpoint.states:
        outputs = [('', _model_dtype(checkpoint.args))]
        outputs += [(state, torch.float32) for state in (PARAM, *STATES)]
    parts = stored_sections(checkpoint, key, name)
    for state, dtype in outputs:
        if parts:
            tensors = _tensors_of_parts(checkpoint, state, dtype, name, parts)
        else:
            output = _output(key, state)
            chunks = list(_chunks(checkpoint, output, state, dtype, of_key))
            tensors = {output: (_stacked(weight.shape, of_key), chunks)}
        for output, (shape, chunks) in tensors.items():
            plan.tensors[output] = OutputTensor(shape, dtype, tuple(chunk.box for chunk in chunks))
            plan.chunks += chunks


def _output(key: str, state: str) -> str:
    return state_key(state, key) if state else key


def _tensors_of_parts(
    checkpoint: FsdpCheckpoint, state: str, dtype: torch.dtype, name: str, parts: list[Section]
) -> dict[str, tuple[tuple[int, ...], list[OutputChunk]]]:
    """Shape and chunks of each part of a parameter, by key."""
    entry = _entry(checkpoint, state, name)
    label, rest = f'{name} {state}'.rstrip(), entry.shape[1:]
    rows: dict[str, int] = defaultdict(int)
    chunks: dict[str, list[OutputChunk]] = defaultdict(list)
    for part in parts:
        output = _output(part.key, state)
        rows[output] += part.rows
        region = Box((part.start, *(0 for _ in rest)), (part.rows, *rest))
        for box in entry.chunks:
            common = box.intersection(region)
            if common is None:
                continue
            stored = stored_chunk(checkpoint, entry, box)
            pieces = tuple(
                Piece(stored, label, start, count, at)
                for start, at, count in runs(common, box, common)
            )
            first, *others = common.offsets
            place = Box((first - part.start + part.at, *others), common.sizes)
            chunks[output].append(OutputChunk(output, place, dtype, (), pieces=pieces))
    return {output: ((rows[output], *rest), own) for output, own in chunks.items()}


def _chunks(
    checkpoint: FsdpCheckpoint,
    output: str,
    state: str,
    dtype: torch.dtype,
    of_key: Mapping[Place, str],
) -> Iterator[OutputChunk]:
    for place, name in of_key.items():
        entry = _entry(checkpoint, state, name)
        for box in entry.chunks:
            stored = stored_chunk(checkpoint, entry, box)
            piece = Piece(stored, f'{name} {state}'.rstrip(), 0, box.numel, 0)
            yield OutputChunk(output, _moved(box, entry.shape, place), dtype, (), pieces=(piece,))


def _entry(checkpoint: FsdpCheckpoint, state: str, name: str) -> TensorEntry:
    return checkpoint.states[name][state] if state in STATES else checkpoint.weights[name]


def _stacked(shape: tuple[int, ...], places: Mapping[Place, str]) -> tuple[int, ...]:
    """Shape of the tensor that parameters of this shape make up."""
    last = max(places)
    rows = (shape[0] * (2 if last.half >= 0 else 1),) if shape else ()
    return (*(axis + 1 for axis in last.axes), *rows, *shape[1:])


def _moved(box: Box, shape: tuple[int, ...], place: Place) -> Box:
    """Where a chunk of a parameter lies in the tensor."""
    rows = shape[0] * max(place.half, 0) if shape else 0
    first = tuple(offset + rows for offset in box.offsets[:1])
    return Box((*place.axes, *first, *box.offsets[1:]), (*(1 for _ in place.axes), *box.sizes))


def _model_dtype(args: Any) -> torch.dtype:
    half = (('bf16', torch.bfloat16), ('fp16', torch.float16))
    return next((dtype for name, dtype in half if getattr(args, name, False)), torch.float32)
