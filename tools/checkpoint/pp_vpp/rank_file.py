"""One rank file: taken apart into chunks with their optimizer state, and new ones put together."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import chunk_key, is_model_part

from ..common.errors import CheckpointError, reading
from ..common.numbers import number_in, whole
from ..common.paths import parse_iteration_dirname
from . import edges, optimizer_state, param_match
from .keys import chunk_numbers, count_layers, is_prediction, layer_of, renumber
from .layout import LayerRange, Move
from .optimizer_state import RankOptimizer, Slot
from .rank_args import ParallelSizes, rewrite
from .torch_file import MappedFile, Records

STAGE_STATES = 'pipeline_stage_states'

_EXPECTED = 'rank file that Megatron wrote'
_VERSION = 3.0  # of every model that has megatron-core's keys
_NUMBERS = (
    'pipeline_model_parallel_size',
    'virtual_pipeline_model_parallel_size',
    'tensor_model_parallel_size',
    'expert_model_parallel_size',
    'num_layers',
)
# What each stage has for itself and a rank with several chunks has room for only once.
_OF_THE_STAGE = (
    'args',
    'rng_state',
    'rerun_state_machine',
    'random_rng_state',
    'np_rng_state',
    'torch_rng_state',
    'cuda_rng_state',
    'rng_tracker_states',
)


@dataclass(frozen=True)
class RankFile:
    """What one source file holds.

    Attributes:
        path: the file
        state: all of it, with keys that it lacks and whose values are known
        added: those keys
        chunks: model state of each chunk by number; None is the number of plain ``model``
        layers: number of layers of each chunk
        optimizer: frame of its optimizer; None without
        slots: optimizer state of each parameter by (chunk number, key)
        records: where the tensors' bytes lie
    """

    path: Path
    state: Mapping[str, Any]
    added: Sequence[str]
    chunks: dict[int | None, Mapping[str, Any]]
    layers: dict[int | None, int]
    optimizer: RankOptimizer | None
    slots: dict[tuple[int | None, str], Slot]
    records: Records

    @property
    def args(self) -> Any:
        return self.state.get('args')

    @property
    def empty(self) -> list[int | None]:
        return [number for number, chunk in self.chunks.items() if not chunk]

    @property
    def predicts(self) -> list[int | None]:
        return [n for n, chunk in self.chunks.items() if any(map(is_prediction, chunk))]

    def refuse_unproven_empty(self) -> None:
        """An empty chunk is one of a layout that has such, or a lost one; the layer count tells.

        Raises:
            CheckpointError: nothing tells
        """
        if self.empty and number_in(self.args, 'num_layers') is None:
            raise CheckpointError(
                f'{self.path}: a chunk is empty, and without num_layers in args nothing tells '
                'whether it lost its layers'
            )

    def stage_state(self, chunk: int | None) -> dict[str, Any]:
        """Entries that the stage of a chunk has for itself: as kept by a merge, or the rank's."""
        kept = self.state.get(STAGE_STATES)
        if chunk is not None and kept is not None:
            if (
                not isinstance(kept, list)
                or len(kept) != len(self.chunks)
                or not isinstance(kept[chunk], Mapping)
            ):
                raise CheckpointError(
                    f'{self.path}, key {STAGE_STATES}: not one entry for each of '
                    f'{len(self.chunks)} chunks; the checkpoint is damaged'
                )
            return dict(kept[chunk])
        return {key: self.state[key] for key in _OF_THE_STAGE if key in self.state}


def take_apart(mapped: MappedFile, *, with_optimizer: bool) -> RankFile:
    """Split a rank file's model and optimizer state into chunks.

    Raises:
        CheckpointError: a key is missing, or the optimizer state can't be told apart
    """
    with reading(mapped.path, _EXPECTED):
        path, state = mapped.path, mapped.state
        for name in _NUMBERS:
            value = getattr(state.get('args'), name, None)
            if value is not None and whole(value) is None:
                raise CheckpointError(
                    f'{path}: args.{name} is {value!r:.99}, expected a number; the file is damaged'
                )
        chunks = {number: state[chunk_key(number)] for number in chunk_numbers(state, path)}
        layers = {n: count_layers(chunk, f'{path}, {chunk_key(n)}') for n, chunk in chunks.items()}
        known = _known(path, state)
        optimizer, slots = None, {}
        if with_optimizer and state.get('optimizer') is not None:
            where = f'{path}, optimizer'
            optimizer = optimizer_state.parse(state['optimizer'], where)
            slots = _name_slots(chunks, optimizer, where)
        added = [key for key in known if key not in state]
        return RankFile(
            path, {**state, **known}, added, chunks, layers, optimizer, slots, mapped.records
        )


def _known(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """What Megatron reads of every file, as it expects it; some tools leave it out."""
    known = {'checkpoint_version': state.get('checkpoint_version', _VERSION)}
    iteration = state.get('iteration', parse_iteration_dirname(path.parent.parent.name))
    if iteration is not None:  # `release` needs none
        number = whole(iteration)
        known['iteration'] = iteration if number is None else number
    return known


def _name_slots(
    chunks: Mapping[int | None, Mapping[str, Any]], optimizer: RankOptimizer, where: str
) -> dict[tuple[int | None, str], Slot]:
    keys, tensors = [], []
    for number, chunk in chunks.items():
        named = param_match.candidates(chunk_key(number), chunk)
        tensors += named
        keys += [(number, tensor.name) for tensor in named]
    groups = optimizer.members()
    slots = [slot for _, members in groups for slot in members]
    lost = [slot for slot in slots if slot.state is None]
    damaged = 0 < len(lost) < len(slots)  # after a step there is state of every parameter
    try:
        matched = param_match.match(tensors, groups, where)
    except CheckpointError:  # without its state a parameter's shape may be unknown
        if not damaged:
            raise
        matched = []
    if damaged:
        names = [
            f'{tensor.chunk} {tensor.name}'
            for tensor, slot in zip(tensors, matched, strict=False)
            if slot is not None and slot.state is None
        ]
        raise CheckpointError(
            f'{where}: no state of parameter {lost[0].number} '
            f'({", ".join(names[:3]) or "no name"}), but of {len(slots) - len(lost)} others; the '
            f'file is damaged; {optimizer_state.WAY_OUT}'
        )
    trained = [
        (key, tensor.tensor, slot)
        for key, tensor, slot in zip(keys, tensors, matched, strict=True)
        if slot is not None
    ]
    full = optimizer_state.assign_masters(optimizer, [(t, slot) for _, t, slot in trained], where)
    return {key: slot for (key, _, _), slot in zip(trained, full, strict=True)}


@dataclass(frozen=True)
class NewChunk:
    """A new chunk.

    Attributes:
        state: its model state
        slots: optimizer state of its parameters, in model order
        stage: entries of the stage it comes from
        files: the rank files that it comes from; none for an empty chunk
    """

    state: Mapping[str, Any]
    slots: Sequence[Slot]
    stage: dict[str, Any]
    files: Sequence[RankFile]


def whole_chunk(file: RankFile, number: int | None) -> NewChunk:
    """An old chunk as it is."""
    state = file.chunks[number]
    slots = [file.slots[number, key] for key in state if (number, key) in file.slots]
    return NewChunk(state, slots, file.stage_state(number), [file])


def assembled_chunk(
    move: Move, pieces: Sequence[tuple[LayerRange, RankFile]], first: edges.End, last: edges.End
) -> NewChunk:
    """A chunk put together from layers of old ones.

    Args:
        pieces: the runs of layers with the rank file each comes from
        first: number and rank file of the old chunk with the embedding
        last: number and rank file of the old chunk with the final norm and the head

    Raises:
        CheckpointError: a tied copy differs from its original; multi-token prediction that would
            have to be copied
    """
    keys = edges.front(move, first, last)
    new_layer = 0
    for piece, file in pieces:
        by_layer: dict[int | None, list[str]] = {}
        for key in file.chunks[piece.source.chunk]:
            by_layer.setdefault(layer_of(key), []).append(key)
        for layer in range(piece.first, piece.last):
            keys += [
                (renumber(key, new_layer), file, piece.source.chunk, key) for key in by_layer[layer]
            ]
            new_layer += 1
    keys += edges.back(move, first, last)
    state = OrderedDict((new, file.chunks[number][old]) for new, file, number, old in keys)
    slots = [
        file.slots[number, old] for _, file, number, old in keys if (number, old) in file.slots
    ]
    home, file = (pieces[0][0].source.chunk, pieces[0][1]) if pieces else first
    files = {id(file): file for _, file, _, _ in keys} or {id(file): file}
    return NewChunk(state, slots, file.stage_state(home), list(files.values()))


def put_together(
    chunks: Sequence[NewChunk], sizes: ParallelSizes, *, with_optimizer: bool
) -> dict[str, Any]:
    """A new rank file.

    Args:
        chunks: its chunks; one for a rank without virtual pipeline

    Raises:
        CheckpointError: chunks from several files that differ in what a rank has only once
    """
    files = list({id(file): file for chunk in chunks for file in chunk.files}.values())
    with reading(files[0].path, _EXPECTED):
        _refuse_differences(files)
        stage = next(chunk.stage for chunk in chunks if chunk.files)
        new: dict[str, Any] = {}
        for key, value in files[0].state.items():
            if key == STAGE_STATES:
                continue
            if is_model_part(key):
                for number, chunk in enumerate(chunks):
                    new[chunk_key(None if sizes.virtual is None else number)] = chunk.state
            elif key == 'optimizer':
                if with_optimizer and value is not None:
                    new[key] = _optimizer(files, chunks)
            elif key == 'args':
                new[key] = rewrite(stage.get('args', value), sizes)
            else:
                new[key] = stage.get(key, value)
        if sizes.virtual is not None:
            new[STAGE_STATES] = [chunk.stage for chunk in chunks]
        return new


def _optimizer(files: Sequence[RankFile], chunks: Sequence[NewChunk]) -> Any:
    frames = [(str(file.path), file.optimizer) for file in files if file.optimizer is not None]
    frame = optimizer_state.join_headers(frames)
    return optimizer_state.build(frame, [slot for chunk in chunks for slot in chunk.slots])


def _refuse_differences(files: Sequence[RankFile]) -> None:
    """Chunks of one rank have one of each entry but the model's and the optimizer's."""
    first, ignored = files[0], {STAGE_STATES, 'optimizer'}
    for other in files[1:]:
        keys = [
            {key for key in file.state if not is_model_part(key) and key not in ignored}
            for file in (first, other)
        ]
        for key in sorted(keys[0] ^ keys[1], key=str):
            lacking, having = (first, other) if key in keys[1] else (other, first)
            raise CheckpointError(
                f'{lacking.path}: key `{key}` is missing, but {having.path} has it; stages of '
                'one checkpoint hold the same keys, so one of them is damaged'
            )
        for key in sorted(keys[0] - {*_OF_THE_STAGE}, key=str):
            if not optimizer_state.equal(first.state[key], other.state[key]):
                raise CheckpointError(
                    f'{other.path}: key `{key}` differs from {first.path}; chunks of one rank '
                    "can hold it only once, so the two can't be joined"
                )
