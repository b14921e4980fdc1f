"""Weighted merge: hostile inputs, full disks, read errors, memory."""

import errno
import io
import json
import math
import os
import pickle
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.cpu_megatron.whole_checkpoint import ALONE
from tests.unit_tests.tools.checkpoint.handmade import (
    WEIGHTS,
    assert_same,
    load_tensors,
    model_tensors,
    set_common_form,
    tree,
    write_checkpoint,
)
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.merge import accumulate, payload
from tools.checkpoint.weighted_merge import main
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge

REPOSITORY = Path(__file__).resolve().parents[4]


# --- nothing in a checkpoint runs


class Hostile:
    def __init__(self, proof):
        self.proof = str(proof)

    def __reduce__(self):
        return os.mkdir, (self.proof,)


def hostile_checkpoint(directory, where, proof):
    write_checkpoint(directory, model_tensors(1))
    if where == 'metadata':
        metadata = dcp.FileSystemReader(directory).read_metadata()
        metadata.planner_data = Hostile(proof)
        (directory / '.metadata').write_bytes(pickle.dumps(metadata))
    else:
        set_common_form(directory, {'args': Hostile(proof)}, where)
    return directory


@pytest.mark.parametrize(
    'where, file',
    [
        ('metadata', r'\.metadata'),
        ('legacy', r'common\.pt'),
        ('embedded', 'common_state'),
    ],
)
def test_hostile_checkpoints_run_nothing_unless_trusted(tmp_path, where, file, capsys):
    proof = tmp_path / 'code-has-run'
    bad = hostile_checkpoint(tmp_path / 'bad', where, proof)
    with pytest.raises(CheckpointError, match=f'{file}.* refused class posix.mkdir; .*trust'):
        merge([bad], [1], tmp_path / 'out', verify=True)
    assert not proof.exists() and not (tmp_path / 'out').exists()
    arguments = ['--merge-inputs', f'{bad}:1', '--merge-output', str(tmp_path / 'out')]
    assert main(arguments) == 1
    assert 'refused class posix.mkdir' in capsys.readouterr().err and not proof.exists()
    assert main([*arguments, '--trust-checkpoints']) == 0
    assert proof.exists() and (tmp_path / 'out').exists()


def test_hostile_extra_state_is_copied_unread(tmp_path):
    proof = tmp_path / 'code-has-run'
    key = 'decoder.layers._extra_state'
    data = pickle.dumps(Hostile(proof))
    paths = [
        write_checkpoint(tmp_path / str(i), model_tensors(i), extra_states={key: data})
        for i in range(2)
    ]
    merge(paths, [0.5, 0.5], tmp_path / 'out', verify=True)
    assert not proof.exists()
    assert any(b'mkdir' in content for content in tree(tmp_path / 'out').values())


def test_hostile_tensor_archives_run_nothing(tmp_path):
    """A chunk's own archive is no plain tensor: the restricted load refuses it."""
    proof = tmp_path / 'code-has-run'
    directory = write_checkpoint(tmp_path / 'bad', model_tensors(1))
    metadata = dcp.FileSystemReader(directory).read_metadata()
    index = next(i for i in metadata.storage_data if i.fqn == 'output_layer.weight')
    info = metadata.storage_data[index]
    evil = io.BytesIO()
    torch.save([Hostile(proof), b'x' * 4096], evil)  # as many bytes as the tensor takes
    with open(directory / 'evil.distcp', 'wb') as file:
        file.write(evil.getvalue())
    info.relative_path, info.offset, info.length = 'evil.distcp', 0, len(evil.getvalue())
    (directory / '.metadata').write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match='output_layer.weight: refused class posix.mkdir'):
        merge([directory], [1], tmp_path / 'out')
    assert not proof.exists() and not (tmp_path / 'out').exists()


# --- failing storage


@contextmanager
def small_tmpfs(directory, size):
    directory.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(directory)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f'no tmpfs can be mounted here: {mounted.stderr.strip()}')
    try:
        yield
    finally:
        subprocess.run(['umount', str(directory)], check=True)


def test_disk_full_at_any_point(three, expected, tmp_path, capfd):
    disk = tmp_path / 'disk'
    outcomes = []
    for pages in range(1, 24):
        with small_tmpfs(disk, pages * 4096):
            try:
                merge(three[0], WEIGHTS, disk / 'out', 7, threads=2, save_integrity=True)
            except CheckpointError as error:
                assert 'No space left on device' in str(error) and '\n' not in str(error)
                assert list(disk.iterdir()) == []
                outcomes.append('full')
            else:
                assert_same(load_tensors(disk / 'out/iter_0000007'), expected)
                outcomes.append('fits')
    assert outcomes == sorted(outcomes, reverse=True) and {'full', 'fits'} == set(outcomes)
    assert 'Traceback' not in capfd.readouterr().err


def test_read_errors(three, tmp_path, monkeypatch, capfd):
    right, calls = os.preadv, []

    def failing(at):
        def preadv(descriptor, buffers, offset):
            calls.append(offset)
            if len(calls) == at:
                raise OSError(errno.EIO, 'Input/output error')
            return right(descriptor, buffers, offset)

        return preadv

    for at in (1, 5, 20):  # a read for each small chunk of an input
        calls.clear()
        monkeypatch.setattr(os, 'preadv', failing(at))
        with pytest.raises(CheckpointError, match=r'iter_0000.00/.*distcp: .*Input/output error'):
            merge(three[0], WEIGHTS, tmp_path / 'deep/out', threads=2)
        assert list(tmp_path.iterdir()) == []
    assert 'Traceback' not in capfd.readouterr().err


def test_file_that_shrinks_while_merging(three, tmp_path, monkeypatch):
    right = os.preadv
    monkeypatch.setattr(os, 'preadv', lambda d, b, o: 0 if o > 20000 else right(d, b, o))
    with pytest.raises(CheckpointError, match='ends at .*, expected data up to'):
        merge(three[0], WEIGHTS, tmp_path / 'out')
    assert list(tmp_path.iterdir()) == []


def test_permissions_follow_umask_and_parent(three, tmp_path):
    parent = tmp_path / 'parent'
    parent.mkdir()
    os.chmod(parent, 0o2775)
    before = os.umask(0o027)
    try:
        merge(three[0], WEIGHTS, parent, 7)
    finally:
        os.umask(before)
    for path in [*parent.rglob('*')]:
        wanted = 0o2750 if path.is_dir() else 0o640
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


# --- reading once, and little memory


@pytest.mark.parametrize('threads', [1, 2])
def test_each_source_chunk_is_read_exactly_once(three, tmp_path, monkeypatch, threads):
    paths, models = three
    reads = []
    right = payload.read_exactly

    def record(descriptor, buffer, offset, name):
        reads.append((str(name), offset, len(buffer)))
        right(descriptor, buffer, offset, name)

    monkeypatch.setattr(accumulate, 'read_exactly', record)  # elements, and archives of few
    result = merge(paths, WEIGHTS, tmp_path / 'out', threads=threads)
    for name in {name for name, _, _ in reads}:
        spans = sorted((start, start + size) for n, start, size in reads if n == name)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False)), name
    total = sum(tensor.nbytes for model in models for tensor in model.values())
    stored = [place for path in paths for place in storage_of_all(path)]
    assert sorted((name, start) for name, start, _ in reads) == sorted(stored)
    assert result.bytes_read == total


def storage_of_all(path):
    """File and offset of every stored chunk of the model."""
    storage = dcp.FileSystemReader(path).read_metadata().storage_data
    return [
        (str(path / place.relative_path), place.offset)
        for index, place in storage.items()
        if index.offset is not None
    ]


_MEMORY_SCRIPT = """
import json, resource, sys
import tools.checkpoint.merge.run
from tools.checkpoint.common.progress import peak_memory as peak
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge
import torch, torch.distributed.checkpoint as dcp
chunk, inputs = int(sys.argv[1]), sys.argv[3:]
size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
allowed = (128 << 20) + 2 * chunk
resource.setrlimit(resource.RLIMIT_AS, (size + allowed, size + allowed))
before, grown = peak(), []
for count in (2, len(inputs)):
    merge(inputs[:count], [1 / count] * count, f'{sys.argv[2]}-{count}', threads=2)
    grown.append(peak() - before)
def naive():
    states = []
    for path in inputs:
        entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        state = {k: torch.empty(e.size, dtype=e.properties.dtype) for k, e in entries.items()}
        dcp.load(state, checkpoint_id=path)
        states.append(state)
try:
    naive()
    outcome = 'survived'
except (MemoryError, RuntimeError, dcp.api.CheckpointException):
    outcome = 'died'
print(json.dumps({'grown': grown, 'naive': outcome, 'allowed': allowed}))
"""


def test_memory_is_bounded_under_an_address_space_limit(tmp_path):
    chunk = 4 << 20
    paths = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        model = {
            f'decoder.layers.{i}.weight': torch.randn(
                chunk // 2048, 1024, generator=generator
            ).bfloat16()
            for i in range(12)
        }
        paths.append(tmp_path / str(seed))
        dcp.save(model, checkpoint_id=paths[-1], **ALONE)
        (paths[-1] / 'metadata.json').write_text('{"sharded_backend": "torch_dist"}')
    done = subprocess.run(
        [
            sys.executable,
            '-W',
            'ignore',
            '-c',
            _MEMORY_SCRIPT,
            str(chunk),
            str(tmp_path / 'out'),
            *map(str, paths),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={**os.environ, 'PYTHONPATH': str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report['naive'] == 'died'
    assert chunk < max(report['grown']) <= report['allowed']
    assert math.isclose(*report['grown'], abs_tol=8 << 20)  # eight inputs take what two take
