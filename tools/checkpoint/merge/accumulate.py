"""The arithmetic: one output chunk from its stored chunks, block by block in fp32.

For every element, in input order: ``acc = w0 * x0``, then ``acc.add_(x.float(), alpha=w)``, then
one cast. Elements don't meet each other, so the result is the same for any block size.
"""

import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch

from ..common.errors import CheckpointError
from ..common.tensors import dtype_name
from .geometry import Box, runs
from .payload import OpenFiles, SmallArchives, load_chunk, locate, read_exactly
from .plan import ChunkJob
from .source import StoredChunk

BLOCK_ELEMENTS = 1 << 18  # small enough for the caches, large enough for few calls
SMALL_ARCHIVE = 256 << 10  # bytes; up to here one is read whole, in one go
READ_AHEAD = 4 << 20  # bytes of each source asked for while the ones before are worked on
# a cast to these makes their largest value of all that is larger; what is rounded to it
_SATURATING = {torch.float8_e4m3fn: 464.0}


class Stopped(Exception):
    """Another thread or rank failed; this one's work is void."""


class ChunkMerger:
    """Merges output chunks with the buffers of one thread.

    Args:
        weights: one for each source, rounded to fp32 once
        allow_nonfinite: let inputs be infinite or NaN
        stop: ends the work at the next block when set

    Attributes:
        read_seconds, math_seconds: where the time went
        bytes_read: bytes of stored elements read
        nonfinite: (source, key) to the number of its elements that aren't finite
    """

    def __init__(
        self,
        weights: Sequence[float],
        *,
        allow_nonfinite: bool = False,
        stop: threading.Event | None = None,
    ) -> None:
        self._weights = torch.tensor(weights, dtype=torch.float32, device='cpu').tolist()
        self._block = BLOCK_ELEMENTS
        self._allow_nonfinite = allow_nonfinite
        self._stop = stop or threading.Event()
        self._files = OpenFiles()
        self._accumulator = torch.empty(BLOCK_ELEMENTS, dtype=torch.float32, device='cpu')
        self._scratch = torch.empty_like(self._accumulator)
        self._raw = _RawBuffer(BLOCK_ELEMENTS)
        self._small = SmallArchives()
        self.read_seconds = 0.0
        self.math_seconds = 0.0
        self.bytes_read = 0
        self.nonfinite: Counter[tuple[Path, str]] = Counter()

    def close(self) -> None:
        self._files.close()

    def merge(self, job: ChunkJob, out: torch.Tensor) -> None:
        """Compute one output chunk.

        Args:
            out: 1-D, ``job.box.numel`` elements of ``job.dtype``

        Raises:
            CheckpointError: a read error, a chunk that isn't what the metadata says, a value that
                isn't finite; names file and key
            Stopped: ``stop`` was set
        """
        begin, reading = perf_counter(), self.read_seconds
        self._files.allow(sum(map(len, job.stored)))
        readers = [self._reader(job, source) for source in range(len(job.stored))]
        numel = job.box.numel
        by_block = all(reader.by_block for reader in readers)
        block = self._block if by_block else max(numel, 1)
        for start in range(0, numel, block):
            if self._stop.is_set():
                raise Stopped
            target = out[start : start + block]
            self._merge_block(job, readers, start, target)
        self.math_seconds += perf_counter() - begin - (self.read_seconds - reading)

    def _merge_block(
        self, job: ChunkJob, readers: Sequence['_Reader'], start: int, target: torch.Tensor
    ) -> None:
        count = target.numel()
        if target.dtype == torch.float32:
            accumulator = target
        else:
            accumulator = _sized(self._accumulator, count)
        for reader, weight in zip(readers, self._weights, strict=True):
            values = self._read(reader, start, count)
            if reader is readers[0]:
                accumulator.copy_(values).mul_(weight)
            elif values.dtype == torch.float32:
                accumulator.add_(values, alpha=weight)
            else:
                widened = _sized(self._scratch, count).copy_(values)
                accumulator.add_(widened, alpha=weight)
        if accumulator is not target:
            target.copy_(accumulator)
        # A finite sum of squares below the square of the dtype's limit proves every element
        # finite and its cast too; only where it proves nothing are the elements looked at.
        limit = torch.finfo(target.dtype).max
        if not torch.dot(accumulator, accumulator).item() < min(limit * limit, 1e37):
            self._check(job, readers, start, accumulator, target)

    def _read(self, reader: '_Reader', start: int, count: int) -> torch.Tensor:
        begin = perf_counter()
        values = reader.read(start, count)
        self.read_seconds += perf_counter() - begin
        self.bytes_read += values.nbytes
        return values

    def _check(
        self,
        job: ChunkJob,
        readers: Sequence['_Reader'],
        start: int,
        accumulator: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        """Tell values that aren't finite by their cause: the inputs, or the merge."""
        wrong = ~_finite(target)
        if target.dtype in _SATURATING:
            wrong |= ~(accumulator.abs() <= _SATURATING[target.dtype])
        if not wrong.any():
            return
        too_large: Path | None = None  # the source of a double that fp32 can't hold
        for reader, stored in zip(readers, job.stored, strict=True):
            values = reader.read(start, target.numel())
            bad = ~_finite(values)
            wrong &= ~bad
            if (wrong & ~torch.isfinite(values.float())).any():
                too_large = too_large or stored[0].path
            if bad.any():
                path = stored[0].path
                self.nonfinite[(path.parent, job.key)] += int(bad.sum())
                if not self._allow_nonfinite:
                    raise CheckpointError(
                        f'{path}: {job.key}: {int(bad.sum())} values in one block are not finite; '
                        'pass --allow-nonfinite to merge them nevertheless'
                    )
        if wrong.any():
            first = int(wrong.nonzero()[0])
            reason = (
                _cast_overflow(target.dtype, accumulator[first].item())
                if accumulator[first].isfinite()
                else _sum_overflow(too_large)
            )
            raise CheckpointError(
                f'{job.key}: the merged value of element {start + first} of the chunk at '
                f'{job.box.offsets} is not finite although its inputs are: {reason}'
            )

    def _reader(self, job: ChunkJob, source: int) -> '_Reader':
        stored = job.stored[source]
        if len(stored) == 1 and stored[0].box == job.box:
            return self._chunk_reader(job.key, stored[0], source)
        parts = [(part.box, self._chunk_reader(job.key, part, source)) for part in stored]
        return _AssemblingReader(job.box, stored[0].dtype, parts)

    def _chunk_reader(self, key: str, stored: StoredChunk, source: int) -> '_Reader':
        descriptor, piece = self._files.get(stored.path), stored.piece
        if piece.length <= SMALL_ARCHIVE and stored.box.numel:
            begin = perf_counter()
            content = bytearray(piece.length)
            read_exactly(descriptor, memoryview(content), piece.offset, stored.path)
            self.read_seconds += perf_counter() - begin
            start = self._small.locate(content, source, stored, key)
            if start is not None:
                return _ReadReader(content, stored.dtype, stored.box.numel, start)
        else:
            offset = locate(descriptor, stored, key)
            if offset is not None:
                return _PlainReader(descriptor, stored, offset, self._raw)
        return _WholeReader(key, stored)


def _finite(values: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(values.float() if values.dtype.itemsize == 1 else values)  # of float8


def _sum_overflow(too_large: Path | None) -> str:
    if too_large is not None:
        return (
            f'{too_large} holds float64 values beyond fp32, in which sums are computed; no '
            '--merge-save-dtype merges them'
        )
    return 'the sum leaves the range of fp32, in which it is computed (3.4e38); use smaller weights'


def _cast_overflow(dtype: torch.dtype, value: float) -> str:
    wider = 'float32' if dtype == torch.bfloat16 else 'bfloat16 or float32'
    return (
        f'{value:.6g} is beyond {dtype_name(dtype)} ({torch.finfo(dtype).max:.6g}); use '
        f'--merge-save-dtype {wider}, or smaller weights'
    )


class _RawBuffer:
    """Memory for one block as it is stored, seen as bytes and as elements of each dtype."""

    def __init__(self, elements: int) -> None:
        self._memory = torch.empty(elements, dtype=torch.float64, device='cpu').view(torch.uint8)
        self.bytes = memoryview(self._memory.numpy())
        self._views: dict[torch.dtype, torch.Tensor] = {}

    def elements(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        if dtype not in self._views:
            self._views[dtype] = self._memory.view(dtype)
        return self._views[dtype][:count]


class _Reader:
    """Elements of one source's chunk, by position in it.

    Attributes:
        by_block: whether reading a block costs no more than a block
    """

    by_block = True

    def read(self, start: int, count: int) -> torch.Tensor:
        """``count`` elements from ``start`` on, 1-D, valid until the next call of any reader."""
        raise NotImplementedError


class _ReadReader(_Reader):
    """Elements of an archive that is in memory."""

    def __init__(self, content: bytearray, dtype: torch.dtype, numel: int, start: int) -> None:
        self._elements = torch.frombuffer(content, dtype=dtype, count=numel, offset=start)

    def read(self, start: int, count: int) -> torch.Tensor:
        return self._elements[start : start + count]


class _PlainReader(_Reader):
    """Reads elements at their place in the file into a buffer."""

    def __init__(
        self, descriptor: int, stored: StoredChunk, offset: int, buffer: _RawBuffer
    ) -> None:
        self._descriptor = descriptor
        self._path = stored.path
        self._offset = offset
        self._dtype = stored.dtype
        self._itemsize = stored.dtype.itemsize
        self._end = offset + stored.box.numel * self._itemsize
        self._asked = offset
        self._buffer = buffer

    def read(self, start: int, count: int) -> torch.Tensor:
        self.read_into(self._buffer.bytes[: count * self._itemsize], start)
        return self._buffer.elements(self._dtype, count)

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill ``target`` from element ``start`` on."""
        at = self._offset + start * self._itemsize
        if at + READ_AHEAD > self._asked < self._end:
            ahead = min(self._end - self._asked, 2 * READ_AHEAD)
            os.posix_fadvise(self._descriptor, self._asked, ahead, os.POSIX_FADV_WILLNEED)
            self._asked += ahead
        read_exactly(self._descriptor, target, at, self._path)


class _WholeReader(_Reader):
    """Loads the chunk anew for each block; merged with one block for the whole chunk."""

    by_block = False

    def __init__(self, key: str, stored: StoredChunk) -> None:
        self._key = key
        self._stored = stored

    def read(self, start: int, count: int) -> torch.Tensor:
        chunk = load_chunk(self._stored, self._key)
        return chunk.contiguous().view(-1)[start : start + count]


class _AssemblingReader(_Reader):
    """Puts a chunk together from the parts of others, where layouts differ."""

    by_block = False

    def __init__(self, box: Box, dtype: torch.dtype, parts: Sequence[tuple[Box, _Reader]]) -> None:
        self._box = box
        self._dtype = dtype
        self._parts = parts

    def read(self, start: int, count: int) -> torch.Tensor:
        itemsize = self._dtype.itemsize
        raw = torch.empty(self._box.numel * itemsize, dtype=torch.uint8, device='cpu')
        view = memoryview(raw.numpy())
        for box, reader in self._parts:
            shared = self._box.intersection(box)
            assert shared is not None
            whole = None if isinstance(reader, _PlainReader) else reader.read(0, box.numel)
            for target, origin, length in runs(shared, self._box, box):
                piece = slice(target * itemsize, (target + length) * itemsize)
                if whole is None:
                    reader.read_into(view[piece], origin)  # type: ignore[attr-defined]
                else:
                    raw[piece].copy_(whole[origin : origin + length].view(torch.uint8))
        return raw.view(self._dtype)[start : start + count]


def _sized(buffer: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` elements of a buffer, or a new one where it is too small."""
    if count <= buffer.numel():
        return buffer if count == buffer.numel() else buffer[:count]
    return torch.empty(count, dtype=buffer.dtype, device=buffer.device)
