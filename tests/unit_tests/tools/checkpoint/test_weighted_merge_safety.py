"""Weighted merge: hostile inputs, kills, full disks, read errors, memory."""

import errno
import io
import json
import math
import os
import pickle
import random
import signal
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
    assert_same,
    leave_group,
    load_tensors,
    model_tensors,
    plain_merge,
    set_common_form,
    tree,
    write_checkpoint,
    write_run,
)
from tools.checkpoint.common import publish
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.merge import accumulate, payload
from tools.checkpoint.weighted_merge import main
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge

RANDOM_KILLS = int(os.environ.get('WEIGHTED_MERGE_KILLS', '50'))
STEPS = [
    'staged',
    'written',
    'completed',
    'synced',
    'renamed 1',
    'unmarked',
    'tracked 1',
]
REPOSITORY = Path(__file__).resolve().parents[4]
WEIGHTS = [0.5, 0.3, 0.2]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp('run'), [100, 200, 300])


@pytest.fixture(scope='module')
def expected(run):
    return plain_merge(run[1], WEIGHTS)


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


# --- killed


def forked(action):
    """Run ``action`` in a forked child, quietly; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        leave_group()
        code = action() or 0
    finally:
        os._exit(code)


def merged_into(root, paths):
    merge(paths, WEIGHTS, root, 7, threads=2)


def state_of(root, expected):
    """``old``, ``new``, or a failure: what a user of ``root`` finds."""
    target, tracker = root / 'iter_0000007', root / 'latest_checkpointed_iteration.txt'
    if not target.exists():
        assert tracker.read_text() == '1'
        return 'old'
    assert_same(load_tensors(target), expected)
    assert tracker.read_text() in ('1', '7\n')
    return 'new'


def start_root(tmp_path, name):
    root = tmp_path / name
    root.mkdir()
    (root / 'latest_checkpointed_iteration.txt').write_text('1')
    return root


def check_next_run(root, paths, expected, state):
    """The same run again ends with the new directory and tracker, and nothing beside them."""
    if state == 'old':
        merged_into(root, paths)
    else:
        with pytest.raises(CheckpointError, match='exists'):
            merged_into(root, paths)
    assert state_of(root, expected) == 'new'
    assert (root / 'latest_checkpointed_iteration.txt').read_text() == '7\n'
    assert sorted(os.listdir(root)) == ['iter_0000007', 'latest_checkpointed_iteration.txt']


@pytest.mark.parametrize('victim', STEPS)
def test_sigkill_at_each_named_step(run, expected, tmp_path, victim):
    root = start_root(tmp_path, 'root')
    seen = []

    def action():
        def step(name):
            if name == victim:
                os.kill(os.getpid(), signal.SIGKILL)

        publish.step = step
        merged_into(root, run[0])

    _, status = os.waitpid(forked(action), 0)
    assert os.WIFSIGNALED(status), f'{victim} was not reached {seen}'
    state = state_of(root, expected)
    assert state == ('old' if STEPS.index(victim) < STEPS.index('renamed 1') else 'new')
    check_next_run(root, run[0], expected, state)


def test_sigkill_at_random_times(run, expected, tmp_path):
    root = start_root(tmp_path, 'timing')
    _, _, used = os.wait4(forked(lambda: merged_into(root, run[0])), 0)
    assert state_of(root, expected) == 'new'
    dice = random.Random(1)
    states = []
    for index in range(RANDOM_KILLS):
        root = start_root(tmp_path, f'{index}')
        ends = dice.uniform(0.01, 1) * (used.ru_utime + used.ru_stime)

        def action(root=root, ends=ends):
            # by processor time, which a busy machine doesn't change; nothing handles this signal
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, ends)
            merged_into(root, run[0])

        os.waitpid(forked(action), 0)
        states.append(state_of(root, expected))
        check_next_run(root, run[0], expected, states[-1])
    assert 'old' in states


def test_a_dry_run_leaves_what_a_killed_run_left(run, tmp_path, capsys):
    root = start_root(tmp_path, 'root')

    def die():
        publish.step = lambda name: name == 'unmarked' and os.kill(os.getpid(), signal.SIGKILL)
        merged_into(root, run[0])

    os.waitpid(forked(die), 0)
    before = tree(root)
    pairs = [f'{path}:{weight}' for path, weight in zip(run[0], WEIGHTS, strict=True)]
    again = ['--merge-inputs', *pairs, '--merge-output', str(root), '--output-iteration', '7']
    assert main([*again, '--dry-run']) == 1
    assert 'exists' in capsys.readouterr().err and tree(root) == before
    assert main(again) == 1
    assert 'nothing is left to do' in capsys.readouterr().err
    assert (root / 'latest_checkpointed_iteration.txt').read_text() == '7\n'


def test_no_process_is_started_while_locks_are_held(run, tmp_path, monkeypatch):
    """A child has its parent's locks until it executes: what the killed run left would stay."""
    held, started = [], []
    start = subprocess.Popen.__init__

    def record(self, *arguments, **options):
        started.append(bool(held))
        start(self, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, '__init__', record)
    monkeypatch.setattr(os, 'fork', lambda: started.append(bool(held)))
    monkeypatch.setattr(publish, 'step', held.append)
    merge(run[0], WEIGHTS, tmp_path / 'out', 7, verify=True, save_integrity=True)
    assert held[-1] == 'tracked 1' and not any(started)


@pytest.mark.usefixtures('default_signal_handlers')
@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize('when', ['staged', 'chunk', 'written', 'synced'])
def test_signals_leave_nothing(run, tmp_path, signum, when):
    root = start_root(tmp_path, 'root')

    def action():
        def stop(*_):
            os.kill(os.getpid(), signum)

        def step(name):
            if name == when:
                stop()

        publish.step = step
        if when == 'chunk':
            right = accumulate.ChunkMerger.merge
            # once: the threads' later chunks come after the handlers are gone
            once = [stop]
            accumulate.ChunkMerger.merge = lambda *a: (once and once.pop()(), right(*a))
        pairs = [f'{path}:{weight}' for path, weight in zip(run[0], WEIGHTS, strict=True)]
        return main(
            ['--merge-inputs', *pairs, '--merge-output', str(root), '--output-iteration', '7']
        )

    _, status = os.waitpid(forked(action), 0)
    assert os.WEXITSTATUS(status) == 128 + signum
    assert tree(root) == {'latest_checkpointed_iteration.txt': b'1'}


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


def test_disk_full_at_any_point(run, expected, tmp_path, capfd):
    disk = tmp_path / 'disk'
    outcomes = []
    for pages in range(1, 24):
        with small_tmpfs(disk, pages * 4096):
            try:
                merge(run[0], WEIGHTS, disk / 'out', 7, threads=2, save_integrity=True)
            except CheckpointError as error:
                assert 'No space left on device' in str(error) and '\n' not in str(error)
                assert list(disk.iterdir()) == []
                outcomes.append('full')
            else:
                assert_same(load_tensors(disk / 'out/iter_0000007'), expected)
                outcomes.append('fits')
    assert outcomes == sorted(outcomes, reverse=True) and {'full', 'fits'} == set(outcomes)
    assert 'Traceback' not in capfd.readouterr().err


def test_read_errors(run, tmp_path, monkeypatch, capfd):
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
            merge(run[0], WEIGHTS, tmp_path / 'deep/out', threads=2)
        assert list(tmp_path.iterdir()) == []
    assert 'Traceback' not in capfd.readouterr().err


def test_file_that_shrinks_while_merging(run, tmp_path, monkeypatch):
    right = os.preadv
    monkeypatch.setattr(os, 'preadv', lambda d, b, o: 0 if o > 20000 else right(d, b, o))
    with pytest.raises(CheckpointError, match='ends at .*, expected data up to'):
        merge(run[0], WEIGHTS, tmp_path / 'out')
    assert list(tmp_path.iterdir()) == []


def test_permissions_follow_umask_and_parent(run, tmp_path):
    parent = tmp_path / 'parent'
    parent.mkdir()
    os.chmod(parent, 0o2775)
    before = os.umask(0o027)
    try:
        merge(run[0], WEIGHTS, parent, 7)
    finally:
        os.umask(before)
    for path in [*parent.rglob('*')]:
        wanted = 0o2750 if path.is_dir() else 0o640
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


# --- reading once, and little memory


@pytest.mark.parametrize('threads', [1, 2])
def test_each_source_chunk_is_read_exactly_once(run, tmp_path, monkeypatch, threads):
    paths, models = run
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
