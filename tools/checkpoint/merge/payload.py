"""Where the elements of a stored chunk lie, so that they can be read block by block.

DCP stores a chunk as a ``torch.save`` archive: an uncompressed zip at a known place of a
``.distcp`` file. ``locate`` parses its directory and its pickle and proves that the elements lie
there row-major, in the dtype and shape that the metadata says. An archive of any other shape is
read whole through ``torch.load``.
"""

import io
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..common.errors import CheckpointError
from ..common.pickle_scan import refuse_memory_request
from ..common.safe_load import load_torch
from ..common.zip_record import HEADER, payload_start
from .source import Slice

_TAIL = 4096
_STORAGES = {
    'FloatStorage': torch.float32,
    'HalfStorage': torch.float16,
    'BFloat16Storage': torch.bfloat16,
    'DoubleStorage': torch.float64,
}
_END = struct.Struct('<4s4H2LH')
_END64_LOCATOR = struct.Struct('<4sLQL')
_END64 = struct.Struct('<4sQ2H2L4Q')
_ENTRY = struct.Struct('<4s6H3L5H2L')
_USUAL_HEADER = 256  # bytes; torch aligns what follows to 64


class _NotPlain(Exception):
    """The archive isn't one plain contiguous tensor; it has to be loaded as a whole."""


class OpenFiles:
    """Descriptors of the files that one thread reads, the least recently used closed first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: OrderedDict[str, int] = OrderedDict()

    def get(self, path: Path) -> int:
        """An open descriptor, valid until ``limit`` other files have been asked for.

        Raises:
            CheckpointError: the file can't be opened
        """
        name = str(path)
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        while len(self._open) >= self._limit:
            os.close(self._open.popitem(last=False)[1])
        try:
            descriptor = os.open(name, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f'{path}: {error.strerror}') from error
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._open[name] = descriptor
        return descriptor

    def allow(self, count: int) -> None:
        """Let ``count`` files be open at once."""
        self._limit = max(self._limit, count)

    def close(self) -> None:
        """Close all."""
        while self._open:
            os.close(self._open.popitem()[1])


def read_exactly(descriptor: int, buffer: memoryview, offset: int, name: Path) -> None:
    """Fill ``buffer`` from ``offset`` of a file.

    Raises:
        CheckpointError: a read error, or the file ends before
    """
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[done:] if done else buffer], offset + done)
        except OSError as error:
            raise CheckpointError(f'{name}: read error: {error.strerror}') from error
        if count == 0:
            raise CheckpointError(
                f'{name}: ends at {offset + done}, expected data up to {offset + len(buffer)}'
            )
        done += count


def read_bytes(path: Path, piece: Slice) -> bytes:
    """All bytes of one entry.

    Raises:
        CheckpointError: it can't be read
    """
    data = bytearray(piece.length)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f'{path}: {error.strerror}') from error
    try:
        read_exactly(descriptor, memoryview(data), piece.offset, path)
    finally:
        os.close(descriptor)
    return bytes(data)


def load_chunk(
    path: Path, piece: Slice, key: str, dtype: torch.dtype, sizes: Sequence[int]
) -> torch.Tensor:
    """A stored chunk through ``torch.load``; needs memory for all of it.

    Raises:
        CheckpointError: no tensor of that dtype and shape
    """
    loaded = load_torch(io.BytesIO(read_bytes(path, piece)), name=f'{path}: {key}')
    if (
        not isinstance(loaded, torch.Tensor)
        or loaded.dtype != dtype
        or tuple(loaded.shape) != tuple(sizes)
        or loaded.layout != torch.strided
        or loaded.is_meta
    ):
        found = (
            f'{loaded.dtype} of {tuple(loaded.shape)}{_storage(loaded)}'
            if isinstance(loaded, torch.Tensor)
            else type(loaded).__name__
        )
        raise CheckpointError(
            f'{path}: {key}: holds {found}, the metadata says {dtype} of {tuple(sizes)}'
        )
    return loaded


def _storage(tensor: torch.Tensor) -> str:
    if tensor.layout != torch.strided:
        return f' in the layout {str(tensor.layout).removeprefix("torch.")}, not dense'
    return ' without elements (on the meta device)' if tensor.is_meta else ''


def locate(
    descriptor: int, path: Path, piece: Slice, key: str, dtype: torch.dtype, sizes: Sequence[int]
) -> int | None:
    """File offset of a chunk's first element, where its elements lie row-major from there on.

    Returns:
        the offset in bytes, or None where the chunk has to be loaded as a whole

    Raises:
        CheckpointError: the archive holds a tensor of another dtype or shape, or can't be read
    """
    try:
        directory = _directory(descriptor, path, piece)
        names = [name for name in directory if name.endswith(b'/data.pkl')]
        if len(names) != 1:
            raise _NotPlain
        start, length = _record(descriptor, path, piece, directory, names[0])
        data = bytearray(length)
        read_exactly(descriptor, memoryview(data), start, path)
        refuse_memory_request(data)
        tensor = _TensorUnpickler(io.BytesIO(data)).load()
        if not isinstance(tensor, _StoredTensor) or len(tensor.size) != len(tensor.stride):
            raise _NotPlain
        root = names[0].removesuffix(b'data.pkl')
        start, length = _record(
            descriptor, path, piece, directory, root + b'data/' + tensor.storage.encode()
        )
        if _order(descriptor, path, piece, directory, root + b'byteorder') != b'little':
            raise _NotPlain
    except CheckpointError:
        raise
    except (
        _NotPlain,
        KeyError,
        struct.error,
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        IndexError,
        AttributeError,
        OverflowError,
    ):
        return None
    if tensor.dtype != dtype or tensor.size != tuple(sizes):
        raise CheckpointError(
            f'{path}: {key}: holds {tensor.dtype} of {tensor.size}, the metadata says {dtype} of '
            f'{tuple(sizes)}'
        )
    nbytes = dtype.itemsize
    for size in sizes:
        nbytes *= size
    if tensor.offset != 0 or not tensor.row_major or length < nbytes:
        return None
    return start


_Directory = dict[bytes, tuple[int, int]]


def _directory(descriptor: int, path: Path, piece: Slice) -> _Directory:
    """The zip's central directory: record name to (offset of its local header, size)."""
    tail = bytearray(min(_TAIL, piece.length))
    tail_start = piece.length - len(tail)
    read_exactly(descriptor, memoryview(tail), piece.offset + tail_start, path)
    at = len(tail) - _END.size
    magic, _, _, _, count, size, start, comment = _END.unpack_from(tail, at)
    if magic != b'PK\x05\x06' or comment:
        raise _NotPlain
    if start == 0xFFFFFFFF or size == 0xFFFFFFFF or count == 0xFFFF:
        magic, _, where, _ = _END64_LOCATOR.unpack_from(tail, at - _END64_LOCATOR.size)
        fields = _END64.unpack_from(tail, where - tail_start)
        if magic != b'PK\x06\x07' or fields[0] != b'PK\x06\x06' or where < tail_start:
            raise _NotPlain
        count, size, start = fields[7], fields[8], fields[9]
    if start + size > piece.length:
        raise _NotPlain
    if start < tail_start:
        tail, tail_start = bytearray(size), start
        read_exactly(descriptor, memoryview(tail), piece.offset + start, path)
    directory: _Directory = {}
    at = start - tail_start
    for _ in range(count):
        fields = _ENTRY.unpack_from(tail, at)
        magic, method, packed, full = fields[0], fields[4], fields[8], fields[9]
        name_size, extra_size, comment_size, header = *fields[10:13], fields[16]
        at += _ENTRY.size
        name = bytes(tail[at : at + name_size])
        if magic != b'PK\x01\x02' or method != 0:
            raise _NotPlain
        full, packed, header = _wide(
            bytes(tail[at + name_size : at + name_size + extra_size]), full, packed, header
        )
        if full != packed:
            raise _NotPlain
        directory[name] = header, full
        at += name_size + extra_size + comment_size
    return directory


def _wide(extra: bytes, *values: int) -> list[int]:
    """Replace the fields of a directory entry that are kept in its zip64 extra field."""
    at, wide = 0, b''
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from('<HH', extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + size]
        at += 4 + size
    result = []
    for value in values:
        if value == 0xFFFFFFFF:
            value, wide = struct.unpack_from('<Q', wide)[0], wide[8:]
        result.append(value)
    return result


def _record(
    descriptor: int, path: Path, piece: Slice, directory: _Directory, name: bytes
) -> tuple[int, int]:
    """File offset and size of a record's bytes, from its local header."""
    header_at, size = directory[name]
    room = piece.length - header_at
    if room < HEADER.size:
        raise _NotPlain
    header = bytearray(min(room, _USUAL_HEADER))
    read_exactly(descriptor, memoryview(header), piece.offset + header_at, path)
    fields = HEADER.unpack_from(header)
    if fields[0] != b'PK\x03\x04' or fields[3] != 0:
        raise _NotPlain
    needed = HEADER.size + fields[9] + fields[10]
    if len(header) < needed <= room:
        header = bytearray(needed)
        read_exactly(descriptor, memoryview(header), piece.offset + header_at, path)
    start = payload_start(header, name)
    if start is None:
        raise CheckpointError(
            f'{path}: the archive at {piece.offset}: the header of {name.decode(errors="replace")} '
            "doesn't fit the archive's directory; the file is damaged"
        )
    if header_at + start + size > piece.length:
        raise _NotPlain
    return piece.offset + header_at + start, size


def _order(descriptor: int, path: Path, piece: Slice, directory: _Directory, name: bytes) -> bytes:
    if name not in directory:  # archives from before torch 2.1 don't say
        return b'little'
    start, size = _record(descriptor, path, piece, directory, name)
    data = bytearray(size)
    read_exactly(descriptor, memoryview(data), start, path)
    return bytes(data)


class _StoredTensor:
    """The arguments that a tensor would be rebuilt from."""

    def __init__(
        self,
        storage: tuple[Any, ...],
        offset: int,
        size: Sequence[int],
        stride: Sequence[int],
        requires_grad: object = None,
        hooks: object = None,
        flags: object = None,
    ) -> None:
        if flags:  # negated or conjugated when looked at
            raise _NotPlain
        _, self.dtype, self.storage, _, _ = storage
        self.offset = offset
        self.size = tuple(size)
        self.stride = tuple(stride)

    @property
    def row_major(self) -> bool:
        """Whether the elements lie one after the other in index order."""
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= max(size, 1)
        return True


class _TensorUnpickler(pickle.Unpickler):
    """Reads the pickle of one tensor without building it."""

    def persistent_load(self, pid: Any) -> Any:
        """The storage: kind, dtype, record name, device, elements."""
        return pid

    def find_class(self, module: str, name: str) -> object:
        """Stand-ins for what a plain tensor's pickle names; nothing else is admitted."""
        if (module, name) == ('torch._utils', '_rebuild_tensor_v2'):
            # a function of this pickle's own: what it sets on it goes with it
            return lambda *arguments: _StoredTensor(*arguments)
        if (module, name) == ('collections', 'OrderedDict'):
            return dict
        if module == 'torch' and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f'{module}.{name}')
