"""``torch.save`` archives of one tensor: what two of them share.

Two of one dtype and shape, by the same torch, differ in the
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
from itertools import pairwise
from typing import IO, Any, cast

import torch

from ..common.checksum import crc32, without_torch_checksums
from ..common.errors import CheckpointError
from ..common.tensors import address
from ..common.zip_record import Archive, NotPlain

_ID = b'.data/serialization_id'


class Template:
    """What all archives of one dtype and shape have in common, by one writer.

    Args:
        read: gives a number of bytes (second argument) from an offset in one of them on
        length: its bytes
        storage: name of the record of elements, such as ``data/0``

    Attributes:
        start: offset of the first element
        stop: offset after the last one
        length: bytes of each archive

    Raises:
        NotPlain: its parts aren't clearly apart, so that it says nothing of others
    """

    def __init__(self, read: Callable[[int, int], bytes], length: int, storage: bytes) -> None:
        archive = Archive(read, length, '')
        self.length = length
        self.start, size = archive.place(storage)
        self.stop = self.start + size
        crc_places = archive.crc_places()
        self._crcs = crc_places[archive.root + storage]
        self._id_crcs: list[int] = []
        places = [(self.start, self.stop), *((at, at + 4) for at in self._crcs)]
        if _ID in archive:
            self._id, id_size = archive.place(_ID)
            self._id_crcs = crc_places[archive.root + _ID]
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
    for name, places in archive.crc_places().items():
        record = name.removeprefix(archive.root)
        if record != b'data/0':
            for at in places:
                around.put(at, crc32(archive.content(record)).to_bytes(4, 'little'))
    return Template(around.read, around.length, b'data/0')


class _Around:
    """A file for ``torch.save`` that leaves out one tensor's elements.

    Args:
        address: where these lie in memory
        nbytes: how many bytes they are
    """

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
