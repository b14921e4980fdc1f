"""``torch.save`` archives, which are uncompressed zips: where records and their checksums lie.

The directory is read with few calls, and nothing of the content, whatever the archive's size.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from .errors import CheckpointError

HEADER = struct.Struct('<4s5H3L2H')
_TAIL = 4096
_END = struct.Struct('<4s4H2LH')
_END64_LOCATOR = struct.Struct('<4sLQL')
_END64 = struct.Struct('<4sQ2H2L4Q')
_ENTRY = struct.Struct('<4s6H3L5H2L')
_CRC_IN_ENTRY = 16  # bytes
_CRC_IN_DESCRIPTOR = 4
_HAS_DESCRIPTOR = 8  # flag: the CRC-32 follows the content
_USUAL_HEADER = 256  # bytes; torch aligns what follows to 64


class NotPlain(Exception):
    """The archive isn't made up as ``torch.save`` does it; it has to be loaded as a whole."""


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

    def crc_places(self) -> dict[bytes, list[int]]:
        """Where each record's CRC-32 stands: in its entry, and after its content if it has any.

        Raises:
            NotPlain: one isn't where torch puts it, or what the records take is not apart
        """
        places: dict[bytes, list[int]] = {}
        ends = []
        for name in self._by_place():
            entry = self._entries[name]
            start, size = self.place(name.removeprefix(self.root))
            end = start + size
            places[name] = [entry.at + _CRC_IN_ENTRY]
            if size:
                flags = HEADER.unpack_from(self._read(entry.header, HEADER.size))[2]
                if not flags & _HAS_DESCRIPTOR or self._read(end, 4) != b'PK\x07\x08':
                    raise NotPlain
                places[name].append(end + _CRC_IN_DESCRIPTOR)
                end += _CRC_IN_DESCRIPTOR + 4
            ends.append(end)
        following = [self._entries[name].header for name in places][1:] + [self._start]
        if any(end > header for end, header in zip(ends, following, strict=True)):
            raise NotPlain
        return places

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
        if magic != b'PK\x06\x07' or not tail_start <= where < tail_start + at:
            raise NotPlain
        fields = _END64.unpack_from(tail, where - tail_start)
        if fields[0] != b'PK\x06\x06':
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


def payload_start(header: bytes | bytearray, name: bytes) -> int | None:
    """Bytes from a record's local header to its content.

    The lengths in the header decide where the content is looked for, and torch checks none of them:
    name and extra fields must fill them exactly.

    Args:
        header: the archive from the header on, as much as the header's lengths say
        name: the record's name in the directory

    Returns:
        the distance; None where the header is damaged
    """
    if len(header) < HEADER.size:
        return None
    magic, *_, name_size, extra_size = HEADER.unpack_from(header)
    at = HEADER.size + name_size
    end = at + extra_size
    if magic != b'PK\x03\x04' or header[HEADER.size : at] != name or end > len(header):
        return None
    while at + 4 <= end:
        at += 4 + int.from_bytes(header[at + 2 : at + 4], 'little')
    return end if at == end else None
