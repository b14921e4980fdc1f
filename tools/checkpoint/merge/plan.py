"""The plan of a merge, as data: what each output chunk is made of, and which rank makes it."""

import fnmatch
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ..common.errors import CheckpointError
from .geometry import Box, apart
from .payload import read_bytes
from .request import SAVE_DTYPES
from .source import Content, Slice, Source, StoredChunk, TensorEntry, stored_chunk


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """One output chunk.

    Attributes:
        key: FQN of the tensor
        box: the chunk in the global tensor
        dtype: of the output
        stored: by source, the stored chunks that hold its elements: one whose box is ``box``, or
            several, in any position, where layouts differ
    """

    key: str
    box: Box
    dtype: torch.dtype
    stored: tuple[tuple[StoredChunk, ...], ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        return self.box.offsets

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize

    @property
    def places(self) -> Iterable[tuple[Path, Slice]]:
        return ((part.path, part.piece) for stored in self.stored for part in stored)

    @property
    def source_bytes(self) -> int:
        """Bytes of all sources' elements that go into it."""
        return sum(self.box.numel * stored[0].dtype.itemsize for stored in self.stored)


@dataclass(frozen=True, slots=True)
class BytesJob:
    """Bytes of an entry that are copied from a checkpoint as they are.

    Attributes:
        offsets: where the chunk begins, of one that is stored as a tensor
    """

    key: str
    path: Path
    piece: Slice
    offsets: tuple[int, ...] | None = None

    @property
    def places(self) -> tuple[tuple[Path, Slice], ...]:
        return ((self.path, self.piece),)

    @property
    def length(self) -> int:
        return self.piece.length

    def read(self) -> bytes:
        return read_bytes(self.path, self.piece)


@dataclass(frozen=True, slots=True)
class MadeBytes:
    """Bytes of an entry that no checkpoint has."""

    offsets: ClassVar[None] = None
    places: ClassVar[tuple[()]] = ()

    key: str
    content: bytes

    @property
    def length(self) -> int:
        return len(self.content)

    def read(self) -> bytes:
        return self.content


Entry = ChunkJob | BytesJob | MadeBytes


def index_of(entry: Entry) -> MetadataIndex:
    """What the metadata calls it."""
    return MetadataIndex(entry.key, entry.offsets)


@dataclass(frozen=True)
class RankShare:
    """What one rank makes: its output chunks and byte entries."""

    chunks: tuple[ChunkJob, ...]
    byte_entries: tuple[BytesJob | MadeBytes, ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of it; what is written of it goes by this order."""
        return (*self.chunks, *self.byte_entries)

    @property
    def source_bytes(self) -> int:
        """Bytes this rank reads."""
        return sum(job.source_bytes for job in self.chunks) + sum(
            job.length for job in self.byte_entries
        )


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the output: global shape, dtype, and its chunks in the first source's order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


@dataclass
class MergePlan:
    """Everything that is written, and by whom.

    Attributes:
        tensors: output tensors by FQN
        byte_entries: what is copied as it is stored, and what a conversion makes
        copied_tensors: those of its keys that are tensors
        shares: one for each rank
        narrowed: FQN of the fp32 tensors that the save dtype narrows
        config: ``metadata.json`` of the output, as the first source has it
        common_state: of the output; None where there is none to write
        reshaped: core's record of tensors stored under another global shape, carried over
    """

    tensors: dict[str, OutputTensor] = field(default_factory=dict)
    byte_entries: list[BytesJob | MadeBytes] = field(default_factory=list)
    copied_tensors: dict[str, OutputTensor] = field(default_factory=dict)
    shares: list[RankShare] = field(default_factory=list)
    narrowed: list[str] = field(default_factory=list)
    config: dict[str, object] = field(default_factory=dict)
    common_state: dict[str, Any] | None = None
    reshaped: dict[str, object] = field(default_factory=dict)

    def copy(self, key: str, entry: Slice | TensorEntry, content: Content) -> None:
        """Take over an entry of a checkpoint as it is stored."""
        if isinstance(entry, Slice):
            chunks: dict[tuple[int, ...] | None, Slice] = {None: entry}
        else:
            chunks = {box.offsets: piece for box, piece in entry.chunks.items()}
            self.copied_tensors[key] = _output_tensor(entry, entry.dtype)
        self.byte_entries += [
            BytesJob(key, content.file(piece.file), piece, offsets)
            for offsets, piece in chunks.items()
        ]

    @property
    def output_bytes(self) -> int:
        return sum(job.nbytes for share in self.shares for job in share.chunks)


def output_dtypes(
    tensors: dict[str, TensorEntry], save_dtype: str, keep_fp32: Sequence[str] = ()
) -> dict[str, torch.dtype]:
    """Dtype of each output tensor.

    Args:
        tensors: of the first source
        save_dtype: one of ``SAVE_DTYPES``
        keep_fp32: shell-style patterns of fp32 tensors that an explicit dtype doesn't narrow

    Raises:
        CheckpointError: unknown dtype, or a pattern that matches no fp32 tensor
    """
    if save_dtype not in SAVE_DTYPES:
        raise CheckpointError(f'save dtype {save_dtype!r}: expected {", ".join(SAVE_DTYPES)}')
    target = None if save_dtype == 'same' else getattr(torch, save_dtype)
    if keep_fp32 and target in (None, torch.float32):
        raise CheckpointError(
            f'--keep-fp32 has no effect with --merge-save-dtype {save_dtype}; drop one of the two'
        )
    full = [key for key, entry in tensors.items() if entry.dtype == torch.float32]
    kept: set[str] = set()
    for pattern in keep_fp32:
        matched = fnmatch.filter(full, pattern)
        if not matched:
            raise CheckpointError(
                f'--keep-fp32 {pattern!r}: matches none of {len(full)} fp32 '
                'tensors; patterns are shell-style and match whole names'
            )
        kept.update(matched)
    return {
        key: entry.dtype if target is None or key in kept else target
        for key, entry in tensors.items()
    }


def make_plan(
    sources: Sequence[Source],
    extra_states: Source,
    *,
    world_size: int = 1,
    save_dtype: str = 'same',
    keep_fp32: Sequence[str] = (),
    balance: bool = False,
) -> MergePlan:
    """Plan the merge of sources that ``validate_sources`` found to agree.

    Args:
        sources: in merge order; the output takes the first one's layout
        extra_states: the source whose ``_extra_state`` entries are copied
        world_size: number of ranks
        save_dtype, keep_fp32: see ``output_dtypes``
        balance: give chunks to ranks by size, largest first, instead of in turn
    """
    first = sources[0]
    dtypes = output_dtypes(first.tensors, save_dtype, keep_fp32)
    plan = MergePlan(config=first.config, reshaped=first.reshaped)
    jobs: list[ChunkJob] = []
    for key, entry in first.tensors.items():
        plan.tensors[key] = _output_tensor(entry, dtypes[key])
        stored = [_stored(source, key, entry) for source in sources]
        jobs.extend(
            ChunkJob(key, box, dtypes[key], tuple(of_source[box] for of_source in stored))
            for box in entry.chunks
        )
        if entry.dtype == torch.float32 and dtypes[key] != torch.float32:
            plan.narrowed.append(key)
    for key, copied in extra_states.extra_states.items():
        plan.copy(key, copied, extra_states)
    shares = (
        balanced(jobs, [job.source_bytes for job in jobs], world_size)
        if balance
        else [jobs[rank::world_size] for rank in range(world_size)]
    )
    plan.shares = [
        RankShare(tuple(share), tuple(plan.byte_entries[rank::world_size]))
        for rank, share in enumerate(shares)
    ]
    return plan


def _output_tensor(entry: TensorEntry, dtype: torch.dtype) -> OutputTensor:
    return OutputTensor(entry.shape, dtype, tuple(entry.chunks))


def _stored(source: Source, key: str, output: TensorEntry) -> dict[Box, tuple[StoredChunk, ...]]:
    """For each chunk of the output the chunks of one source that hold its elements."""
    entry = source.tensors[key]
    chunk = partial(stored_chunk, source, entry)
    found: dict[Box, tuple[StoredChunk, ...]] = {
        box: (chunk(box),) for box in output.chunks if box in entry.chunks
    }
    others = [box for box in output.chunks if box not in found]
    found |= {box: (chunk(next(iter(entry.chunks))),) for box in others if not box.numel}
    for group in apart([box for box in (*others, *entry.chunks) if box.numel] if others else []):
        parts = [box for box in group if box in entry.chunks]
        for box in group:
            if box not in entry.chunks:
                found[box] = tuple(chunk(part) for part in parts if box.intersection(part))
    return found


def balanced[T](jobs: Sequence[T], sizes: Sequence[int], world_size: int) -> list[list[T]]:
    """Greedy bin packing: each job, largest first, to the rank with the least so far."""
    shares: list[list[T]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    for number in sorted(range(len(jobs)), key=lambda number: -sizes[number]):
        load, rank = heapq.heappop(loads)
        shares[rank].append(jobs[number])
        heapq.heappush(loads, (load + sizes[number], rank))
    return shares
