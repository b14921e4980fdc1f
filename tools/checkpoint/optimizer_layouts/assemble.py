"""Makes output chunks from their pieces, one at a time in the memory of a writer's thread.

A main parameter, cast to its weight's dtype, has to be the weight, bit for bit: where it isn't, the
pieces are not what the plan takes them for, or the checkpoint is damaged, and the work ends.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from ..common.errors import CheckpointError
from ..common.tensors import as_bits
from ..merge.accumulate import BLOCK_ELEMENTS, Stopped
from ..merge.payload import OpenFiles, load_chunk, locate, read_exactly
from ..merge.plan import ChunkJob
from ..merge.source import StoredChunk
from .plan import OutputChunk, Piece


class NotItsWeightError(CheckpointError):
    """A main parameter, cast, isn't the weight that it is taken for."""


class Assembler:
    """Fills output chunks with the buffers of one thread.

    Args:
        stop: ends the work at the next piece when set

    Attributes:
        read_seconds, math_seconds: where the time went
        bytes_read: bytes of stored elements read
        proven: elements of main parameters, copies among them, that are their weight's
        different_copies: FQN to the number of replicated elements that other ranks store otherwise
    """

    def __init__(self, stop: threading.Event | None = None) -> None:
        self._stop = stop or threading.Event()
        self._files = OpenFiles()
        self._block = torch.empty(4 * BLOCK_ELEMENTS, dtype=torch.uint8, device='cpu')
        self._other = torch.empty_like(self._block)
        self.read_seconds = 0.0
        self.math_seconds = 0.0
        self.bytes_read = 0
        self.proven = 0
        self.different_copies: dict[str, int] = {}

    def close(self) -> None:
        self._files.close()

    def merge(self, job: ChunkJob, out: torch.Tensor) -> None:
        """Fill ``out``, of the chunk's dtype and number of elements, and prove it.

        Raises:
            CheckpointError: a file can't be read, or a main parameter isn't its weight
            Stopped: another thread or rank failed
        """
        assert isinstance(job, OutputChunk)
        if job.fill is not None:
            out.fill_(job.fill)
        for piece in job.pieces:
            self._read_into(out[piece.at : piece.at + piece.count], piece)
        if job.proof:
            self._prove(job, job.pieces, out, 0)
            self.proven += out.numel()
        for copy in job.copies:
            self._compare(job, copy, out)

    def read(self, stored: StoredChunk, key: str, start: int, count: int) -> torch.Tensor:
        """Elements of a stored chunk, as they are stored."""
        values = torch.empty(count, dtype=stored.dtype, device='cpu')
        self._read(self._open(stored, key), start, values)
        return values

    def is_weight(self, job: OutputChunk) -> bool:
        """Whether a main parameter's pieces are its weight."""
        try:
            self.merge(job, torch.empty(job.box.numel, dtype=job.dtype, device='cpu'))
        except NotItsWeightError:
            return False
        return True

    def _read_into(self, out: torch.Tensor, piece: Piece) -> None:
        source, dtype = self._open(piece.stored, piece.key), piece.stored.dtype
        if dtype == out.dtype:
            self._read(source, piece.start, out)
            return
        for start in range(0, piece.count, BLOCK_ELEMENTS):
            part = out[start : start + BLOCK_ELEMENTS]
            values = _view(self._block, dtype, part.numel())
            self._read(source, piece.start + start, values)
            part.copy_(values)

    def _prove(
        self, job: OutputChunk, pieces: Sequence[Piece], main: torch.Tensor, begin: int
    ) -> None:
        """Compare elements of a main parameter, which ``pieces`` store, with its weight.

        Args:
            main: those from element ``begin`` of the chunk on
        """
        for start in range(0, main.numel(), BLOCK_ELEMENTS):
            values = main[start : start + BLOCK_ELEMENTS]
            stored = self._weight(job, begin + start, values.numel())
            started = perf_counter()
            same = as_bits(values.to(stored.dtype)) == as_bits(stored)
            if not same.all():
                at = int((~same).nonzero()[0])
                raise NotItsWeightError(
                    _mismatch(job, pieces, begin + start + at, float(values[at]), float(stored[at]))
                )
            self.math_seconds += perf_counter() - started

    def _weight(self, job: OutputChunk, start: int, count: int) -> torch.Tensor:
        """These elements of the weight that a main parameter's chunk is cast to."""
        stored = _view(self._block, job.proof[0].stored.dtype, count)
        for piece in job.proof:
            first, end = max(start, piece.at), min(start + count, piece.at + piece.count)
            if first < end:
                source = self._open(piece.stored, piece.key)
                self._read(
                    source, piece.start + first - piece.at, stored[first - start : end - start]
                )
        return stored

    def _compare(self, job: OutputChunk, copy: Sequence[Piece], out: torch.Tensor) -> None:
        """A replica against what is written; of a main parameter, its weight decides as well."""
        different = 0
        for piece in copy:
            source = self._open(piece.stored, piece.key)
            for start in range(0, piece.count, BLOCK_ELEMENTS):
                count = min(BLOCK_ELEMENTS, piece.count - start)
                stored = _view(self._other, piece.stored.dtype, count)
                self._read(source, piece.start + start, stored)
                values = stored.to(out.dtype)
                at = piece.at + start
                same = as_bits(values) == as_bits(out[at : at + count])
                if same.all():
                    continue
                different += count - int(same.sum())
                if job.proof:
                    self._prove(job, [piece], values, at)
        if job.proof:
            self.proven += out.numel()
        if different:
            self.different_copies[job.key] = self.different_copies.get(job.key, 0) + different

    def _open(self, stored: StoredChunk, key: str) -> '_Opened':
        descriptor = self._files.get(stored.path)
        offset = locate(descriptor, stored, key)
        if offset is not None:
            return _Opened(stored.path, descriptor, offset)
        return _Opened(stored.path, whole=load_chunk(stored, key).contiguous().view(-1))

    def _read(self, opened: '_Opened', start: int, out: torch.Tensor) -> None:
        if self._stop.is_set():
            raise Stopped
        begin = perf_counter()
        if opened.whole is not None:
            out.copy_(opened.whole[start : start + out.numel()])
        else:
            read_exactly(
                opened.descriptor,
                memoryview(out.view(torch.uint8).numpy()),
                opened.offset + start * out.itemsize,
                opened.path,
            )
        self.bytes_read += out.numel() * out.itemsize
        self.read_seconds += perf_counter() - begin


@dataclass(frozen=True)
class _Opened:
    """A stored chunk's elements: at an offset of an open file, or loaded as a whole."""

    path: Path
    descriptor: int = -1
    offset: int = 0
    whole: torch.Tensor | None = None


def _view(memory: torch.Tensor, dtype: torch.dtype, count: int) -> torch.Tensor:
    return memory[: count * dtype.itemsize].view(dtype)


def _mismatch(
    job: OutputChunk, pieces: Sequence[Piece], at: int, found: float, weight: float
) -> str:
    """Says which stored element isn't that of the weight: number ``at`` of the chunk."""
    piece, proof = (
        next(piece for piece in of if piece.at <= at < piece.at + piece.count)
        for of in (pieces, job.proof)
    )
    begin = [*piece.stored.box.offsets[:-1], piece.stored.box.offsets[-1] + piece.start]
    return (
        f'{piece.stored.path}: {piece.key} at {begin}: taken '
        f'for {proof.key} at {job.box.offsets}, whose element {at} is '
        f'{weight:.9g} in {proof.stored.path}, but holds {found:.9g}: '
        'these weights and this optimizer state do not belong together, or are damaged; nothing is '
        'published, take another checkpoint'
    )
