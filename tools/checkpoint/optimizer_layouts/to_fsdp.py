"""``torch_dist`` with ``fully_reshardable`` optimizer state into ``fsdp_dtensor``.

What ``fsdp_dtensor`` reads, backwards: each tensor is cut into its layers, experts and halves. The
parameter that Megatron-FSDP stores is the main parameter; cast, it has to be the weight, bit for
bit, over the whole model.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import (
    PARAM,
    parse_key,
    state_key,
)
from megatron_overlay.standalone.dist_checkpointing.format_names import (
    FSDP_DTENSOR,
    FULLY_RESHARDABLE,
    NO_STATE,
)

from ..common.errors import CheckpointError
from ..merge.geometry import Box, runs
from ..merge.plan import MadeBytes, OutputTensor
from ..merge.source import TensorEntry
from .archived import archived
from .checkpoint import Checkpoint
from .fsdp_checkpoint import STATES, STEP
from .fsdp_names import Names, Place, names_of_model
from .fsdp_settings import scales_loss
from .plan import OptimizerPlan, OutputChunk, Piece, Position, stored_chunk
from .to_fsdp_settings import read_groups, settings_of, wrappers

_COMMON = ('args', 'checkpoint_version', 'iteration', 'num_floating_point_operations_so_far')
_SCHEDULER = 'opt_param_scheduler'
# Where a step is in the state of each parameter, as torch's Adam has it.
_OF_TORCH = 'foreach'


class _Stored:
    """A stored tensor, and which of its chunks belong to which layer and expert."""

    def __init__(self, checkpoint: Checkpoint, key: str, entry: TensorEntry, axes: int) -> None:
        self._checkpoint = checkpoint
        self.key, self.entry = key, entry
        self._at: dict[tuple[int, ...], list[Box]] = defaultdict(list)
        for box in entry.chunks:
            ranges = zip(box.offsets[:axes], box.ends[:axes], strict=True)
            for at in itertools.product(*(range(*pair) for pair in ranges)):
                self._at[at].append(box)

    def parts(self, place: Place, region: Box) -> Iterator[tuple[Box, Box]]:
        """Its chunks that have elements of a region, and which these are."""
        for box in self._at[place.axes]:
            common = box.intersection(region)
            if common is not None:
                yield box, common

    def pieces(self, place: Place, region: Box) -> Iterator[Piece]:
        """What fills a region."""
        for box, common in self.parts(place, region):
            stored = stored_chunk(self._checkpoint, self.entry, box)
            for start, at, count in runs(common, box, region):
                yield Piece(stored, self.key, start, count, at)


def plan_fsdp(checkpoint: Checkpoint) -> OptimizerPlan:
    """The plan of the whole ``fsdp_dtensor`` checkpoint.

    Raises:
        CheckpointError: something isn't known, or is missing, or doesn't fit
    """
    assert checkpoint.layout is not None
    names = names_of_model(checkpoint.args, checkpoint.layout, checkpoint.directory)
    _refuse_formats(checkpoint)
    plan = OptimizerPlan({}, [], [], format=FSDP_DTENSOR)
    with_state = _weights_with_state(checkpoint)
    elements = 0
    parameters: dict[str, tuple[Place, tuple[int, ...]]] = {}
    for key, entry in checkpoint.weights.items():
        found = list(_parameters(checkpoint, names, key, entry))
        if not found:
            raise CheckpointError(
                f'{checkpoint.directory}: {key}: args.num_experts tells of no experts'
            )
        stored = _stored(checkpoint, key, len(found[0][1].axes), key in with_state)
        for name, place, region in found:
            shape = region.sizes[len(place.axes) :]
            _add_tensors(checkpoint, plan, stored, name, place, region)
            if key in with_state:
                elements += math.prod(shape)
                parameters[name if place.half < 0 else name[:-2]] = place, shape
            else:
                plan.without_state.append(name)
    plan.positions = [Position('parameters by name', len(parameters), elements, 0)]
    groups = read_groups(checkpoint) if parameters else []
    if groups and all(_OF_TORCH in group and STEP in group for group in groups):
        trained = [
            key.removeprefix('model.module.') for key in plan.tensors if key.startswith('model.')
        ]
        _add_steps(checkpoint, plan, set(trained) - set(plan.without_state), groups)
    plan.made = [*_common_objects(checkpoint), *settings_of(checkpoint, groups, parameters)]
    if any(key.startswith('rng_state') for key in checkpoint.copied):
        plan.notes += ['random state is not converted: pass --no-load-rng to the run that loads it']
    if parameters and scales_loss(checkpoint.args):
        plan.notes += [
            'Megatron-FSDP does not load a loss scale: the next run begins with its initial one'
        ]
    return plan


def _refuse_formats(checkpoint: Checkpoint) -> None:
    if checkpoint.format not in (FULLY_RESHARDABLE, NO_STATE):
        raise CheckpointError(
            f'{checkpoint.directory}: the optimizer state is {checkpoint.format!r}, expected '
            f'{FULLY_RESHARDABLE}: convert it to that first, with --to torch_dist'
        )
    content = checkpoint.common.state.get('content_metadata')
    if isinstance(content, Mapping) and content.get('singleton_local_shards'):
        raise CheckpointError(
            f'{checkpoint.directory}: content_metadata: singleton_local_shards: how parameters are '
            'called then is not known here'
        )


def _weights_with_state(checkpoint: Checkpoint) -> set[str]:
    """Keys of the weights that have main parameter and moments, of their shape."""
    found: dict[str, set[str]] = defaultdict(set)
    where = checkpoint.directory
    for key in [*checkpoint.optimizer, *checkpoint.optimizer_objects]:
        state, of = parse_key(key).state, parse_key(key).weight
        if (
            state not in (PARAM, *STATES)
            or key != state_key(state, of)
            or key not in checkpoint.optimizer
        ):
            raise CheckpointError(
                f'{where}: {key}: expected tensors optimizer.state.<state>.<weight> with '
                f'{", ".join((PARAM, *STATES))} only'
            )
        weight = checkpoint.weights.get(of)
        if weight is None or weight.shape != checkpoint.optimizer[key].shape:
            raise CheckpointError(
                f'{where}: {key} is {list(checkpoint.optimizer[key].shape)}, the weight '
                f'{list(weight.shape) if weight else "is missing"}; the checkpoint is damaged'
            )
        if checkpoint.optimizer[key].dtype != torch.float32:
            raise CheckpointError(
                f'{where}: {key}: {checkpoint.optimizer[key].dtype}, expected torch.float32'
            )
        found[of].add(state)
    for of, states in found.items():
        for state in (PARAM, *STATES):
            if state not in states:
                raise CheckpointError(f'{where}: no {state_key(state, of)}, but other state')
    return set(found)


def _parameters(
    checkpoint: Checkpoint, names: Names, key: str, entry: TensorEntry
) -> Iterator[tuple[str, Place, Box]]:
    """What makes up a tensor: names, places, and the part that each is."""
    for name, place in names.names(key):
        if names.place(name) != place or len(entry.shape) <= len(place.axes):
            raise CheckpointError(
                f'{checkpoint.directory}: {key}: not known as a tensor of a GPT model; how '
                'fsdp_dtensor stores it is not known here'
            )
        counts = [names.layers] * (place.layer >= 0) + [names.experts] * (place.expert >= 0)
        if [*entry.shape[: len(counts)]] != counts:
            raise CheckpointError(
                f'{checkpoint.directory}: {key} is {list(entry.shape)}, expected {counts} along '
                'its first axes, by the saved arguments'
            )
        rows = entry.shape[len(place.axes)] // (2 if place.half >= 0 else 1)
        if place.half >= 0 and entry.shape[len(place.axes)] % 2:
            raise CheckpointError(
                f'{checkpoint.directory}: {key} is {list(entry.shape)}, expected two halves'
            )
        offsets = (*place.axes, rows * max(place.half, 0))
        sizes = (*(1 for _ in place.axes), rows)
        rest = entry.shape[len(sizes) :]
        yield name, place, Box((*offsets, *(0 for _ in rest)), (*sizes, *rest))


def _stored(checkpoint: Checkpoint, key: str, axes: int, has_state: bool) -> dict[str, _Stored]:
    """By state a weight's tensors; ``''`` is the weight itself."""
    entries = {'': (key, checkpoint.weights[key])}
    for state in (PARAM, *STATES) if has_state else ():
        of = state_key(state, key)
        entries[state] = of, checkpoint.optimizer[of]
    return {state: _Stored(checkpoint, *entry, axes) for state, entry in entries.items()}


def _add_tensors(
    checkpoint: Checkpoint,
    plan: OptimizerPlan,
    stored: Mapping[str, _Stored],
    name: str,
    place: Place,
    region: Box,
) -> None:
    """One parameter and its moments; the parameter is the main parameter where there is one."""
    weight, main = stored[''], stored.get(PARAM)
    outputs = [(f'model.module.{name}', main or weight, weight if main else None)]
    outputs += [
        (f'optimizer.state.{wrappers(checkpoint.args)}{name}.{state}', stored[state], None)
        for state in STATES
        if state in stored
    ]
    shape = region.sizes[len(place.axes) :]
    for output, source, proof in outputs:
        chunks = list(_chunks(output, source, proof, place, region))
        boxes = tuple(chunk.box for chunk in chunks)
        plan.tensors[output] = OutputTensor(shape, source.entry.dtype, boxes)
        plan.chunks += chunks


def _add_steps(
    checkpoint: Checkpoint, plan: OptimizerPlan, names: Iterable[str], groups: list[dict[str, Any]]
) -> None:
    """The groups' step in the state of each parameter instead."""
    step, scalar = {float(group.pop(STEP)) for group in groups}, Box((), ())
    if len(step) > 1:
        raise CheckpointError(
            f'{checkpoint.directory}: common state: parameter groups are at steps {sorted(step)}, '
            'expected one'
        )
    for name in sorted(names):
        key = f'optimizer.state.{wrappers(checkpoint.args)}{name}.{STEP}'
        plan.tensors[key] = OutputTensor((), torch.float32, (scalar,))
        plan.chunks.append(OutputChunk(key, scalar, torch.float32, (), fill=min(step)))


def _chunks(
    output: str, source: _Stored, weight: _Stored | None, place: Place, region: Box
) -> Iterator[OutputChunk]:
    """The part of each stored chunk that belongs to a parameter."""
    for _, part in source.parts(place, region):
        yield OutputChunk(
            output,
            _within(part, region, len(place.axes)),
            source.entry.dtype,
            (),
            pieces=tuple(source.pieces(place, part)),
            proof=tuple(weight.pieces(place, part)) if weight else (),
        )


def _within(part: Box, region: Box, axes: int) -> Box:
    offsets = (a - b for a, b in zip(part.offsets, region.offsets, strict=True))
    return Box(tuple(offsets)[axes:], part.sizes[axes:])


def _common_objects(checkpoint: Checkpoint) -> Iterator[MadeBytes]:
    state = checkpoint.common.state
    for name in _COMMON:
        if name in state:
            yield MadeBytes(name, archived(state[name]))
    for name, value in (state.get(_SCHEDULER) or {}).items():
        yield MadeBytes(f'{_SCHEDULER}.{name}', archived(value))
