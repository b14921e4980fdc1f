"""Where the elements of a stored chunk lie, so that they can be read block by block.

DCP stores a chunk as a ``torch.save`` archive at a known place of a ``.distcp`` file. ``locate``
reads its directory and its pickle and proves that the elements lie there row-major, in the dtype
and shape that the metadata says. An archive of any other shape is read whole through
``torch.load``.
"""

import io
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..common.errors import CheckpointError
from ..common.pickle_scan import refuse_memory_request
from ..common.safe_load import load_torch
from .archive import Archive, NotPlain, Template
from .source import Slice, StoredChunk

_STORAGES = {
    'FloatStorage': torch.float32,
    'HalfStorage': torch.float16,
    'BFloat16Storage': torch.bfloat16,
    'DoubleStorage': torch.float64,
}


class OpenFiles:
    """Descriptors of the files that one thread reads, the least recently used closed first."""

    def __init__(self, limit: int = 64) -> None:
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
        self._limit = max(self._limit, count)

    def close(self) -> None:
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


def read_bytes(path: Path, piece: Slice, files: OpenFiles | None = None) -> bytes:
    """All bytes of one entry.

    Args:
        files: where the file stays open for the next entry

    Raises:
        CheckpointError: it can't be read
    """
    data = bytearray(piece.length)
    opened = files or OpenFiles(1)
    try:
        read_exactly(opened.get(path), memoryview(data), piece.offset, path)
    finally:
        if files is None:
            opened.close()
    return bytes(data)


def load_chunk(stored: StoredChunk, key: str) -> torch.Tensor:
    """A stored chunk through ``torch.load``; needs memory for all of it.

    Raises:
        CheckpointError: no tensor of that dtype and shape
    """
    content = io.BytesIO(read_bytes(stored.path, stored.piece))
    loaded = load_torch(content, name=f'{stored.path}: {key}')
    if (
        not isinstance(loaded, torch.Tensor)
        or loaded.dtype != stored.dtype
        or tuple(loaded.shape) != stored.box.sizes
        or loaded.layout != torch.strided
        or loaded.is_meta
    ):
        found = (
            f'{loaded.dtype} of {tuple(loaded.shape)}{_storage(loaded)}'
            if isinstance(loaded, torch.Tensor)
            else type(loaded).__name__
        )
        raise _another_tensor(stored, key, found)
    return loaded


def _another_tensor(stored: StoredChunk, key: str, found: str) -> CheckpointError:
    return CheckpointError(
        f'{stored.path}: {key}: holds {found}, the metadata says {stored.dtype} of '
        f'{stored.box.sizes}'
    )


def _storage(tensor: torch.Tensor) -> str:
    if tensor.layout != torch.strided:
        return f' in the layout {str(tensor.layout).removeprefix("torch.")}, not dense'
    return ' without elements (on the meta device)' if tensor.is_meta else ''


def locate(descriptor: int, stored: StoredChunk, key: str) -> int | None:
    """File offset of a chunk's first element, where its elements lie row-major from there on.

    Returns:
        the offset in bytes, or None where the chunk has to be loaded as a whole

    Raises:
        CheckpointError: the archive holds a tensor of another dtype or shape, or can't be read
    """

    def read(at: int, size: int) -> bytes:
        data = bytearray(size)
        read_exactly(descriptor, memoryview(data), stored.piece.offset + at, stored.path)
        return bytes(data)

    found = _elements(read, stored, key)
    return None if found is None else stored.piece.offset + found[0]


class SmallArchives:
    """Finds the elements of archives that are in memory, by the last one of the same kind."""

    def __init__(self) -> None:
        self._templates: dict[object, Template] = {}

    def locate(self, content: bytearray, source: int, stored: StoredChunk, key: str) -> int | None:
        """Offset of the first element in an archive; as ``locate``.

        Args:
            content: the archive
            source: which input it is of, each of which has one writer
        """
        kind = source, len(content), stored.dtype, stored.box.sizes
        template = self._templates.get(kind)
        if template is not None and template.matches(content):
            return template.start
        frozen = bytes(content)

        def read(at: int, size: int) -> bytes:
            return frozen[at : at + size]

        found = _elements(read, stored, key)
        if found is None:
            return None
        try:
            self._templates[kind] = Template(read, len(frozen), found[1])
        except (NotPlain, KeyError, struct.error, CheckpointError):
            pass  # each of them is looked at in full
        return found[0] if found[0] % stored.dtype.itemsize == 0 else None


def _elements(
    read: Callable[[int, int], bytes], stored: StoredChunk, key: str
) -> tuple[int, bytes] | None:
    """Offset of the first element in an archive, and the record that holds it."""
    try:
        piece = stored.piece
        archive = Archive(read, piece.length, f'{stored.path}: the archive at {piece.offset}')
        data = archive.content(b'data.pkl')
        refuse_memory_request(data)
        tensor = _TensorUnpickler(io.BytesIO(data)).load()
        if not isinstance(tensor, _StoredTensor) or len(tensor.size) != len(tensor.stride):
            return None
        record = b'data/' + tensor.storage.encode()
        start, length = archive.place(record)
        # archives from before torch 2.1 don't say
        if b'byteorder' in archive and archive.content(b'byteorder') != b'little':
            return None
    except CheckpointError:
        raise
    except (
        NotPlain,
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
    if (tensor.dtype, tensor.size) != (stored.dtype, stored.box.sizes):
        raise _another_tensor(stored, key, f'{tensor.dtype} of {tensor.size}')
    nbytes = stored.box.numel * stored.dtype.itemsize
    if tensor.offset != 0 or not tensor.row_major or length < nbytes:
        return None
    return start, record


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
            raise NotPlain
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
