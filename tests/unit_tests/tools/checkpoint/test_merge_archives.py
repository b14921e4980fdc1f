"""Archives from a template: the bytes of ``torch.save``, and no archive taken for another."""

import contextlib
import io
import mmap
import os
import struct
import threading
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.unit_tests.tools.checkpoint.handmade import (
    assert_same,
    load_tensors,
    plain_merge,
    write_checkpoint,
)
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.merge import archive, payload, writer
from tools.checkpoint.merge.archive import Template, save_template, saved
from tools.checkpoint.merge.geometry import Box
from tools.checkpoint.merge.payload import SmallArchives
from tools.checkpoint.merge.plan import BytesJob
from tools.checkpoint.merge.source import Slice, StoredChunk
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def values(sizes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator).to(dtype)


def template_of(content):
    return Template(lambda at, size: content[at : at + size], len(content), b'data/0')


def filled(template, tensor):
    content = bytearray(template.length)
    elements = tensor.contiguous().view(-1).view(torch.uint8)
    content[template.start : template.stop] = elements.numpy().tobytes()
    template.fill(memoryview(content))
    return content


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('sizes', [(), (1,), (3, 5), (1, 1, 256), (70_000,), (3, 900_000)])
def test_a_filled_template_is_what_torch_saves(dtype, sizes):
    template = save_template(dtype, sizes)
    assert template is not None, 'this torch makes archives otherwise'
    for seed in range(3):
        tensor = values(sizes, dtype, seed)
        assert filled(template, tensor) == saved(tensor)


def test_template_of_more_than_zip_can_count_without_its_extension(monkeypatch):
    """Elements that take 4 GiB of address space and no memory: their pages are never written."""
    nbytes = (1 << 32) + 6
    elements = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(elements, dtype=torch.bfloat16)
    expected = archive._Around(tensor.data_ptr(), nbytes)
    torch.save(tensor, expected)
    crcs = archive.Archive(expected.read, expected.length, '').crcs()
    real = archive.crc32
    monkeypatch.setattr(
        archive,
        'crc32',
        lambda data: crcs[b'archive/data/0'] if len(data) == nbytes else real(data),
    )
    template = save_template(torch.bfloat16, tensor.shape)
    whole = mmap.mmap(-1, template.length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    template.fill(memoryview(whole))
    assert template.length == expected.length
    before, after = slice(template.start), slice(template.stop, template.length)
    for part in before, after:
        assert whole[part] == expected.read(part.start or 0, part.stop - (part.start or 0))


def test_what_torch_saves_otherwise_is_left_to_it(tmp_path, monkeypatch):
    """Another id, say, in a later torch: no template, and the same tensors."""
    monkeypatch.setattr(archive, '_ID', b'.data/other_id')
    monkeypatch.setattr(archive, '_known', archive._known.__wrapped__)  # nothing kept
    assert save_template(torch.float32, (4,)) is None
    shapes = {'decoder.a': (6, 4), 'decoder.b': (1500, 1000)}
    models = [
        {key: values(sizes, torch.bfloat16, seed) for key, sizes in shapes.items()}
        for seed in (1, 2)
    ]
    paths = [write_checkpoint(tmp_path / f'{i}', model) for i, model in enumerate(models)]
    merge(paths, [0.25, 0.75], tmp_path / 'out', verify=True)
    assert_same(load_tensors(tmp_path / 'out'), plain_merge(models, [0.25, 0.75]))


def test_nothing_is_saved_while_torch_computes_no_checksums(monkeypatch):
    """Older torch has one option for all threads: the other's archive would have zeros."""
    save_template(torch.float32, (1,))
    done = []
    other = threading.Thread(target=lambda: done.append(saved(torch.empty(0, 3))))

    @contextlib.contextmanager
    def off():
        other.start()
        other.join(0.5)
        done.append('template')
        yield

    monkeypatch.setattr(archive, 'without_torch_checksums', off)
    save_template(torch.float32, (2, 3))
    other.join()
    assert done == ['template', saved(torch.empty(0, 3))]


def test_every_byte_but_the_elements_and_their_checksums_tells_archives_apart():
    tensor = values((3, 5), torch.float32)
    content = saved(tensor)
    template = template_of(content)
    free = sum(not template.matches(_flipped(content, at)) for at in range(len(content)))
    id_size, checksums = 40, 4 * 4
    assert len(content) - free == tensor.nbytes + id_size + checksums
    assert template.matches(saved(values((3, 5), torch.float32, seed=1)))


def _flipped(content, at):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize('kind', ['transposed', 'other dtype', 'other shape', 'shifted'])
def test_an_archive_that_differs_is_looked_at_anew(tmp_path, kind):
    """Of the same length as the ones before, and read as what it is."""
    plain = values((4, 4), torch.float32)
    before, after = saved(plain), None
    expected = plain
    if kind == 'transposed':
        after = saved(plain.t().contiguous().t())
    elif kind == 'other dtype':
        after = saved(plain.view(torch.int32)).replace(b'IntStorage', b'FloatStora')
    elif kind == 'other shape':
        after = saved(plain.view(8, 2))
    else:
        header = before.index(b'archive/data/0FB') - 2
        after = before[:header] + bytes([before[header] - 8]) + before[header + 1 :]
    small = SmallArchives()
    path = tmp_path / 'file'

    def read(content):
        path.write_bytes(content)
        box = Box((0, 0), (4, 4))
        stored = StoredChunk(path, Slice('file', 0, len(content)), box, torch.float32)
        start = small.locate(bytearray(content), 0, stored, 'key')
        if start is None:
            return payload.load_chunk(stored, 'key')
        return torch.frombuffer(content, dtype=torch.float32, count=16, offset=start).view(4, 4)

    assert torch.equal(read(before), expected)
    if kind == 'transposed':
        assert torch.equal(read(after), expected)
    else:
        with pytest.raises(CheckpointError, match='file: '):
            read(after)
    assert torch.equal(read(before), expected)


def test_no_template_where_one_record_lies_in_another():
    """What the elements are said to cover would go unread in the next archive."""
    content = saved(values((8,), torch.float32))
    with zipfile.ZipFile(io.BytesIO(content)) as found:
        place = {info.filename: info for info in found.infolist()}
    entry = content.index(b'PK\x01\x02', content.index(b'.data/serialization_id'))
    at = content.index(b'archive/data/0', entry) - 46
    wide = (place['archive/data/0'].file_size + 200).to_bytes(4, 'little')
    grown = content[: at + 20] + wide + wide + content[at + 28 :]
    with pytest.raises(archive.NotPlain):
        template_of(grown)


@pytest.mark.parametrize('where', [0, 2**62, 2**64 - 1])
def test_a_zip64_directory_that_lies_elsewhere_is_not_looked_for(where):
    """In 64 bits stands what is no offset to Python."""
    whole = saved(torch.arange(3.0))[:-22]
    whole += struct.pack('<4sLQL', b'PK\x06\x07', 0, where, 1)
    whole += struct.pack('<4s4H2LH', b'PK\x05\x06', 0, 0, 1, 1, 2**32 - 1, 2**32 - 1, 0)
    with pytest.raises(archive.NotPlain):
        template_of(whole)


@pytest.mark.parametrize('threads', [1, 3])
def test_small_and_large_chunks_in_many_batches(tmp_path, monkeypatch, threads):
    """Their metadata says tensors, and each file holds them one after the other."""
    monkeypatch.setattr(writer, '_BATCH', 3000)
    shapes = [(1,), (3,), (4, 10), (50,), (51,), (7, 70), (100,), (9000,)]
    models = [
        {
            f'decoder.{i}': values(sizes, torch.float32, seed * 10 + i)
            for i, sizes in enumerate(shapes)
        }
        for seed in (1, 2)
    ]
    paths = [write_checkpoint(tmp_path / f'{i}', model) for i, model in enumerate(models)]
    out = tmp_path / 'out'
    merge(paths, [0.25, 0.75], out, threads=threads, verify=True)
    assert_same(load_tensors(out), plain_merge(models, [0.25, 0.75]))
    storage = dcp.FileSystemReader(out).read_metadata().storage_data
    assert {index.fqn for index in storage} == set(models[0])
    assert b'tools.checkpoint' not in (out / '.metadata').read_bytes()  # DCP's classes only
    for name in {place.relative_path for place in storage.values()}:
        spans = sorted((p.offset, p.length) for p in storage.values() if p.relative_path == name)
        ends = [start + length for start, length in spans]
        assert [start for start, _ in spans] == [0, *ends[:-1]]
        assert ends[-1] == os.stat(out / name).st_size


def test_threads_share_the_bytes_evenly():
    """Items of bytes go to them by turns; one embedding weighs as much as many layers."""
    sizes = [100 << 20, *[2 << 20, 6 << 20, 8 << 20, 8 << 20] * 12, *[2048] * 40]
    entries = [
        BytesJob(f'decoder.{number}', Path(), Slice('file', 0, size))
        for number, size in enumerate(sizes)
    ]
    for threads in (1, 2, 3, 4):
        batches = list(writer._batches(entries, threads).values())
        assert sorted(number for batch in batches for number in batch) == list(range(len(sizes)))
        loads = [
            sum(sizes[number] for batch in batches[thread::threads] for number in batch)
            for thread in range(threads)
        ]
        assert max(loads) - min(loads) <= 8 << 20 or threads == 4
        assert max(loads) <= max(100 << 20, sum(sizes) / threads + (8 << 20))
