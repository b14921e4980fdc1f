"""One rank file: taken apart into chunks with their optimizer state, and new ones put together."""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import CheckpointError, reading
from ..common.numbers import whole
from ..common.paths import parse_iteration_dirname
from . import edges, model_state, optimizer_state, param_match
from .layout import Move, Piece, first_missing
from .optimizer_state import RankOptimizer, Slot
from .rank_args import Layout, rewrite

STAGE_STATES = 'pipeline_stage_states'

_CHUNK = re.compile(r'model(\d+)?')
_VERSION = 3.0  # of every model that has megatron-core's keys
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
class OldRank:
    """What one source file holds.

    Attributes:
        path: the file
        state: all of it
        chunks: model state of each chunk by number; None is the number of plain ``model``
        optimizer: frame of its optimizer; None without
        slots: optimizer state of each parameter by (chunk number, key)
        added: keys that the file lacks, whose values are known
    """

    path: Path
    state: Mapping[str, Any]
    chunks: dict[int | None, Mapping[str, Any]]
    optimizer: RankOptimizer | None
    slots: dict[tuple[int | None, str], Slot]
    added: Sequence[str] = ()

    @property
    def stepped(self) -> bool | None:
        """Whether its parameters have optimizer state: all have, or none; None without any."""
        return next((slot.state is not None for slot in self.slots.values()), None)

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


def chunk_numbers(path: Path, state: Mapping[str, Any]) -> list[int | None]:
    """Numbers of a file's chunks: ``[None]`` for ``model``, else 0, 1, ….

    Raises:
        CheckpointError: no model, both forms, or a chunk missing in between
    """
    found = [_CHUNK.fullmatch(key) for key in state if isinstance(key, str)]
    numbers = sorted(int(match.group(1)) for match in found if match and match.group(1))
    plain = 'model' in state
    if plain and numbers:
        raise CheckpointError(
            f'{path}: both `model` and `model{numbers[0]}`, expected one form; the file is damaged'
        )
    if not plain and not numbers:
        raise CheckpointError(
            f'{path}: key `model` is missing (found {", ".join(map(str, state)) or "nothing"}); '
            'not a rank file of a model'
        )
    missing = first_missing(numbers)
    if missing is not None:
        raise CheckpointError(
            f'{path}: key `model{missing}` is missing (found up to `model{numbers[-1]}`); the '
            'file is damaged'
        )
    if len(set(numbers)) < len(numbers):
        raise CheckpointError(f'{path}: two keys for one chunk (such as `model1` and `model01`)')
    return [None] if plain else list(numbers)


def take_apart(path: Path, state: Mapping[str, Any], with_optimizer: bool) -> OldRank:
    """Split a rank file's model and optimizer state into chunks.

    Args:
        path: the file, for messages
        state: what it holds
        with_optimizer: look at the optimizer state too

    Raises:
        CheckpointError: a key is missing, or the optimizer state can't be told apart
    """
    with reading(path, 'rank file that Megatron wrote'):
        return _take_apart(path, state, with_optimizer)


def _take_apart(path: Path, state: Mapping[str, Any], with_optimizer: bool) -> OldRank:
    chunks = {
        number: state['model' if number is None else f'model{number}']
        for number in chunk_numbers(path, state)
    }
    for number, chunk in chunks.items():
        model_state.count_layers(chunk, f'{path}, model{"" if number is None else number}')
    known = _known(path, state)
    added = [key for key in known if key not in state]
    state = {**state, **known}
    optimizer, slots = None, {}
    if with_optimizer and state.get('optimizer') is not None:
        where = f'{path}, optimizer'
        optimizer = optimizer_state.parse(state['optimizer'], where)
        slots = _name_slots(chunks, optimizer, where)
    return OldRank(path, state, chunks, optimizer, slots, added)


def _known(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """What Megatron reads of every file, as it expects it; some tools leave it out."""
    known = {'checkpoint_version': state.get('checkpoint_version', _VERSION)}
    number = parse_iteration_dirname(path.parent.parent.name)
    iteration = state.get('iteration', number)
    if iteration is not None:  # `release` needs none
        as_integer = whole(iteration)
        known['iteration'] = iteration if as_integer is None else as_integer
    return known


def _name_slots(
    chunks: Mapping[int | None, Mapping[str, Any]], optimizer: RankOptimizer, where: str
) -> dict[tuple[int | None, str], Slot]:
    keys, tensors = [], []
    for number, chunk in chunks.items():
        named = param_match.candidates(f'model{"" if number is None else number}', chunk)
        tensors += named
        keys += [(number, tensor.name) for tensor in named]
    groups = [
        (group, slots)
        for headers, members in zip(optimizer.groups, optimizer.slots, strict=True)
        for group, slots in zip(headers, members, strict=True)
    ]
    _refuse_lost_state(tensors, groups, where)
    matched = param_match.match(tensors, groups, where)
    trained = [
        (key, tensor.tensor, slot)
        for key, tensor, slot in zip(keys, tensors, matched, strict=True)
        if slot is not None
    ]
    full = optimizer_state.assign_masters(optimizer, [(t, slot) for _, t, slot in trained], where)
    return {key: slot for (key, _, _), slot in zip(trained, full, strict=True)}


def _refuse_lost_state(
    tensors: Sequence[param_match.NamedTensor],
    groups: Sequence[tuple[optimizer_state.Group, Sequence[Slot]]],
    where: str,
) -> None:
    """An optimizer that has taken a step has state of every parameter."""
    slots = [slot for _, members in groups for slot in members]
    lost = [slot for slot in slots if slot.state is None]
    if not lost or len(lost) == len(slots):
        return
    try:
        matched = param_match.match(tensors, groups, where)
        names = [
            f'{tensor.chunk} {tensor.name}'
            for tensor, slot in zip(tensors, matched, strict=True)
            if slot is not None and slot.state is None
        ]
    except CheckpointError:  # without its state a parameter's shape may be unknown
        names = []
    raise CheckpointError(
        f'{where}: no state of parameter {lost[0].number} ({", ".join(names[:3]) or "no name"}), '
        f'but of {len(slots) - len(lost)} others; the file is damaged; {optimizer_state.WAY_OUT}'
    )


@dataclass(frozen=True)
class NewChunk:
    """A new chunk.

    Attributes:
        state: its model state
        slots: optimizer state of its parameters, in model order
        stage: entries of the stage it comes from
        ranks: the source ranks that it comes from
    """

    state: Mapping[str, Any]
    slots: Sequence[Slot]
    stage: dict[str, Any]
    ranks: Sequence[OldRank]


def whole_chunk(rank: OldRank, number: int | None) -> NewChunk:
    """An old chunk as it is."""
    state = rank.chunks[number]
    slots = [rank.slots[number, key] for key in state if (number, key) in rank.slots]
    return NewChunk(state, slots, rank.stage_state(number), [rank])


def assembled_chunk(
    move: Move,
    pieces: Sequence[tuple[Piece, OldRank]],
    first: edges.End,
    last: edges.End,
) -> NewChunk:
    """A chunk put together from layers of old ones.

    Args:
        move: what it is made of
        pieces: the runs of layers with the rank each comes from
        first: number and rank of the old chunk with the embedding
        last: number and rank of the old chunk with the final norm and the head

    Raises:
        CheckpointError: a tied copy differs from its original; keys that belong to no layer in a
            stage between first and last; multi-token prediction that would have to be copied
    """
    keys: list[tuple[str, OldRank, int | None, str]] = []
    keys += edges.front(move, first, last)
    layer = 0
    for piece, rank in pieces:
        state = rank.chunks[piece.source.chunk]
        by_layer: dict[int, list[str]] = {}
        for key in state:
            number = model_state.layer_of(key)
            if number is not None:
                by_layer.setdefault(number, []).append(key)
        for number in range(piece.first, piece.last):
            keys += [
                (model_state.renumber(key, layer), rank, piece.source.chunk, key)
                for key in by_layer[number]
            ]
            layer += 1
    keys += edges.back(move, first, last)
    state = OrderedDict((new, rank.chunks[number][old]) for new, rank, number, old in keys)
    slots = [
        rank.slots[number, old] for _, rank, number, old in keys if (number, old) in rank.slots
    ]
    home, rank = (pieces[0][0].source.chunk, pieces[0][1]) if pieces else first
    ranks = {id(rank): rank for _, rank, _, _ in keys} or {id(rank): rank}
    return NewChunk(state, slots, rank.stage_state(home), list(ranks.values()))


def put_together(
    chunks: Sequence[NewChunk], layout: Layout, with_optimizer: bool
) -> dict[str, Any]:
    """A new rank file.

    Args:
        chunks: its chunks; one for a rank without virtual pipeline
        layout: sizes of the output
        with_optimizer: carry the optimizer state

    Raises:
        CheckpointError: chunks from several ranks that differ in what a rank has only once
    """
    ranks = list({id(rank): rank for chunk in chunks for rank in chunk.ranks}.values())
    with reading(ranks[0].path, 'rank file that Megatron wrote'):
        return _put_together(ranks, chunks, layout, with_optimizer)


def _put_together(
    ranks: Sequence[OldRank], chunks: Sequence[NewChunk], layout: Layout, with_optimizer: bool
) -> dict[str, Any]:
    _refuse_differences(ranks, with_optimizer)
    models = {
        'model' if layout.virtual_size is None else f'model{number}': chunk.state
        for number, chunk in enumerate(chunks)
    }
    stages = [chunk.stage for chunk in chunks if chunk.ranks]
    new: dict[str, Any] = {}
    for key, value in ranks[0].state.items():
        if key == STAGE_STATES:
            continue
        if _CHUNK.fullmatch(str(key)):
            new |= models
        elif key == 'optimizer':
            if with_optimizer and value is not None:
                new[key] = _optimizer(ranks, chunks)
        elif key == 'args':
            new[key] = rewrite(stages[0].get('args', value), layout)
        else:
            new[key] = stages[0].get(key, value)
    if layout.virtual_size is not None:
        new[STAGE_STATES] = [chunk.stage for chunk in chunks]
    return new


def _optimizer(ranks: Sequence[OldRank], chunks: Sequence[NewChunk]) -> Any:
    frames = [(str(rank.path), rank.optimizer) for rank in ranks if rank.optimizer is not None]
    frame = optimizer_state.join_headers(frames)
    return optimizer_state.build(frame, [slot for chunk in chunks for slot in chunk.slots])


def _refuse_differences(ranks: Sequence[OldRank], with_optimizer: bool) -> None:
    first = ranks[0]
    ignored = {STAGE_STATES} if with_optimizer else {STAGE_STATES, 'optimizer'}
    for other in ranks[1:]:
        keys = [
            {key for key in rank.state if not _CHUNK.fullmatch(str(key)) and key not in ignored}
            for rank in (first, other)
        ]
        for key in sorted(keys[0] ^ keys[1], key=str):
            lacking, having = (first, other) if key in keys[1] else (other, first)
            raise CheckpointError(
                f'{lacking.path}: key `{key}` is missing, but {having.path} has it; stages of '
                'one checkpoint hold the same keys, so one of them is damaged'
            )
        for key in sorted(keys[0] - {'optimizer', *_OF_THE_STAGE}, key=str):
            if not optimizer_state.equal(first.state[key], other.state[key]):
                raise CheckpointError(
                    f'{other.path}: key `{key}` differs from {first.path}; chunks of one rank '
                    "can hold it only once, so the two can't be joined"
                )
