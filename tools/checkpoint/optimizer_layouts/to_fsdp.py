"""``torch_dist`` with ``fully_reshardable`` optimizer state into ``fsdp_dtensor``.

What ``fsdp_dtensor`` reads, backwards: each tensor is cut into its layers, experts and halves, and
the parts of a Mamba layer's parameters are put together. The parameter that Megatron-FSDP stores is
the main parameter; cast, it has to be the weight, bit for bit, over the whole model.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import (
    PARAM,
    RNG,
    kind_of,
    parse_key,
    state_key,
)
from megatron_overlay.standalone.dist_checkpointing.format_names import (
    FSDP_DTENSOR,
    FULLY_RESHARDABLE,
    NO_STATE,
)

from ..common.errors import CheckpointError, shown
from ..merge.geometry import Box, runs
from ..merge.plan import MadeBytes, OutputTensor
from ..merge.source import TensorEntry
from .archived import archived
from .checkpoint import Checkpoint
from .fsdp_checkpoint import STATES, STEP
from .fsdp_model import names_of_model
from .fsdp_names import Names, Place
from .fsdp_settings import scales_loss
from .mixer_parts import check_shares, part_names, sections, tensor_size, without_part
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


@dataclass(frozen=True)
class _Region:
    """A part of stored tensors, and where it goes.

    Attributes:
        stored: by state a weight's tensors; ``''`` is the weight itself
        box: in them
        at: its first row in the parameter
    """

    stored: Mapping[str, _Stored]
    box: Box
    at: int = 0


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the output.

    Attributes:
        name, place: see ``fsdp_names``
        regions: which make it up, in the order of its rows
    """

    name: str
    place: Place
    regions: list[_Region]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        first = self.regions[0].box.sizes[len(self.place.axes) :]
        rows = sum(region.box.sizes[len(self.place.axes)] for region in self.regions)
        return (rows, *first[1:])


def plan_fsdp(checkpoint: Checkpoint) -> OptimizerPlan:
    """The plan of the whole ``fsdp_dtensor`` checkpoint.

    Raises:
        CheckpointError: something isn't known, or is missing, or doesn't fit
    """
    assert checkpoint.layout is not None
    names = names_of_model(checkpoint.args, checkpoint.layout, checkpoint.directory)
    _refuse_formats(checkpoint)
    _refuse_other_widths(checkpoint, names)
    plan = OptimizerPlan({}, [], [], format=FSDP_DTENSOR)
    with_state = _weights_with_state(checkpoint)
    elements = 0
    parameters: dict[str, tuple[Place, tuple[int, ...]]] = {}
    whole = _whole_keys(checkpoint)
    for key, keys in whole.items():
        has_state = _have_state(checkpoint, keys, with_state)
        for parameter in _parameters(checkpoint, names, key, keys, has_state):
            _add_tensors(checkpoint, plan, parameter)
            if has_state:
                elements += math.prod(parameter.shape)
                place, name = parameter.place, parameter.name
                parameters[name if place.half < 0 else name[:-2]] = place, parameter.shape
            else:
                plan.without_state.append(parameter.name)
    plan.positions = [Position('parameters by name', len(parameters), elements, 0)]
    groups = read_groups(checkpoint) if parameters else []
    if groups and all(_OF_TORCH in group and STEP in group for group in groups):
        trained = [
            key.removeprefix('model.module.') for key in plan.tensors if key.startswith('model.')
        ]
        _add_steps(checkpoint, plan, set(trained) - set(plan.without_state), groups)
    plan.made = [*_common_objects(checkpoint), *settings_of(checkpoint, groups, parameters)]
    plan.notes = list(_notes(checkpoint, whole, bool(parameters)))
    return plan


def _notes(checkpoint: Checkpoint, whole: Iterable[str], trained: bool) -> Iterator[str]:
    """What the user should know."""
    if any(map(part_names, whole)):
        yield (
            'the rows of Mamba layers are in the order of the tensor-parallel ranks: pass '
            f'--tensor-model-parallel-size {tensor_size(checkpoint)} to the run that loads it'
        )
    if any(kind_of(key) == RNG for key in checkpoint.copied):
        yield 'random state is not converted: pass --no-load-rng to the run that loads it'
    if trained and scales_loss(checkpoint.args):
        yield 'Megatron-FSDP does not load a loss scale: the next run begins with its initial one'


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


def _refuse_other_widths(checkpoint: Checkpoint, names: Names) -> None:
    """``linear_fc1`` is as wide as ``linear_fc2``, and twice that with ``--swiglu``."""
    for key, weight in checkpoint.weights.items():
        other = checkpoint.weights.get(key.replace('linear_fc1', 'linear_fc2'))
        if not key.endswith('linear_fc1.weight') or other is None:
            continue
        rows, columns = weight.shape[-2:-1], other.shape[-1:]
        if rows != tuple(width * (1 + names.gated) for width in columns):
            raise CheckpointError(
                f'{checkpoint.directory}: {key} is {list(weight.shape)}, its linear_fc2 '
                f'{list(other.shape)}, expected {"twice " if names.gated else ""}as many rows as '
                f'columns there: args.swiglu is {shown(getattr(checkpoint.args, "swiglu", None))}; '
                'take a checkpoint with the arguments of its own run'
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


def _whole_keys(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Keys of the weights by what they have in common: those of a parameter's parts together."""
    found: dict[str, list[str]] = defaultdict(list)
    for key in checkpoint.weights:
        found[without_part(key)].append(key)
    return found


def _have_state(checkpoint: Checkpoint, keys: list[str], with_state: set[str]) -> bool:
    lacking = [key for key in keys if key not in with_state]
    if lacking and len(lacking) < len(keys):
        raise CheckpointError(
            f'{checkpoint.directory}: no optimizer state of {lacking[0]}, but of other parts of '
            f'{without_part(lacking[0])}'
        )
    return not lacking


def _parameters(
    checkpoint: Checkpoint, names: Names, key: str, keys: list[str], has_state: bool
) -> Iterator[_Parameter]:
    """What a tensor is cut into; or the one parameter that tensors of parts make up."""
    stored: dict[str, _Stored] = {}
    found = False
    for name, place in names.names(key):  # up to the first that doesn't fit: any number is in args
        found = True
        if names.place(name) != place:
            raise CheckpointError(
                f'{checkpoint.directory}: {key}: not known as a tensor of a {names.family} model; '
                'how fsdp_dtensor stores it is not known here'
            )
        if part_names(key):
            yield _Parameter(name, place, _regions_of_parts(checkpoint, key, keys, has_state))
            continue
        box = _region(checkpoint, names, key, place)
        stored = stored or _stored(checkpoint, key, len(place.axes), has_state)
        yield _Parameter(name, place, [_Region(stored, box)])
    if not found:
        raise CheckpointError(
            f'{checkpoint.directory}: {key}: args.num_experts tells of no experts'
        )


def _regions_of_parts(
    checkpoint: Checkpoint, key: str, keys: list[str], has_state: bool
) -> list[_Region]:
    """The rows of a Mamba mixer's parameter, each rank's below those of the one before."""
    where, parts = checkpoint.directory, [f'{key}.{part}' for part in part_names(key)]
    if set(keys) != set(parts):
        raise CheckpointError(f'{where}: {sorted(keys)} are stored, expected {sorted(parts)}')
    kinds = {}
    for part in parts:
        entry = checkpoint.weights[part]
        kinds[entry.shape[1:], len(entry.shape), entry.dtype] = f'{part} {list(entry.shape)}'
    if len(kinds) > 1 or not checkpoint.weights[parts[0]].shape:
        raise CheckpointError(
            f'{where}: {" and ".join(kinds.values())} are parts of {key}, expected the same but '
            'for the number of rows'
        )
    ranks = tensor_size(checkpoint)
    rows = {name: checkpoint.weights[f'{key}.{name}'].shape[0] for name in part_names(key)}
    check_shares(checkpoint, key, rows, ranks)
    stored = {part: _stored(checkpoint, part, 0, has_state) for part in parts}
    rest = checkpoint.weights[parts[0]].shape[1:]
    return [
        _Region(
            stored[section.key],
            Box((section.at, *(0 for _ in rest)), (section.rows, *rest)),
            section.start,
        )
        for section in sections(key, rows, ranks)
    ]


def _region(checkpoint: Checkpoint, names: Names, key: str, place: Place) -> Box:
    """The part of a tensor that a parameter is."""
    entry = checkpoint.weights[key]
    counts = [names.layers] * (place.layer >= 0) + [names.experts] * (place.expert >= 0)
    if [*entry.shape[: len(counts)]] != counts or len(entry.shape) == len(counts):
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
    return Box((*offsets, *(0 for _ in rest)), (*sizes, *rest))


def _stored(checkpoint: Checkpoint, key: str, axes: int, has_state: bool) -> dict[str, _Stored]:
    """By state a weight's tensors; ``''`` is the weight itself."""
    entries = {'': (key, checkpoint.weights[key])}
    for state in (PARAM, *STATES) if has_state else ():
        of = state_key(state, key)
        entries[state] = of, checkpoint.optimizer[of]
    return {state: _Stored(checkpoint, *entry, axes) for state, entry in entries.items()}


def _add_tensors(checkpoint: Checkpoint, plan: OptimizerPlan, parameter: _Parameter) -> None:
    """One parameter and its moments; the parameter is the main parameter where there is one."""
    stored = parameter.regions[0].stored
    outputs = {f'model.module.{parameter.name}': PARAM if PARAM in stored else ''}
    outputs |= {
        f'optimizer.state.{wrappers(checkpoint.args)}{parameter.name}.{state}': state
        for state in STATES
        if state in stored
    }
    for output, state in outputs.items():
        chunks = list(_chunks(output, state, parameter))
        boxes = tuple(chunk.box for chunk in chunks)
        plan.tensors[output] = OutputTensor(parameter.shape, stored[state].entry.dtype, boxes)
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


def _chunks(output: str, state: str, parameter: _Parameter) -> Iterator[OutputChunk]:
    """The part of each stored chunk that belongs to a parameter."""
    place = parameter.place
    for region in parameter.regions:
        source = region.stored[state]
        for _, part in source.parts(place, region.box):
            proof = region.stored[''].pieces(place, part) if state == PARAM else ()
            yield OutputChunk(
                output,
                _within(part, region, len(place.axes)),
                source.entry.dtype,
                (),
                pieces=tuple(source.pieces(place, part)),
                proof=tuple(proof),
            )


def _within(part: Box, region: _Region, axes: int) -> Box:
    offsets = [a - b for a, b in zip(part.offsets, region.box.offsets, strict=True)][axes:]
    return Box((offsets[0] + region.at, *offsets[1:]), part.sizes[axes:])


def _common_objects(checkpoint: Checkpoint) -> Iterator[MadeBytes]:
    state = checkpoint.common.state
    for name in _COMMON:
        if name in state:
            yield MadeBytes(name, archived(state[name]))
    for name, value in (state.get(_SCHEDULER) or {}).items():
        yield MadeBytes(f'{_SCHEDULER}.{name}', archived(value))
