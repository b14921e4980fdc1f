"""Reading and writing ``torch.save`` files so that tensors never take memory of their own.

Files are mapped. Where a new file takes over a storage of a mapped one, its bytes are copied from
file to file, which is faster than through the mapping. The checksums of the zip records are those
the source was saved with, carried over: a record whose bytes were damaged on the way no longer fits
its checksum.
"""

import errno
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from operator import is_
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from ..common.checksum import crc32, without_torch_checksums
from ..common.core_classes import WithStandIns
from ..common.errors import CheckpointError, reading
from ..common.safe_load import load_torch
from ..common.tensors import address
from ..common.zip_record import Archive

_BLOCK = 1 << 20  # bytes; stays in the cache between reading and writing


@dataclass(frozen=True)
class Record:
    """Where the bytes of a mapped storage lie.

    Attributes:
        path: the file
        offset: first byte
        checksum: CRC-32; 0 where the file was saved without
    """

    path: Path
    offset: int
    checksum: int


# Records by (address of the storage, bytes).
Records = Mapping[tuple[int, int], Record]


@dataclass(frozen=True)
class MappedFile:
    """A loaded file.

    Attributes:
        path: where it lies
        state: what it holds; tensors lie in the mapping
        records: where each storage lies in the file
    """

    path: Path
    state: dict[str, Any]
    records: Records


def read(path: Path, trust: bool) -> MappedFile:
    """Map a rank file.

    Args:
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
    with reading(path, 'archive that torch.save wrote'):
        records = _records(path, state)
    return MappedFile(path, state, records)


def fingerprint(path: Path) -> tuple[tuple[str, int, int], ...] | None:
    """Name, bytes and checksum of each record: equal for copies of one file.

    Returns:
        None where the file was saved without checksums

    Raises:
        CheckpointError: it can't be read
    """
    with reading(path, 'archive that torch.save wrote'), zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    if not all(record.CRC for record in records if record.file_size):
        return None
    return tuple((record.filename, record.file_size, record.CRC) for record in records)


def write(path: Path, state: Any, records: Records, wrote: Callable[[int], object]) -> None:
    """Save a state whose tensors lie in mapped files, none of them changed since.

    Args:
        wrote: is told the number of bytes after each write

    Raises:
        OSError: the file can't be written, or a source no longer be read
    """
    with (
        open(path, 'xb', buffering=0) as file,
        closing(_Sink(file, records, wrote)) as sink,
        without_torch_checksums(),
    ):
        try:
            torch.save(trimmed(state), cast(IO[bytes], sink), pickle_module=WithStandIns)
        except RuntimeError:  # torch's own, about the file that an error below cut short
            if sink.error is None:
                raise
            raise sink.error from None
    _set_checksums(path, sink.checksums)


class _Sink:
    """File for ``torch.save`` that copies what lies in a file, and notes each record's checksum."""

    def __init__(self, file: BinaryIO, records: Records, wrote: Callable[[int], object]) -> None:
        self.file = file
        self.records = records
        self.wrote = wrote
        self.position = 0
        self.error: BaseException | None = None
        self.checksums: dict[tuple[int, int], int] = {}
        self._buffer = memoryview(bytearray(_BLOCK))
        self._sources: dict[Path, int] = {}
        self._closing = ExitStack()

    def close(self) -> None:
        self._closing.close()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast('B')
        size = len(view)
        record = self.records.get((address(view), size)) if size else None
        try:
            if record is None:
                checksum = crc32(view)
                self._write_all(view)
            else:
                checksum = self._copy(record, size)
        except BaseException as error:
            self.error = error
            raise
        self.checksums[self.position, size] = checksum
        self.position += size
        return size

    def flush(self) -> None:
        """Nothing is held back."""

    def _copy(self, record: Record, size: int) -> int:
        if record.path not in self._sources:
            descriptor = os.open(record.path, os.O_RDONLY)
            self._closing.callback(os.close, descriptor)
            self._sources[record.path] = descriptor
        checksum, done = 0, 0
        while done < size:
            block = self._buffer[: size - done]
            count = os.preadv(self._sources[record.path], [block], record.offset + done)
            if count == 0:
                raise OSError(errno.EIO, f'{record.path} got shorter while it was read')
            if not record.checksum:
                checksum = crc32(block[:count], checksum)
            self._write_all(block[:count])
            done += count
        return record.checksum or checksum

    def _write_all(self, view: memoryview) -> None:
        while view:  # one system call writes at most 2 GiB
            count = self.file.write(view)
            self.wrote(count)
            view = view[count:]


def _set_checksums(path: Path, checksums: Mapping[tuple[int, int], int]) -> None:
    """Put the records' checksums where ``torch.save``, told not to compute any, left zeros."""
    with open(path, 'r+b') as file:
        archive = _archive(file, path)
        for name, places in archive.crc_places().items():
            start, size = archive.place(name.removeprefix(archive.root))
            # torch writes nothing of a tensor without elements
            checksum = checksums[start, size] if size else 0
            for at in places:
                file.seek(at)
                file.write(checksum.to_bytes(4, 'little'))


def _archive(file: BinaryIO, path: Path) -> Archive:
    def read(at: int, size: int) -> bytes:
        file.seek(at)
        return file.read(size)

    return Archive(read, os.fstat(file.fileno()).st_size, str(path))


def _records(path: Path, state: Any) -> dict[tuple[int, int], Record]:
    """Where the mapped storages lie in their file; empty where that can't be told.

    They lie in the mapping as in the file, each a record of the archive.
    """
    storages = sorted({(s.data_ptr(), s.nbytes()) for s in _storages(state) if s.nbytes()})
    with open(path, 'rb') as file:
        archive = _archive(file, path)
        of_storages = {
            name.removeprefix(archive.root): crc
            for name, crc in archive.crcs().items()
            if name.startswith(archive.root + b'data/')
        }
        places = sorted((*archive.place(record), crc) for record, crc in of_storages.items())
    records = [place for place in places if place[1]]
    if not storages or len(storages) != len(records):
        return {}
    base = storages[0][0] - records[0][0]
    if [(at - base, size) for at, size in storages] != [(at, size) for at, size, _ in records]:
        return {}
    return {
        storage: Record(path, offset, checksum)
        for storage, (offset, _, checksum) in zip(storages, records, strict=True)
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
        return value if all(map(is_, items, value)) else type(value)(items)
    return value


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
    own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    own.set_(storage[start : start + size], 0, tensor.shape, tensor.stride())
    return own
