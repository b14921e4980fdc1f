"""CRC-32 is zlib's, whichever library computes it."""

import os
import subprocess
import sys
import zlib

import pytest
import torch

from tools.checkpoint.common import checksum


@pytest.mark.parametrize('size', [0, 1, 100, (1 << 20) - 1, 1 << 20, (3 << 20) + 5])
def test_checksums_are_those_of_zlib(size):
    data = os.urandom(size)
    for before in (0, 0xFFFFFFFF, zlib.crc32(b'before')):
        assert checksum.crc32(data, before) == zlib.crc32(data, before)
        assert checksum.crc32(memoryview(bytearray(data)), before) == zlib.crc32(data, before)


@pytest.mark.parametrize('installed', [True, False])
def test_the_fast_library_is_used_where_there_is_one(installed):
    if installed:
        pytest.importorskip('isal')
    hidden = '' if installed else "sys.modules['isal'] = None; "
    script = (
        f'import sys; {hidden}from tools.checkpoint.common import checksum; '
        "print(checksum._crc32.__module__, checksum.crc32(b'some bytes'))"
    )
    printed = subprocess.check_output([sys.executable, '-c', script], text=True).split()
    expected = 'isal.isal_zlib' if installed else 'zlib'
    assert printed[0].split('.')[-1] == expected.split('.')[-1]
    assert int(printed[1]) == zlib.crc32(b'some bytes')


def test_checksums_are_computed_again_once_all_files_are_written():
    # as threads do it, which end in any order
    first, second = (checksum.without_torch_checksums() for _ in range(2))
    for step in first.__enter__, second.__enter__:
        step()
        assert not torch.serialization.get_crc32_options()
    for writing in first, second:
        writing.__exit__(None, None, None)
    assert torch.serialization.get_crc32_options()
