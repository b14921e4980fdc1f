"""CRC-32, which every record of a ``torch.save`` archive carries."""

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

try:  # some three times as fast on x86 and ARM
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    _crc32 = zlib.crc32

_BLOCK = 1 << 20  # bytes; other threads wait for no more


def crc32(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """CRC-32 of bytes that follow others.

    Args:
        data: the bytes; a memoryview has to be one of bytes
        before: the CRC-32 of those before
    """
    view = memoryview(data)
    for start in range(0, len(view), _BLOCK):
        before = _crc32(view[start : start + _BLOCK], before)
    return before


class _Off:
    """Who has turned torch's own checksums off, and what they were before."""

    lock = threading.Lock()
    writers = 0
    before = True


@contextmanager
def without_torch_checksums() -> Iterator[None]:
    """Keep ``torch.save`` from reading every byte for a checksum: it leaves zeros.

    The option is the thread's, on older torch the process's: then it must not stay off because one
    thread saw it while another had turned it off.
    """
    with _Off.lock:
        if not _Off.writers:
            _Off.before = torch.serialization.get_crc32_options()
        _Off.writers += 1
        torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        with _Off.lock:
            _Off.writers -= 1
            torch.serialization.set_crc32_options(_Off.before)
