"""The plan of a conversion, as data: which stored elements make which part of the output.

A format's module (see ``formats``) yields an ``OptimizerPlan``; ``make_plan`` adds what is copied
and shares the work out. Both are made from metadata and small objects, before a tensor is read.

An example: saved by two data-parallel ranks, ``optimizer.state.exp_avg.output_layer.weight`` may be
one chunk of two pieces: the parameter crosses the end of the first rank's share of its bucket.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..merge.geometry import Box
from ..merge.plan import BytesJob, ChunkJob, MergePlan, OutputTensor, RankShare, StoredChunk
from ..merge.source import Slice, TensorEntry
from .checkpoint import Checkpoint

STATE_PREFIX = 'optimizer.state'
PARAM = 'param'


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of a stored chunk that are consecutive in an output chunk.

    Attributes:
        stored: the chunk that holds them
        key: FQN of the tensor that it is a chunk of
        start: first of them in the stored chunk, row-major
        count: their number
        at: where the first goes in the output chunk, row-major
    """

    stored: StoredChunk
    key: str
    start: int
    count: int
    at: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements as they are stored."""
        return self.count * self.stored.dtype.itemsize


@dataclass(frozen=True, slots=True)
class OutputChunk(ChunkJob):
    """One chunk of the output's optimizer state.

    Attributes:
        pieces: fill the chunk, each element once
        weight: of a main parameter, the stored chunk of its weight, which has the same box: the
            proof that the pieces are in their place
        copies: the same elements as other model-parallel ranks store them, where a parameter is
            replicated; never written, and proven as well
    """

    pieces: tuple[Piece, ...] = ()
    weight: StoredChunk | None = None
    copies: tuple[tuple[Piece, ...], ...] = ()

    @property
    def source_bytes(self) -> int:
        """Bytes that are read for it, but for the proof."""
        return sum(piece.nbytes for group in (self.pieces, *self.copies) for piece in group)

    @property
    def weight_key(self) -> str:
        """FQN of the weight that the state is of."""
        return self.key.split('.', 3)[3]


@dataclass(frozen=True, slots=True)
class Position:
    """What one group of data-parallel ranks stored.

    Attributes:
        name: as the checkpoint's keys have it
        parameters, elements, buckets: how many; elements are those of the main parameters, and
            there are no buckets where state is stored by parameter
    """

    name: str
    parameters: int
    elements: int
    buckets: int


@dataclass
class OptimizerPlan:
    """What a format's module finds out.

    Attributes:
        tensors: of the output, by FQN
        chunks: which tile the tensors
        settings: for each optimizer of the chain what the common state keeps of it: parameter
            groups with the step, the gradient scaler
        positions: for the report
        padding: elements of buckets that belong to no parameter
        without_state: weights that no optimizer state is stored of
        notes: what the user should know
    """

    tensors: dict[str, OutputTensor]
    chunks: list[OutputChunk]
    settings: list[dict[str, Any]]
    positions: list[Position] = field(default_factory=list)
    padding: int = 0
    without_state: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class ConversionPlan(MergePlan):
    """All of the output: converted state in ``tensors``, what is copied in ``byte_entries``."""

    optimizer: OptimizerPlan = field(default_factory=lambda: OptimizerPlan({}, [], []))


def state_key(state: str, weight: str) -> str:
    """``optimizer.state.exp_avg.output_layer.weight``."""
    return f'{STATE_PREFIX}.{state}.{weight}'


def stored_chunk(checkpoint: Checkpoint, entry: TensorEntry, box: Box) -> StoredChunk:
    """A chunk of a stored tensor as a plan refers to it."""
    piece = entry.chunks[box]
    return StoredChunk(checkpoint.file(piece), piece, box, entry.dtype)


def output_chunks(
    checkpoint: Checkpoint,
    weight: str,
    box: Box,
    pieces: Mapping[str, Sequence[Piece]],
    copies: Mapping[str, Sequence[tuple[Piece, ...]]],
) -> list[OutputChunk]:
    """The chunks of all states of one chunk of a weight.

    Args:
        weight: its FQN
        box: the chunk, one of the weight's own
        pieces, copies: by state, such as ``exp_avg``; see ``OutputChunk``
    """
    proof = stored_chunk(checkpoint, checkpoint.weights[weight], box)
    return [
        OutputChunk(
            key=state_key(state, weight),
            box=box,
            dtype=torch.float32,
            stored=(),
            pieces=tuple(pieces[state]),
            weight=proof if state == PARAM else None,
            copies=tuple(copies.get(state, ())),
        )
        for state in pieces
    ]


def make_plan(checkpoint: Checkpoint, optimizer: OptimizerPlan, world_size: int) -> ConversionPlan:
    """The plan of the whole output, shared out over ranks by size, largest first."""
    plan = ConversionPlan(
        config=checkpoint.config,
        reshaped={
            key: data for key, data in checkpoint.reshaped.items() if key in checkpoint.copied
        },
        optimizer=optimizer,
    )
    plan.tensors = optimizer.tensors
    for key, entry in checkpoint.copied.items():
        if isinstance(entry, Slice):
            chunks: dict[tuple[int, ...] | None, Slice] = {None: entry}
        else:
            chunks = {box.offsets: piece for box, piece in entry.chunks.items()}
            plan.copied_tensors[key] = OutputTensor(entry.shape, entry.dtype, tuple(entry.chunks))
        plan.byte_entries += [
            BytesJob(key, checkpoint.file(piece), piece, offsets)
            for offsets, piece in chunks.items()
        ]
    plan.shares = _shares(optimizer.chunks, plan.byte_entries, world_size)
    return plan


def _shares(
    chunks: Sequence[OutputChunk], copied: Sequence[BytesJob], world_size: int
) -> list[RankShare]:
    jobs: list[OutputChunk | BytesJob] = [*chunks, *copied]
    sizes = [job.source_bytes for job in chunks] + [job.piece.length for job in copied]
    made: list[list[OutputChunk]] = [[] for _ in range(world_size)]
    taken: list[list[BytesJob]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    for number in sorted(range(len(jobs)), key=lambda number: -sizes[number]):
        job, size = jobs[number], sizes[number]
        load, rank = heapq.heappop(loads)
        heapq.heappush(loads, (load + size, rank))
        if isinstance(job, BytesJob):
            taken[rank].append(job)
        else:
            made[rank].append(job)
    return [RankShare(tuple(m), tuple(t)) for m, t in zip(made, taken, strict=True)]
