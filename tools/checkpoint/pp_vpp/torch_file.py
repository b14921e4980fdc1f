"""Reading and writing ``torch.save`` files so that tensors never pass through memory of their own.

Files are mapped, and new ones are written straight from the mapping. The checksums of the zip
records are those the source was saved with, carried over: a record whose bytes were damaged on the
way no longer fits its checksum.
"""

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch

from ..common.errors import CheckpointError
from ..common.safe_load import load_torch

_LOCAL_HEADER = struct.Struct('<26xHH')
_DIRECTORY_ENTRY = struct.Struct('<16xI8xHHH12x')
_DESCRIPTOR = b'PK\x07\x08'


@dataclass(frozen=True)
class MappedFile:
    """A loaded file.

    Attributes:
        path: where it lies
        state: what it holds; tensors lie in the mapping
        checksums: CRC-32 of each storage by (address, bytes)
    """

    path: Path
    state: dict[str, Any]
    checksums: Mapping[tuple[int, int], int]


def read(path: Path, trust: bool) -> MappedFile:
    """Map a rank file.

    Args:
        path: the file
        trust: load without restriction on classes

    Raises:
        CheckpointError: missing, truncated or garbage; a class that isn't admitted; not a dict
    """
    if path.is_file() and not zipfile.is_zipfile(path):
        raise CheckpointError(
            f'{path}: no zip-based torch.save file, truncated or damaged; a file that torch '
            'before 1.6 wrote must be saved again with a later one'
        )
    state = load_torch(path, trust=trust, mmap=True)
    if not isinstance(state, dict):
        raise CheckpointError(f'{path}: holds {type(state).__name__}, expected a dict')
    return MappedFile(path, state, _checksums(path, state))


def write(
    path: Path,
    state: Any,
    checksums: Mapping[tuple[int, int], int],
    wrote: Callable[[int], object],
) -> None:
    """Save a state whose tensors lie in mapped files.

    Args:
        path: file to make
        state: what to save
        checksums: known CRC-32 of storages by (address, bytes)
        wrote: is told the number of bytes after each write
    """
    with open(path, 'xb', buffering=0) as file:
        sink = _Sink(file, checksums, wrote)
        try:
            torch.save(trimmed(state), sink)
        except RuntimeError:  # torch's own, about the file that an error below cut short
            if sink.error is None:
                raise
            raise sink.error from None
    with open(path, 'r+b') as file:
        _set_checksums(file, sink.checksums)


class _Sink:
    """File for ``torch.save`` that notes the checksum of each record's bytes."""

    def __init__(
        self,
        file: BinaryIO,
        known: Mapping[tuple[int, int], int],
        wrote: Callable[[int], object],
    ) -> None:
        self.file = file
        self.known = known
        self.wrote = wrote
        self.position = 0
        self.error: BaseException | None = None
        self.checksums: dict[tuple[int, int], int] = {}

    def write(self, data: Any) -> int:
        view = memoryview(data).cast('B')
        size = len(view)
        checksum = self.known.get((_address(view), size)) if size else 0
        if checksum is None:
            checksum = zlib.crc32(view)
        self.checksums[self.position, size] = checksum
        self.position += size
        try:
            while view:  # one system call writes at most 2 GiB
                count = self.file.write(view)
                self.wrote(count)
                view = view[count:]
        except BaseException as error:
            self.error = error
            raise
        return size

    def flush(self) -> None:
        """Nothing is held back."""


def _address(view: memoryview) -> int:
    return numpy.frombuffer(view, numpy.uint8).ctypes.data


def _set_checksums(file: BinaryIO, checksums: Mapping[tuple[int, int], int]) -> None:
    """Put the records' checksums where ``torch.save``, told not to compute any, left zeros."""
    with zipfile.ZipFile(file) as archive:
        records, directory = archive.infolist(), archive.start_dir
    for record in records:
        payload = _payload(file, record)
        checksum = struct.pack('<I', checksums[payload, record.file_size])
        file.seek(payload + record.file_size)
        if file.read(4) == _DESCRIPTOR:
            file.write(checksum)
        file.seek(directory)
        _, *lengths = _DIRECTORY_ENTRY.unpack(file.read(_DIRECTORY_ENTRY.size))
        file.seek(directory + 16)
        file.write(checksum)
        directory += _DIRECTORY_ENTRY.size + sum(lengths)


def _payload(file: BinaryIO, record: zipfile.ZipInfo) -> int:
    """Offset of a record's bytes."""
    file.seek(record.header_offset)
    name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return record.header_offset + _LOCAL_HEADER.size + name + extra


def _checksums(path: Path, state: Any) -> dict[tuple[int, int], int]:
    """CRC-32 of each mapped storage by (address, bytes); empty where that can't be told.

    The storages lie in the mapping as their records lie in the file.
    """
    storages = sorted({(s.data_ptr(), s.nbytes()) for s in _storages(state) if s.nbytes()})
    with open(path, 'rb') as file, zipfile.ZipFile(file) as archive:
        records = sorted(
            (_payload(file, record), record.file_size, record.CRC)
            for record in archive.infolist()
            if '/data/' in record.filename and record.file_size
        )
    if not storages or len(storages) != len(records):
        return {}
    base = storages[0][0] - records[0][0]
    if [(at - base, size) for at, size in storages] != [(at, size) for at, size, _ in records]:
        return {}
    return {
        storage: checksum for storage, (_, _, checksum) in zip(storages, records, strict=True)
        if checksum
    }


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def _storages(state: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors(state):
        if tensor.device.type == 'cpu' and tensor.layout == torch.strided:
            yield tensor.untyped_storage()


def trimmed(value: Any) -> Any:
    """The same state with views into larger storages cut down to their own bytes.

    ``torch.save`` writes whole storages; a view that the source shared with tensors of other
    chunks would take those along.
    """
    if isinstance(value, torch.Tensor):
        return _trim(value)
    if type(value) is dict or type(value).__name__ == 'OrderedDict':
        changed = {key: trimmed(item) for key, item in value.items()}
        if all(changed[key] is value[key] for key in value):
            return value
        new = type(value)()
        new.update(changed)
        return new
    if type(value) in (list, tuple):
        items = [trimmed(item) for item in value]
        return value if all(map(_is, items, value)) else type(value)(items)
    return value


def _is(one: Any, other: Any) -> bool:
    return one is other


def _trim(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.device.type != 'cpu':
        return tensor
    storage = tensor.untyped_storage()
    size = tensor.numel() * tensor.element_size()
    if storage.nbytes() == size:
        return tensor
    if not tensor.is_contiguous():
        return tensor.detach().clone()
    start = tensor.storage_offset() * tensor.element_size()
    own = torch.empty(0, dtype=tensor.dtype)
    own.set_(storage[start : start + size], 0, tensor.shape, tensor.stride())
    return own


