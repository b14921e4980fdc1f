"""The plan of a conversion, as data: which stored elements make which part of the output.

A format's module (see ``prepare``) yields an ``OptimizerPlan``; ``make_plan`` adds what is copied
and shares the work out. Both are made from metadata and small objects, before a tensor is read.

An example: saved by two data-parallel ranks, ``optimizer.state.exp_avg.output_layer.weight`` may be
one chunk of two pieces: the parameter crosses the end of the first rank's share of its bucket.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import PARAM, state_key
from megatron_overlay.standalone.dist_checkpointing.format_names import (
    FULLY_RESHARDABLE,
    TORCH_DIST,
)

from ..merge.common_state import CommonState
from ..merge.geometry import Box
from ..merge.plan import ChunkJob, MadeBytes, MergePlan, OutputTensor, RankShare, balanced
from ..merge.source import Slice, StoredChunk, stored_chunk
from .checkpoint import Checkpoint


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
        return self.count * self.stored.dtype.itemsize


@dataclass(frozen=True, slots=True)
class OutputChunk(ChunkJob):
    """One chunk of the output's optimizer state.

    Attributes:
        pieces: fill the chunk, each element once
        proof: of a main parameter, what fills the same box of its weight: the pieces are in their
            place if they are that, cast
        copies: the same elements as other model-parallel ranks store them, where a parameter is
            replicated; never written, and proven as well
        fill: a number that is all of the chunk, which then has no pieces
    """

    pieces: tuple[Piece, ...] = ()
    proof: tuple[Piece, ...] = ()
    copies: tuple[tuple[Piece, ...], ...] = ()
    fill: float | None = None

    @property
    def places(self) -> Iterator[tuple[Path, Slice]]:
        for group in (self.pieces, *self.copies, self.proof):
            yield from ((piece.stored.path, piece.stored.piece) for piece in group)

    @property
    def source_bytes(self) -> int:
        """Bytes that are read for it, but for the proof."""
        return sum(piece.nbytes for group in (self.pieces, *self.copies) for piece in group)


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
        made: other entries of the output that the input doesn't have
        format: of the output
        notes: what the user should know
    """

    tensors: dict[str, OutputTensor]
    chunks: list[OutputChunk]
    settings: list[dict[str, Any]]
    positions: list[Position] = field(default_factory=list)
    padding: int = 0
    without_state: list[str] = field(default_factory=list)
    made: list[MadeBytes] = field(default_factory=list)
    format: str = TORCH_DIST
    notes: list[str] = field(default_factory=list)


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
    stored = stored_chunk(checkpoint, checkpoint.weights[weight], box)
    proof = Piece(stored, weight, 0, box.numel, 0)
    return [
        OutputChunk(
            key=state_key(state, weight),
            box=box,
            dtype=torch.float32,
            stored=(),
            pieces=tuple(pieces[state]),
            proof=(proof,) if state == PARAM else (),
            copies=tuple(copies.get(state, ())),
        )
        for state in pieces
    ]


def make_plan(checkpoint: Checkpoint, optimizer: OptimizerPlan, world_size: int) -> MergePlan:
    """The plan of the whole output, shared out over ranks by size, largest first.

    Converted state is in its ``tensors``, what is copied in its ``byte_entries``. There is no
    common state where objects of their own keep it.
    """
    plan = MergePlan(tensors=optimizer.tensors, byte_entries=[*optimizer.made])
    if optimizer.format == TORCH_DIST:
        plan.config = checkpoint.config
        plan.common_state = _converted_common_state(checkpoint.common, optimizer.settings)
        plan.reshaped = {
            key: data for key, data in checkpoint.reshaped.items() if key in checkpoint.copied
        }
        for key, entry in checkpoint.copied.items():
            plan.copy(key, entry, checkpoint)
    jobs = [*optimizer.chunks, *plan.byte_entries]
    sizes = [job.source_bytes for job in optimizer.chunks]
    sizes += [job.length for job in plan.byte_entries]
    plan.shares = [
        RankShare(
            tuple(job for job in share if isinstance(job, OutputChunk)),
            tuple(job for job in share if not isinstance(job, OutputChunk)),
        )
        for share in balanced(jobs, sizes, world_size)
    ]
    return plan


def _converted_common_state(
    common: CommonState, settings: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What a run that had saved ``fully_reshardable`` would have stored."""
    optimizers = [
        {**setting, 'param_state_sharding_type': FULLY_RESHARDABLE} for setting in settings
    ]
    content = {
        'distrib_optim_sharding_type': FULLY_RESHARDABLE,
        'distrib_optim_fully_reshardable_mem_efficient': False,
        'chained_optim_avoid_prefix': True,
    }
    stored = common.state.get('content_metadata')
    if isinstance(stored, Mapping):
        content = {**stored, **content}
    state = {**common.state, 'content_metadata': content}
    if optimizers:
        state['optimizer'] = optimizers[0] if len(optimizers) == 1 else dict(enumerate(optimizers))
    return state
