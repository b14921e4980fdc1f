"""Conversion of real dp_reshardable checkpoints: damage, refusals, kills, the command line."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.unit_tests.tools.checkpoint.handmade import tree
from tests.unit_tests.tools.checkpoint.merge_ranks import convert_misled, converts, start
from tests.unit_tests.tools.checkpoint.optimizer_twins import differences, make_twins
from tools.checkpoint.common import publish
from tools.checkpoint.common.dcp_metadata import load_dcp_metadata
from tools.checkpoint.common.directory import resolve_checkpoint
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.convert_ckpt_optimizer import convert_optimizer, main
from tools.checkpoint.optimizer_layouts.checkpoint import read_checkpoint
from tools.checkpoint.optimizer_layouts.order import possible_orders
from tools.checkpoint.optimizer_layouts.parameters import read_model

REPOSITORY = Path(__file__).resolve().parents[4]
STEPS = ['staged', 'written', 'completed', 'synced', 'renamed 1', 'unmarked', 'tracked 1']
BUCKET = 'optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)'


@pytest.fixture(scope='module')
def twins(tmp_path_factory):
    """TP 2, bf16, gated, tied; every layer norm is still 1 or 0 but for three small steps."""
    directory = tmp_path_factory.mktemp('twins')
    arguments = ['--bf16', '--swiglu', '--tensor-model-parallel-size', '2', '--save-interval', '2']
    return make_twins(directory, 2, *arguments)


@pytest.fixture
def source(twins, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(twins.in_buckets, tmp_path / 'source'))


def edit_metadata(root: Path, edit) -> None:
    directory = resolve_checkpoint(root)
    metadata = load_dcp_metadata(directory)
    edit(metadata)
    (directory / '.metadata').write_bytes(pickle.dumps(metadata))


def chunk_indices(root: Path, key: str) -> list[MetadataIndex]:
    """The stored chunks of a tensor, largest first."""
    entry = load_dcp_metadata(resolve_checkpoint(root)).state_dict_metadata[key]
    chunks = sorted(entry.chunks, key=lambda chunk: -chunk.sizes.numel())
    return [MetadataIndex(key, chunk.offsets) for chunk in chunks]


def equal_chunks(root: Path, key: str) -> list[MetadataIndex]:
    """The largest two chunks of one size: parameters of the two layers."""
    entry = load_dcp_metadata(resolve_checkpoint(root)).state_dict_metadata[key]
    sizes = {chunk.offsets: chunk.sizes.numel() for chunk in entry.chunks}
    largest = max(size for size in sizes.values() if [*sizes.values()].count(size) == 2)
    return [MetadataIndex(key, offset) for offset in sizes if sizes[offset] == largest]


def flip_bit(root: Path, index: MetadataIndex, byte: int) -> None:
    """Flip the lowest bit of a byte of an element in the middle of a stored chunk."""
    directory = resolve_checkpoint(root)
    place = load_dcp_metadata(directory).storage_data[index]
    path = directory / place.relative_path
    content = bytearray(path.read_bytes())
    archive = bytes(content[place.offset : place.offset + place.length])
    name = archive.index(b'data/0') + len(b'data/0')
    middle = (name + archive.index(b'data/0', name)) // 2
    content[place.offset + middle // 64 * 64 + byte] ^= 1
    path.write_bytes(content)


def refused(root: Path, tmp_path: Path, *found: str) -> str:
    """The message; nothing is written."""
    with pytest.raises(CheckpointError) as error:
        convert_optimizer(root, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()
    message = str(error.value)
    assert '\n' not in message
    for words in found:
        assert words in message
    return message


def test_equals_the_twin(twins, tmp_path):
    result = convert_optimizer(twins.in_buckets, tmp_path / 'out', verify=True)
    assert differences(tmp_path / 'out', twins.by_parameter) == []
    assert result.proven == result.elements + result.copies
    assert result.copies > 0 and result.different_copies == {}
    weights = read_checkpoint(resolve_checkpoint(twins.in_buckets)).weights
    assert result.elements == sum(torch.Size(entry.shape).numel() for entry in weights.values())


def test_the_other_iteration(twins, tmp_path):
    convert_optimizer(twins.in_buckets, tmp_path / 'out', iteration=2)
    directories = [root / 'iter_0000002' for root in (tmp_path / 'out', twins.by_parameter)]
    assert differences(*directories) == []


def test_the_iteration_that_a_shell_is_in(twins, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(twins.in_buckets / 'iter_0000002')
    words = ['--load-dir', '.', '--save-dir', str(tmp_path / 'out'), '--dry-run']
    assert main([*words, '--iteration', '2']) == 0
    assert main([*words, '--iteration', '3']) == 1
    assert 'iter_0000002: the directory of one checkpoint, and not' in capsys.readouterr().err


def test_already_fully_reshardable(twins, tmp_path, capsys):
    assert main(['--load-dir', str(twins.by_parameter), '--save-dir', str(tmp_path / 'out')]) == 0
    assert 'fully_reshardable already' in capsys.readouterr().out
    assert not (tmp_path / 'out').exists()


def test_dry_run_tells_positions_and_writes_nothing(twins, tmp_path, capsys):
    arguments = ['--load-dir', str(twins.in_buckets), '--save-dir', str(tmp_path / 'out')]
    report = tmp_path / 'report.json'
    assert main([*arguments, '--dry-run', '--report-json', str(report)]) == 0
    told = capsys.readouterr().out
    assert re.search(r'dp_group_idx_1: 27 parameters, \d+ elements in 1 bucket\n', told)
    assert [p['parameters'] for p in json.loads(report.read_text())['positions']] == [27, 27]
    assert not (tmp_path / 'out').exists()


def test_a_report_replaces_nothing_but_a_report(twins, tmp_path, capsys):
    arguments = ['--load-dir', str(twins.in_buckets), '--save-dir', str(tmp_path / 'out')]
    arguments += ['--dry-run', '--report-json']
    (tmp_path / 'notes.json').write_text('{"notes": 1}')
    directory = resolve_checkpoint(twins.in_buckets)
    for file in (tmp_path / 'notes.json', directory / 'new.json', tmp_path / 'out'):
        assert main([*arguments, str(file)]) == 1
        error = capsys.readouterr().err
        assert f'--report-json {file}: ' in error and error.count('\n') == 1
    assert (tmp_path / 'notes.json').read_text() == '{"notes": 1}'
    assert not (directory / 'new.json').exists() and not (tmp_path / 'out').exists()
    for _ in range(2):
        assert main([*arguments, str(tmp_path / 'report.json')]) == 0


@pytest.mark.parametrize('key', ['.param', '.exp_avg', '.exp_avg_sq'])
def test_pieces_exchanged(source, tmp_path, key):
    """In param the contents tell; where all three are exchanged param does."""
    bucket = f'{BUCKET}.bucket_idx_0'
    one, other = equal_chunks(source, f'{bucket}.param')

    def exchange(metadata):
        storage = metadata.storage_data
        for state in {'.param', key}:
            a, b = (MetadataIndex(bucket + state, index.offset) for index in (one, other))
            storage[a], storage[b] = storage[b], storage[a]

    edit_metadata(source, exchange)
    refused(source, tmp_path, f'{BUCKET}.bucket_idx_0.param', 'do not belong together')


def test_bucket_of_another_step(source, tmp_path):
    def take_older(metadata):
        older = load_dcp_metadata(source / 'iter_0000002').storage_data
        for index in metadata.storage_data:
            if index.fqn == f'{BUCKET}.bucket_idx_0.param':
                metadata.storage_data[index] = older[index]

    shutil.copy(source / 'iter_0000002' / '__0_0.distcp', source / 'iter_0000003' / 'old.distcp')
    edit_metadata(source, take_older)

    def rename(metadata):
        for index, place in metadata.storage_data.items():
            if index.fqn == f'{BUCKET}.bucket_idx_0.param':
                place.relative_path = 'old.distcp'

    edit_metadata(source, rename)
    refused(source, tmp_path, 'do not belong together')


@pytest.mark.parametrize(
    ('key', 'byte'),
    [('decoder.layers.mlp.linear_fc1.weight', 0), (f'{BUCKET}.bucket_idx_0.param', 2)],
)
def test_one_flipped_bit(source, tmp_path, key, byte):
    """The last bit of a weight, and that of a main parameter which it is rounded to."""
    flip_bit(source, chunk_indices(source, key)[0], byte)
    before = tree(source)
    refused(source, tmp_path)
    assert tree(source) == before


def test_wrong_swiglu(source, tmp_path):
    set_argument(source, 'swiglu', False)
    refused(source, tmp_path, 'linear_fc1.weight', 'swiglu False')


def test_quantised_weights(source, tmp_path):
    """They would be refused as damaged, at the first of them."""
    set_argument(source, 'fp8_param_gather', True)
    refused(source, tmp_path, 'fp8_param_gather', '--dist-ckpt-optim-fully-reshardable')


def set_argument(root: Path, name: str, value: object) -> None:
    change_common_state(root, lambda state: setattr(state['args'], name, value))


def change_common_state(root: Path, change) -> None:
    """Change the common state, which moves to a file of its own."""
    directory = resolve_checkpoint(root)
    checkpoint = read_checkpoint(directory)
    change(checkpoint.common.state)
    torch.save(checkpoint.common.state, directory / 'common.pt')
    leave_out(root, 'common_state/')


def leave_out(root: Path, start: str) -> None:
    """Take the entries whose keys begin so out of the metadata."""

    def change(metadata):
        for entries in (metadata.state_dict_metadata, metadata.storage_data):
            for key in [k for k in entries if getattr(k, 'fqn', k).startswith(start)]:
                del entries[key]

    edit_metadata(root, change)


def test_missing_state(source, tmp_path):
    leave_out(source, f'{BUCKET}.bucket_idx_0.exp_avg_sq')
    refused(source, tmp_path, 'no exp_avg_sq')


def test_missing_weight(source, tmp_path):
    leave_out(source, 'decoder.final_layernorm.bias')
    refused(source, tmp_path, "don't fill")


def test_truncated_file(source, tmp_path):
    file = resolve_checkpoint(source) / '__1_0.distcp'
    os.truncate(file, file.stat().st_size - 100)
    refused(source, tmp_path, '__1_0.distcp', 'truncated')


def test_existing_output(twins, tmp_path):
    (tmp_path / 'out' / 'iter_0000003').mkdir(parents=True)
    with pytest.raises(CheckpointError, match='exists'):
        convert_optimizer(twins.in_buckets, tmp_path / 'out')


def test_orders_of_a_model(twins):
    """One place for each parameter in every order; fused and separate norms are told apart."""
    checkpoint = read_checkpoint(resolve_checkpoint(twins.in_buckets))
    parameters = read_model(checkpoint, False).parameters
    orders = list(possible_orders(parameters))
    assert len(orders) == 4
    for order in orders:
        assert len({order.key(parameter) for parameter in parameters}) == len(parameters)


@pytest.mark.parametrize('name', STEPS)
def test_stopped_at_each_step(twins, tmp_path, monkeypatch, name):
    """An error anywhere publishes all or nothing."""

    def stop(reached):
        if reached == name:
            raise CheckpointError(f'stopped at {name}')

    monkeypatch.setattr(publish, 'step', stop)
    out = tmp_path / 'out'
    with pytest.raises(CheckpointError, match='stopped'):
        convert_optimizer(twins.in_buckets, out)
    monkeypatch.undo()
    if name in ('unmarked', 'tracked 1'):
        assert differences(out / 'iter_0000003', twins.by_parameter) == []
    else:
        assert not out.exists()


KILLED = """
import os, signal, sys
from tools.checkpoint.common.overlay import why_not_active
why_not_active()
from tools.checkpoint.common import publish
publish.step = lambda name: name == sys.argv[3] and os.kill(os.getpid(), signal.SIGKILL)
from tools.checkpoint.convert_ckpt_optimizer import convert_optimizer
convert_optimizer(sys.argv[1], sys.argv[2])
"""


@pytest.mark.parametrize('name', ['written', 'synced', 'unmarked'])
def test_killed_and_run_again(twins, tmp_path, name):
    out = tmp_path / 'out'
    killed = subprocess.run(
        [sys.executable, '-c', KILLED, str(twins.in_buckets), str(out), name],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -9, killed.stderr
    if name == 'unmarked':
        with pytest.raises(CheckpointError, match='had finished it'):
            convert_optimizer(twins.in_buckets, out)
    else:
        assert not (out / 'iter_0000003').exists()
        convert_optimizer(twins.in_buckets, out)
    assert differences(out, twins.by_parameter) == []
    assert [path.name for path in out.iterdir() if path.name.startswith('.')] == []


def test_two_ranks(twins, tmp_path):
    from tests.cpu_megatron.torchrun import torchrun

    out = tmp_path / 'out'
    arguments = ['--load-dir', str(twins.in_buckets), '--save-dir', str(out), '--verify']
    run = torchrun(2, 'tools.checkpoint.convert_ckpt_optimizer', *arguments)
    assert 'converted dp_reshardable' in run.stdout
    assert differences(out, twins.by_parameter) == []


def test_eight_ranks(twins, tmp_path):
    found = start(8, converts, twins.in_buckets, tmp_path / 'eight')
    assert found == dict.fromkeys(range(8), found[0]), found
    alone = convert_optimizer(twins.in_buckets, tmp_path / 'alone')
    total = alone.elements + alone.copies
    assert found[0][:2] == (alone.bytes_read, total) and len(found[0][2]) == 8
    for expected in (twins.by_parameter, tmp_path / 'alone'):
        assert differences(tmp_path / 'eight', expected) == []


@pytest.mark.parametrize('misled', [0, 1])
def test_a_rank_that_sees_another_checkpoint(twins, tmp_path, misled):
    """At the same path, as on disks of each machine's own: each rank's part would be proven."""
    path = resolve_checkpoint(twins.in_buckets)
    other = shutil.copytree(path, tmp_path / 'other')
    with open(other / '.metadata', 'ab') as file:  # as of another save
        file.write(b'.')
    found = start(2, convert_misled, misled, path, other, tmp_path / 'out')
    if str(found.get(misled, '')).startswith('cannot'):
        pytest.skip(f'no mount namespaces here: {found[misled]}')
    assert len(found) == 2 and found[0] == found[1], found
    assert 'another checkpoint than rank 0 sees' in found[0]
    assert not (tmp_path / 'out').exists()
