"""``torch.save`` archives of one tensor: where their records lie, and what two of them share.

An archive is an uncompressed zip. Two of one dtype and shape, by the same torch, differ in the
elements, in the CRC-32 of these, and in an id that torch computes from the CRC-32s. So the first
one is a template for the others: to recognise them by, and to write them around elements that
already lie where they belong.
"""

import functools
import io
import math
import mmap
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any, cast

import torch

from ..common.checksum import crc32, without_torch_checksums
from ..common.errors import CheckpointError
from ..common.tensors import address
from ..common.zip_record import HEADER, payload_start

_TAIL = 4096
_END = struct.Struct('<4s4H2LH')
_END64_LOCATOR = struct.Struct('<4sLQL')
_END64 = struct.Struct('<4sQ2H2L4Q')
_ENTRY = struct.Struct('<4s6H3L5H2L')
_CRC_IN_ENTRY = 16  # bytes
_CRC_IN_DESCRIPTOR = 4
_HAS_DESCRIPTOR = 8  # flag: the CRC-32 follows the content
_USUAL_HEADER = 256  # bytes; torch aligns what follows to 64
_ID = b'.data/serialization_id'


class NotPlain(Exception):
    """The archive isn't one plain contiguous tensor; it has to be loaded as a whole."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A record in the zip's directory: offsets of this entry and of its header, size, CRC-32."""

    at: int
    header: int
    size: int
    crc: int


class Archive:
    """The records of an archive.

    Args:
        read: gives a number of bytes (second argument) from an offset in the archive on

    Attributes:
        root: the directory in the archive that all records lie in, with its slash

    Raises:
        NotPlain: no uncompressed zip with one ``data.pkl``
        struct.error: truncated
    """

    def __init__(self, read: Callable[[int, int], bytes], length: int, name: str) -> None:
        self._read = read
        self._length = length
        self._name = name
        self._entries = self._directory()
        pickles = [entry for entry in self._entries if entry.endswith(b'/data.pkl')]
        if len(pickles) != 1:
            raise NotPlain
        self.root = pickles[0].removesuffix(b'data.pkl')

    def __contains__(self, record: bytes) -> bool:
        return self.root + record in self._entries

    def place(self, record: bytes) -> tuple[int, int]:
        """Offset and size of a record's content, from its local header.

        Raises:
            KeyError: there is none
            NotPlain: it is compressed, or lies outside the archive
            CheckpointError: the header contradicts the directory
        """
        entry = self._entries[self.root + record]
        room = self._length - entry.header
        if room < HEADER.size:
            raise NotPlain
        header = self._read(entry.header, min(room, _USUAL_HEADER))
        fields = HEADER.unpack_from(header)
        if fields[0] != b'PK\x03\x04' or fields[3] != 0:
            raise NotPlain
        needed = HEADER.size + fields[9] + fields[10]
        if len(header) < needed <= room:
            header = self._read(entry.header, needed)
        start = payload_start(header, self.root + record)
        if start is None:
            raise CheckpointError(
                f'{self._name}: the header of {(self.root + record).decode(errors="replace")} '
                "doesn't fit the archive's directory; the file is damaged"
            )
        if entry.header + start + entry.size > self._length:
            raise NotPlain
        return entry.header + start, entry.size

    def content(self, record: bytes) -> bytes:
        """A record's bytes; errors as of ``place``."""
        return self._read(*self.place(record))

    def crcs(self) -> dict[bytes, int]:
        """CRC-32 of each record, in the order in which they were written."""
        return {name: self._entries[name].crc for name in self._by_place()}

    def crc_places(self, record: bytes) -> list[int]:
        """Where a record's CRC-32 stands: in its entry, and after its content.

        Raises:
            NotPlain: it isn't where torch puts it, or what the records take is not apart
        """
        ends = {}
        for name in self._by_place():
            start, size = self.place(name.removeprefix(self.root))
            flags = HEADER.unpack_from(self._read(self._entries[name].header, HEADER.size))[2]
            descriptor = self._read(start + size, _CRC_IN_DESCRIPTOR)
            if not flags & _HAS_DESCRIPTOR or descriptor != b'PK\x07\x08':
                raise NotPlain
            ends[name] = start + size + _CRC_IN_DESCRIPTOR
        headers = [self._entries[name].header for name in ends] + [self._start]
        if any(end + 4 > after for end, after in zip(ends.values(), headers[1:], strict=True)):
            raise NotPlain
        name = self.root + record
        return [self._entries[name].at + _CRC_IN_ENTRY, ends[name]]

    def _by_place(self) -> list[bytes]:
        if not all(name.startswith(self.root) for name in self._entries):
            raise NotPlain
        return sorted(self._entries, key=lambda name: self._entries[name].header)

    def _directory(self) -> dict[bytes, _Entry]:
        tail_start = max(self._length - _TAIL, 0)
        tail = self._read(tail_start, self._length - tail_start)
        count, size, self._start = _directory_place(tail, tail_start)
        if self._start + size > self._length:
            raise NotPlain
        if self._start < tail_start:
            tail, tail_start = self._read(self._start, size), self._start
        entries: dict[bytes, _Entry] = {}
        at = self._start - tail_start
        for _ in range(count):
            fields = _ENTRY.unpack_from(tail, at)
            magic, method, crc, packed, full = fields[0], fields[4], *fields[7:10]
            name_size, extra_size, comment_size, header = *fields[10:13], fields[16]
            name_at = at + _ENTRY.size
            name = tail[name_at : name_at + name_size]
            extra = tail[name_at + name_size : name_at + name_size + extra_size]
            full, packed, header = _wide(extra, full, packed, header)
            if magic != b'PK\x01\x02' or method != 0 or full != packed:
                raise NotPlain
            entries[name] = _Entry(tail_start + at, header, full, crc)
            at = name_at + name_size + extra_size + comment_size
        return entries


def _directory_place(tail: bytes, tail_start: int) -> tuple[int, int, int]:
    """Number of entries, size and offset of the directory, from the end of the archive."""
    at = len(tail) - _END.size
    magic, _, _, _, count, size, start, comment = _END.unpack_from(tail, at)
    if magic != b'PK\x05\x06' or comment:
        raise NotPlain
    if start == 0xFFFFFFFF or size == 0xFFFFFFFF or count == 0xFFFF:
        magic, _, where, _ = _END64_LOCATOR.unpack_from(tail, at - _END64_LOCATOR.size)
        fields = _END64.unpack_from(tail, where - tail_start)
        if magic != b'PK\x06\x07' or fields[0] != b'PK\x06\x06' or where < tail_start:
            raise NotPlain
        count, size, start = fields[7:10]
    return count, size, start


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


class Template:
    """What all archives of one dtype and shape have in common, by one writer.

    Args:
        storage: name of the record of elements, such as ``data/0``

    Raises:
        NotPlain: its parts aren't clearly apart, so that it says nothing of others
    """

    def __init__(self, read: Callable[[int, int], bytes], length: int, storage: bytes) -> None:
        archive = Archive(read, length, '')
        self.length = length
        self.start, size = archive.place(storage)
        self.stop = self.start + size
        self._crcs = archive.crc_places(storage)
        self._id_crcs: list[int] = []
        places = [(self.start, self.stop), *((at, at + 4) for at in self._crcs)]
        if _ID in archive:
            self._id, id_size = archive.place(_ID)
            self._id_crcs = archive.crc_places(_ID)
            places += [(self._id, self._id + id_size), *((at, at + 4) for at in self._id_crcs)]
        edges = [(0, 0), *sorted(places), (length, length)]
        self._shared = [
            (end, start, read(end, start - end)) for (_, end), (start, _) in pairwise(edges)
        ]
        names = archive.crcs()
        written = [crc for name, crc in names.items() if name != archive.root + _ID]
        self._crcs_before = written[: list(names).index(archive.root + storage)]
        self._crcs_after = written[len(self._crcs_before) + 1 :]
        self._name_hash = read(self._id, 20) if self._id_crcs else b''

    def matches(self, content: bytes | bytearray) -> bool:
        """Whether another archive of the same length differs in nothing but its elements."""
        return all(content[start:end] == shared for start, end, shared in self._shared)

    def fill(self, archive: memoryview) -> None:
        """Write all that isn't elements around these.

        Args:
            archive: ``length`` bytes, the elements from ``start`` to ``stop``
        """
        for start, end, shared in self._shared:
            archive[start:end] = shared
        crc = crc32(archive[self.start : self.stop])
        for at in self._crcs:
            archive[at : at + 4] = crc.to_bytes(4, 'little')
        if not self._id_crcs:
            return
        combined = 0
        for value in (*self._crcs_before, crc, *self._crcs_after):
            combined ^= (value + 0x9E3779B9 + (combined << 6) + (combined >> 2)) % (1 << 64)
        written = self._name_hash + b'%020d' % combined
        archive[self._id : self._id + len(written)] = written
        for at in self._id_crcs:
            archive[at : at + 4] = crc32(written).to_bytes(4, 'little')


_saving = threading.RLock()  # torch's checksums are off for all threads, on older torch


def save_template(dtype: torch.dtype, sizes: Sequence[int]) -> Template | None:
    """The template of what ``torch.save`` writes for a tensor, whatever its size, from its shape.

    Returns:
        None where the archive isn't made up as it was up to torch 2.13, so that only
        ``torch.save`` itself knows how
    """
    with _saving:
        return _frame(dtype, sizes) if math.prod(sizes) and _known(dtype) else None


@functools.cache
def _known(dtype: torch.dtype) -> bool:
    """Whether the filled template of a small tensor is what ``torch.save`` writes."""
    tensor = torch.arange(15, dtype=torch.float32, device='cpu').view(3, 5).to(dtype)
    try:
        template = _frame(dtype, tensor.shape)
    except (NotPlain, KeyError, struct.error, ValueError, CheckpointError):
        return False
    archive = bytearray(template.length)
    archive[template.start : template.stop] = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    template.fill(memoryview(archive))
    return archive == saved(tensor)


def _frame(dtype: torch.dtype, sizes: Sequence[int]) -> Template:
    """The template from an archive around elements that are neither read nor kept."""
    nbytes = math.prod(sizes) * dtype.itemsize
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=dtype).view(tuple(sizes))
    around = _Around(tensor.data_ptr(), nbytes)
    with without_torch_checksums():
        torch.save(tensor, cast(IO[bytes], around))
    archive = Archive(around.read, around.length, '')
    for name in archive.crcs():
        record = name.removeprefix(archive.root)
        if record != b'data/0':
            for at in archive.crc_places(record):
                around.put(at, crc32(archive.content(record)).to_bytes(4, 'little'))
    return Template(around.read, around.length, b'data/0')


class _Around:
    """A file for ``torch.save`` that leaves out one tensor's elements."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._elements = address, nbytes
        self._start = 0
        self._before, self._after = bytearray(), bytearray()
        self._into = self._before

    @property
    def length(self) -> int:
        return len(self._before) + self._elements[1] + len(self._after)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast('B')
        if len(view) == self._elements[1] and address(view) == self._elements[0]:
            self._into = self._after
        else:
            self._into += view
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""

    def read(self, at: int, size: int) -> bytes:
        """Bytes of the archive; zeros for elements."""
        start = len(self._before)
        stop = start + self._elements[1]
        end = at + size
        hole = max(min(end, stop) - max(at, start), 0)
        return bytes(
            self._before[at:end] + bytes(hole) + self._after[max(at - stop, 0) : max(end - stop, 0)]
        )

    def put(self, at: int, content: bytes) -> None:
        """Change bytes that aren't elements."""
        part, at = (
            (self._before, at)
            if at < len(self._before)
            else (self._after, at - len(self._before) - self._elements[1])
        )
        part[at : at + len(content)] = content


def saved(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    with _saving:
        torch.save(tensor, stream)
    return stream.getvalue()
