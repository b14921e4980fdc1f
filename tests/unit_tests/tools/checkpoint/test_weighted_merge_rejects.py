"""Weighted merge: what is refused before anything is written, each with one line that names it."""

import io
import json
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from tests.unit_tests.tools.checkpoint.handmade import (
    LAYOUT,
    assert_same,
    load_tensors,
    model_tensors,
    plain_merge,
    write_checkpoint,
)
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.weighted_merge import main
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge

EXTRA = {'decoder.layers.mlp.linear_fc1._extra_state': b'state'}
QKV = 'decoder.layers.self_attention.linear_qkv.weight'


@pytest.fixture(scope='module')
def good(tmp_path_factory):
    root = tmp_path_factory.mktemp('good')
    return write_checkpoint(root / 'iter_0000001', model_tensors(1), extra_states=EXTRA)


def refused(good, bad, tmp_path, *parts, **options):
    """In both orders: one line with ``parts`` that names the culprit, and nothing written."""
    out = tmp_path / 'deep/out'
    for pair in ([good, bad], [bad, good]):
        with pytest.raises(CheckpointError) as caught:
            merge(pair, [0.5, 0.5], out, **options)
        message = str(caught.value)
        assert '\n' not in message
        for part in parts:
            assert part in message, message
        assert str(bad) in message, message
    assert not (tmp_path / 'deep').exists()


def variant(tmp_path, change=lambda model: None, extra=EXTRA, layout=LAYOUT, **options):
    model = model_tensors(2)
    change(model)
    return write_checkpoint(tmp_path / 'bad', model, extra_states=extra, layout=layout, **options)


def damaged(good, tmp_path, change):
    """A copy of the good checkpoint with ``change`` made to its metadata."""
    bad = tmp_path / 'bad'
    shutil.copytree(good, bad)
    metadata = dcp.FileSystemReader(bad).read_metadata()
    change(metadata)
    (bad / '.metadata').write_bytes(pickle.dumps(metadata))
    return bad


def test_key_sets(good, tmp_path):
    bad = variant(tmp_path, lambda m: m.update({'decoder.other': m.pop('output_layer.weight')}))
    refused(good, bad, tmp_path, 'missing', 'unexpected', 'decoder.other', 'output_layer.weight')


def test_extra_state_sets(good, tmp_path):
    refused(good, variant(tmp_path, extra={}), tmp_path, '_extra_state', 'linear_fc1._extra_state')


def test_global_shape(good, tmp_path):
    bad = variant(tmp_path, lambda m: m.update({QKV: m[QKV][:, :36]}))
    refused(good, bad, tmp_path, QKV, '(2, 36, 24)', '(2, 72, 24)')


def test_layout(good, tmp_path):
    bad = variant(tmp_path, layout={})
    refused(good, bad, tmp_path, 'chunk layout', '1 chunks', '4 chunks', '--allow-reshard')


def test_dtype(good, tmp_path):
    bad = variant(tmp_path, lambda m: m.update({QKV: m[QKV].half()}))
    refused(good, bad, tmp_path, QKV, 'float16', 'bfloat16')


@pytest.mark.parametrize('dtype', [torch.int64, torch.complex64, torch.uint8])
def test_dtypes_that_can_not_be_averaged(good, tmp_path, dtype):
    bad = variant(tmp_path, lambda m: m.update({'decoder.count': torch.arange(4).to(dtype)}))
    name = str(dtype).removeprefix('torch.')
    refused(good, bad, tmp_path, 'decoder.count', name, 'expected one of bfloat16, float16')


def test_extra_state_that_is_a_tensor_in_one_and_bytes_in_another(good, tmp_path):
    key = next(iter(EXTRA))
    bad = variant(tmp_path, lambda m: m.update({key: torch.ones(4)}), extra={})
    for text in (f'bytes in {good}', f'a tensor in {bad}'):
        refused(good, bad, tmp_path, key, text)
    shards = variant(tmp_path / 'shards', lambda m: m.update({key: torch.ones(4)}), extra={})
    with pytest.raises(CheckpointError, match=f'{key}: stored as bytes in {good}, as a tensor in'):
        merge([shards], [1], tmp_path / 'out', common_state_checkpoint=good)


@pytest.mark.parametrize('key', ['decoder.layers.notes', 'embedding.extra_state', 'model.x_extra'])
def test_bytes_in_the_model_that_are_no_extra_state(good, tmp_path, key):
    bad = variant(tmp_path, extra={**EXTRA, key: b'x'})
    refused(good, bad, tmp_path, key, 'bytes', '_extra_state')


@pytest.mark.parametrize('key', ['vision_model.w', 'modelx.w', 'encoder.w', 'xmodel.w'])
def test_tensors_outside_the_model(good, tmp_path, key):
    bad = variant(tmp_path, lambda m: m.update({key: torch.ones(3)}))
    for options in ({}, {'model_only': True}):  # a part of a model is never dropped silently
        refused(good, bad, tmp_path, key, 'outside the model', **options)


def test_bytes_outside_the_model(good, tmp_path):
    bad = variant(tmp_path, extra={**EXTRA, 'notes': b'x'})
    refused(good, bad, tmp_path, 'notes', 'outside the model')


@pytest.mark.parametrize(
    'key',
    [
        'optimizer.state.exp_avg.decoder.w',
        'optimizer.state.fp32_param.output_layer.weight',
        'chained_0.optimizer.state.exp_avg.decoder.w',
        'optimizer.distributed.dp_group_idx_0.x',
    ],
)
def test_training_state_is_refused_by_name_and_left_unread_on_request(good, tmp_path, key):
    bad = variant(
        tmp_path,
        lambda m: m.update({key: torch.full((5,), torch.nan)}),
        extra={**EXTRA, 'rng_state': b'rng', 'rerun_state_machine_state': b'r'},
    )
    refused(good, bad, tmp_path, 'training state', key, '--model-only')
    result = merge([bad, good], [0.5, 0.5], tmp_path / 'out', model_only=True)
    assert result.left_out == 3
    models = [{k: v for k, v in model_tensors(s).items()} for s in (2, 1)]
    assert_same(load_tensors(tmp_path / 'out'), plain_merge(models, [0.5, 0.5]))


def chunk_of(metadata, index=0):
    return metadata.state_dict_metadata[QKV].chunks[index]


def move_chunk(metadata):
    chunk_of(metadata, 1).offsets = torch.Size((0, 0, 0))


def drop_chunk(metadata):
    metadata.state_dict_metadata[QKV].chunks.pop()


def widen_chunk(metadata):
    chunk_of(metadata).sizes = torch.Size((2, 20, 24))


def overlong_chunk(metadata):
    chunk_of(metadata, 3).sizes = torch.Size((2, 19, 24))


def lose_storage(metadata):
    index = next(i for i in metadata.storage_data if i.fqn == QKV)
    del metadata.storage_data[index]


def point_outside(metadata):
    next(iter(metadata.storage_data.values())).relative_path = '../other/__0_0.distcp'


def beyond_the_end(metadata):
    max(metadata.storage_data.values(), key=lambda place: place.offset).length += 10**6


def negative(metadata):
    next(i for k, i in metadata.storage_data.items() if k.fqn == QKV).offset = -4


def storage_of(metadata, key):
    return next(place for index, place in metadata.storage_data.items() if index.fqn == key)


def two_at_one_place(metadata):
    own, other = storage_of(metadata, QKV), storage_of(metadata, 'decoder.final_layernorm.weight')
    own.relative_path, own.offset, own.length = f'./{other.relative_path}', other.offset, own.length
    other.length = own.length


def into_the_next(metadata):
    storage_of(metadata, QKV).length += 1


def training_state_at_a_weight(metadata):
    own = storage_of(metadata, QKV)
    place = type(own)(own.relative_path, own.offset, own.length)
    metadata.state_dict_metadata['rng_state/shard_0_1'] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex('rng_state/shard_0_1')] = place


def transformed(metadata):
    info = next(i for k, i in metadata.storage_data.items() if k.fqn == QKV)
    info.transform_descriptors = ['zstd']


def untyped(metadata):
    metadata.state_dict_metadata[QKV] = BytesStorageMetadata()


@pytest.mark.parametrize(
    'change, part',
    [
        (move_chunk, 'stored twice'),
        (drop_chunk, 'chunks cover'),
        (widen_chunk, 'chunks overlap'),
        (overlong_chunk, 'lies outside the tensor'),
        (lose_storage, 'no storage for'),
        (point_outside, 'outside the checkpoint'),
        (beyond_the_end, 'truncated'),
        (negative, 'damaged (storage of'),
        (two_at_one_place, 'are stored at the same bytes'),
        (into_the_next, 'are stored at the same bytes'),
        (training_state_at_a_weight, 'are stored at the same bytes'),
        (transformed, 'expected plain'),
        (untyped, 'expected a tensor'),
    ],
)
def test_metadata_that_can_not_be_true(good, tmp_path, change, part):
    bad = damaged(good, tmp_path, change)
    shutil.copytree(good, tmp_path / 'other')
    if change is untyped:  # its storage is under the chunk's index, not under the key's
        part = QKV
    refused(good, bad, tmp_path, part)


def test_files_missing_or_short(good, tmp_path):
    for name, action, part in (
        ('missing', lambda f: f.unlink(), 'No such file'),
        ('short', lambda f: f.write_bytes(f.read_bytes()[:-50]), 'truncated'),
        ('empty', lambda f: f.write_bytes(b''), '0 bytes'),
    ):
        bad = tmp_path / name
        shutil.copytree(good, bad)
        action(bad / '__0_0.distcp')
        refused(good, bad, tmp_path, '__0_0.distcp', part)


@pytest.mark.parametrize('name', ['.metadata', 'metadata.json'])
def test_unfinished_checkpoints(good, tmp_path, name):
    bad = tmp_path / 'bad'
    shutil.copytree(good, bad)
    (bad / name).unlink()
    refused(good, bad, tmp_path, name)


def test_an_unfinished_checkpoint_in_a_range_is_named(good, tmp_path, capsys):
    for iteration in (1, 2, 3):
        shutil.copytree(good, tmp_path / f'root/iter_000000{iteration}')
    (tmp_path / 'root/iter_0000002/.metadata').unlink()
    arguments = [
        '--merge-inputs',
        str(tmp_path / 'root'),
        '--end-checkpoint',
        '3',
        '--merge-output',
        str(tmp_path / 'out'),
        '--start-checkpoint',
    ]
    assert main([*arguments, '1']) == 1
    assert 'iter_0000002/.metadata' in capsys.readouterr().err
    assert main([*arguments, '3']) == 0  # out of the range it doesn't matter


@pytest.mark.parametrize(
    'config, part',
    [
        ({'sharded_backend': 'fsdp_dtensor'}, 'fsdp_dtensor'),
        ({'sharded_backend': 'zarr'}, 'zarr'),
        ({}, 'None'),
        ([], 'None'),
        ('text', 'no readable JSON'),
        ('[' * 100_000, 'no readable JSON'),
        (
            {'sharded_backend': 'torch_dist', 'sharded_backend_version': 2},
            'sharded_backend_version 2, expected 1',
        ),
        (
            {'sharded_backend': 'torch_dist', 'sharded_backend_version': True},
            'sharded_backend_version True, expected 1',
        ),
        ({'sharded_backend': 'torch_dist', 'packing': 3}, 'formats differ'),
    ],
)
def test_other_formats(good, tmp_path, config, part):
    bad = tmp_path / 'bad'
    shutil.copytree(good, bad)
    text = config if isinstance(config, str) else json.dumps(config)
    (bad / 'metadata.json').write_text(text)
    refused(good, bad, tmp_path, part)


@pytest.mark.parametrize(
    'name, part',
    [
        ('mp_rank_00/model_optim_rng.pt', 'legacy'),
        ('model.safetensors', 'Hugging Face'),
        ('pytorch_model.bin', 'not a checkpoint'),
    ],
)
def test_other_kinds_of_checkpoint(good, tmp_path, name, part):
    file = tmp_path / 'bad' / name
    file.parent.mkdir(parents=True)
    file.write_bytes(b'x')
    refused(good, tmp_path / 'bad', tmp_path, part)


def test_a_chunk_that_is_not_what_the_metadata_says(good, tmp_path):
    """Found while merging, since only the chunk itself tells: nothing is published either."""

    def lie(metadata):
        entry = metadata.state_dict_metadata['output_layer.weight']
        entry.size = torch.Size((24, 131))
        for chunk in entry.chunks:
            chunk.sizes = torch.Size(tuple(chunk.sizes)[::-1])
            chunk.offsets = torch.Size(tuple(chunk.offsets)[::-1])
        for index in list(metadata.storage_data):
            if index.fqn == 'output_layer.weight':
                info = metadata.storage_data.pop(index)
                metadata.storage_data[type(index)(index.fqn, tuple(index.offset)[::-1])] = info

    bad = damaged(good, tmp_path, lie)
    with pytest.raises(CheckpointError, match='output_layer.weight: holds .* the metadata says'):
        merge([bad], [1.0], tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_nothing_to_merge(good, tmp_path):
    with pytest.raises(CheckpointError, match='no checkpoints'):
        merge([], [], tmp_path / 'out')
    with pytest.raises(CheckpointError, match="doesn't exist"):
        merge([tmp_path / 'nowhere'], [1], tmp_path / 'out')


def test_equal_files_that_are_links_to_one(good, tmp_path):
    """Storage that keeps equal files once isn't entries at the same bytes."""
    shutil.copytree(good, tmp_path / 'linked')
    metadata = dcp.FileSystemReader(good).read_metadata()
    place = storage_of(metadata, QKV)
    (tmp_path / 'linked/again.distcp').hardlink_to(tmp_path / 'linked' / place.relative_path)
    place.relative_path = 'again.distcp'
    (tmp_path / 'linked/.metadata').write_bytes(pickle.dumps(metadata))
    merge([good, tmp_path / 'linked'], [0.5, 0.5], tmp_path / 'out')
    model = model_tensors(1)
    assert_same(load_tensors(tmp_path / 'out'), plain_merge([model, model], [0.5, 0.5]))


def payload(tensor, **options):
    buffer = io.BytesIO()
    torch.save(tensor, buffer, **options)
    return buffer.getvalue()


NORM = 'decoder.final_layernorm.weight'
PAYLOADS = {
    'protocol 4': (lambda value: payload(value, pickle_protocol=4), None),
    'protocol 5': (lambda value: payload(value, pickle_protocol=5), None),
    'before zip files': (lambda v: payload(v, _use_new_zipfile_serialization=False), None),
    'a parameter': (lambda value: payload(torch.nn.Parameter(value)), None),
    'sparse': (lambda value: payload(value.to_sparse()), 'in the layout sparse_coo, not dense'),
    'meta': (lambda value: payload(value.to('meta')), 'without elements'),
    'a list': (lambda value: payload([value]), 'list'),
    'of another dtype': (lambda value: payload(value.half()), 'torch.float16'),
}


@pytest.mark.parametrize('kind', PAYLOADS)
def test_payloads_of_other_writers(good, tmp_path, kind):
    """Every dense tensor of that dtype and shape is one, however it was saved."""
    write, fault = PAYLOADS[kind]
    model = model_tensors(1)

    def replace(metadata):
        place = storage_of(metadata, NORM)
        place.relative_path, place.offset = 'other.distcp', 0
        place.length = len(write(model[NORM]))

    bad = damaged(good, tmp_path, replace)
    (bad / 'other.distcp').write_bytes(write(model[NORM]))
    if fault is None:
        merge([bad], [0.5], tmp_path / 'out', verify=True)
        assert_same(load_tensors(tmp_path / 'out'), plain_merge([model], [0.5]))
    else:
        with pytest.raises(CheckpointError, match=f'other.distcp: {NORM}: holds .*{fault}'):
            merge([bad], [0.5], tmp_path / 'out')
