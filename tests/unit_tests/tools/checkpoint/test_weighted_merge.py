"""Weighted merge: exactness, checks of values, library use."""

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing

from tests.cpu_megatron.whole_checkpoint import ALONE
from tests.unit_tests.tools.checkpoint.handmade import (
    LAYOUT,
    assert_same,
    copied,
    load_tensors,
    model_tensors,
    plain_merge,
    write_checkpoint,
    write_run,
)
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.merge import accumulate
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge

ROUTER = 'decoder.layers.mlp.router.expert_bias'


@pytest.fixture
def out(tmp_path):
    return tmp_path / 'out'


# --- exactness


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize('weights', [[0.5, 0.3, 0.2], [-0.7, 2.1, 1 / 3], [1e-8, 0.0, 1.0]])
def test_bit_identical_to_the_plain_loop(tmp_path, monkeypatch, dtype, weights):
    paths, models = write_run(tmp_path, [1, 2, 3], dtype)
    for block in (1, 7, 64, 1000, 1 << 17):
        if block == 1 and dtype != torch.bfloat16:
            continue
        out = tmp_path / f'out-{block}'
        monkeypatch.setattr(accumulate, 'BLOCK_ELEMENTS', block)
        merge(paths, weights, out, threads=2)
        assert_same(load_tensors(out), plain_merge(models, weights))


def test_the_default_dtype_takes_no_part(tmp_path, out):
    weights = [0.5, 0.3, 0.2]
    paths, models = write_run(tmp_path, [1, 2, 3], torch.bfloat16)
    expected = plain_merge(models, weights)
    torch.set_default_dtype(torch.bfloat16)
    try:
        merge(paths, weights, out, verify=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(load_tensors(out), expected)


def test_large_odd_tensors_against_the_whole_tensor_loop(tmp_path):
    generator = torch.Generator().manual_seed(0)
    models = [
        {'decoder.w': torch.randn(3, 333_331, generator=generator).bfloat16()} for _ in range(4)
    ]
    paths = [write_checkpoint(tmp_path / f'{i}', m) for i, m in enumerate(models)]
    weights = [0.1, 0.2, 0.30000001, 0.4]
    result = merge(paths, weights, tmp_path / 'out', verify=True)
    assert_same(load_tensors(tmp_path / 'out'), plain_merge(models, weights))
    assert result.bytes_read == 4 * 3 * 333_331 * 2


@pytest.mark.parametrize('dtype', [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8(tmp_path, dtype):
    weights = [0.3, 0.9, -0.2]
    models = [
        {key: value.float().clamp(-40, 40).to(dtype) for key, value in model_tensors(s).items()}
        for s in (1, 2, 3)
    ]
    paths = [write_checkpoint(tmp_path / f'{i}', model) for i, model in enumerate(models)]
    again = write_checkpoint(tmp_path / 'other layout', models[2], layout={})
    for save in ('same', 'bfloat16'):
        out = tmp_path / save
        result = merge(
            [*paths[:2], again], weights, out, save_dtype=save, allow_reshard=True, verify=True
        )
        assert any('scales stored apart' in text for text in result.warnings)
        found = load_tensors(out)
        for key, value in plain_merge(
            models, weights, None if save == 'same' else torch.bfloat16
        ).items():
            assert found[key].dtype == value.dtype
            assert torch.equal(found[key].view(torch.uint8), value.view(torch.uint8)), key
            assert found[key].float().isfinite().all()
    big = {key: torch.full_like(value, 416) for key, value in models[0].items()}
    path = write_checkpoint(tmp_path / 'big', big)
    largest = f'{torch.finfo(dtype).max:.6g}'
    with pytest.raises(CheckpointError, match=rf'is beyond float8_\S+ \({largest}\)'):
        merge([path], [300.0], tmp_path / 'x')
    if dtype == torch.float8_e4m3fn:  # its cast makes 448 of all that is larger
        merge([path], [1.1], tmp_path / 'rounded')  # 416 * 1.1 is nearest to 448
        rounded = load_tensors(tmp_path / 'rounded')['output_layer.weight']
        assert rounded.float().unique().tolist() == [448]
        with pytest.raises(CheckpointError, match=r'465.92 is beyond float8_e4m3fn'):
            merge([path], [1.12], tmp_path / 'x')
    big['output_layer.weight'][3, 5] = torch.nan
    with pytest.raises(CheckpointError, match='1 values in one block are not finite'):
        merge([write_checkpoint(tmp_path / 'nan', big)], [1.0], tmp_path / 'x')
    assert not (tmp_path / 'x').exists()


@pytest.mark.parametrize('save', ['float32', 'float16', 'bfloat16'])
def test_save_dtype(five, out, save):
    _, paths, models = five
    result = merge(paths[:2], [0.5, 0.5], out, save_dtype=save)
    expected = plain_merge(models[:2], [0.5, 0.5], getattr(torch, save))
    assert_same(load_tensors(out), expected)
    assert result.narrowed == ([] if save == 'float32' else [ROUTER])


def test_keep_fp32_holds_back(five, out):
    _, paths, models = five
    result = merge(paths[:2], [0.5, 0.5], out, save_dtype='float16', keep_fp32=['*.expert_bias'])
    expected = plain_merge(models[:2], [0.5, 0.5], torch.float16)
    expected[ROUTER] = plain_merge(models[:2], [0.5, 0.5])[ROUTER]
    assert_same(load_tensors(out), expected)
    assert result.narrowed == []


def test_inputs_of_different_dtype_are_first_given_one(tmp_path):
    models = [model_tensors(1, torch.float32), model_tensors(2, torch.bfloat16)]
    paths = [write_checkpoint(tmp_path / f'{i}', m) for i, m in enumerate(models)]
    for save in ('same', 'bfloat16', 'float32'):
        with pytest.raises(CheckpointError, match='bfloat16, expected torch.float32; a merge'):
            merge(paths, [0.5, 0.5], tmp_path / 'out', save_dtype=save)
    paths[1] = tmp_path / 'wide'
    merge([tmp_path / '1'], [1.0], paths[1], save_dtype='float32')
    merge(paths, [0.5, 0.5], tmp_path / 'out', save_dtype='bfloat16', verify=True)
    assert_same(load_tensors(tmp_path / 'out'), plain_merge(models, [0.5, 0.5], torch.bfloat16))


def test_one_checkpoint_with_weight_one_comes_back(five, out):
    _, paths, models = five
    merge(paths[:1], [1.0], out)
    assert_same(load_tensors(out), models[0])


def test_sixty_four_checkpoints_and_zero_weights(tmp_path):
    few, models = write_run(tmp_path / 'few', range(4))
    paths = [copied(few[i % 4], tmp_path / f'{i}') for i in range(64)]
    models = [models[i % 4] for i in range(64)]
    weights = [0.0 if i % 3 else i / 64 for i in range(64)]
    merge(paths, weights, tmp_path / 'out', threads=2, verify=True)
    assert_same(load_tensors(tmp_path / 'out'), plain_merge(models, weights))
    merge(paths[:2], [0.0, 0.0], tmp_path / 'zero')
    assert not any(value.any() for value in load_tensors(tmp_path / 'zero').values())


def test_merging_its_own_balanced_output_again(five, tmp_path):
    _, paths, models = five
    merge(paths[:2], [0.5, 0.5], tmp_path / 'a', balance_rank_work=True)
    again = merge([tmp_path / 'a', paths[2]], [0.5, 0.5], tmp_path / 'b', verify=True)
    expected = plain_merge([plain_merge(models[:2], [0.5, 0.5]), models[2]], [0.5, 0.5])
    assert_same(load_tensors(tmp_path / 'b'), expected)
    assert again.averaged_tensors == len(expected) and again.copied_extra_states == 1


def test_scalars_empty_and_strided_tensors(tmp_path):
    """What a plain DCP save can hold besides: read through torch.load where it isn't plain."""
    paths = []
    models = [
        {
            'model.scalar': torch.tensor(1.5 + s),
            'model0.empty': torch.empty(0, 4),
            'model12.strided': torch.arange(30.0).view(5, 6).t() * (s + 1),
            'decoder.double': torch.randn(7, dtype=torch.float64),
            'mtp.half': torch.arange(8.0).mul(s + 1).half(),
        }
        for s in range(3)
    ]
    for index, model in enumerate(models):
        path = tmp_path / f'{index}'
        dcp.save(model, checkpoint_id=path, **ALONE)
        (path / 'metadata.json').write_text('{"sharded_backend": "torch_dist"}')
        paths.append(path)
    merge(paths, [0.5, 0.25, 0.25], tmp_path / 'out', verify=True)
    found = {key: torch.empty_like(value) for key, value in models[0].items()}
    dcp.load(found, checkpoint_id=tmp_path / 'out', **ALONE)
    for key, value in plain_merge(models, [0.5, 0.25, 0.25]).items():
        assert torch.equal(found[key].float(), value.float()), key


# --- chunk layouts


def test_differing_layouts_need_allow_reshard(tmp_path):
    models = [model_tensors(s) for s in range(3)]
    layouts = [
        LAYOUT,
        {
            'decoder.layers.self_attention.linear_qkv.weight': (2, 3),
            'output_layer.weight': (1, 2),
            'embedding.word_embeddings.weight': (1, 4),
        },
        {},
    ]
    paths = [
        write_checkpoint(tmp_path / f'{i}', model, layout=layout)
        for i, (model, layout) in enumerate(zip(models, layouts, strict=True))
    ]
    weights = [0.5, 0.3, 0.2]
    with pytest.raises(CheckpointError, match='chunk layout .* --allow-reshard'):
        merge(paths, weights, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()
    for first in range(3):
        order = [(first + i) % 3 for i in range(3)]
        out = tmp_path / f'out{first}'
        merge([paths[i] for i in order], weights, out, allow_reshard=True, verify=True)
        assert_same(load_tensors(out), plain_merge([models[i] for i in order], weights))
        # the output has the first source's layout: merges with it without the switch
        merge([out, paths[order[0]]], [0.5, 0.5], tmp_path / f'again{first}')


# --- checks of values


def with_value(tmp_path, name, value, dtype=torch.bfloat16):
    model = model_tensors(3, dtype)
    model['output_layer.weight'][77, 5] = value
    return write_checkpoint(tmp_path / name, model), model


@pytest.mark.parametrize('value', [math.inf, -math.inf, math.nan])
def test_nonfinite_inputs(tmp_path, value):
    bad, model = with_value(tmp_path, 'bad', value)
    good = write_checkpoint(tmp_path / 'good', model_tensors(4))
    for pair in ([bad, good], [good, bad]):
        with pytest.raises(CheckpointError, match='bad.*output_layer.weight: 1 values.*nonfinite'):
            merge(pair, [0.5, 0.5], tmp_path / 'out')
    assert not (tmp_path / 'out').exists()
    result = merge([bad, good], [0.5, 0.5], tmp_path / 'out', allow_nonfinite=True, verify=True)
    assert result.nonfinite_inputs == {f'{bad}: output_layer.weight': 1}
    found = load_tensors(tmp_path / 'out')['output_layer.weight']
    assert int((~torch.isfinite(found)).sum()) == 1 and not math.isfinite(found[77, 5])


@pytest.mark.parametrize(
    'dtype, value, weights, save, advice',
    [
        ('float32', 6e4, [2, 0], 'float16', 'is beyond float16 (65504); use --merge-save-dtype bf'),
        ('float32', -7e4, [1, 0], 'float16', '-70000 is beyond float16'),
        ('float16', 6e4, [2, 0], 'same', 'use --merge-save-dtype bfloat16 or float32, or smaller'),
        ('float32', 3.397e38, [1, 0], 'bfloat16', 'use --merge-save-dtype float32, or smaller'),
        ('bfloat16', 3.389e38, [1.003, 0], 'same', 'use --merge-save-dtype float32, or smaller'),
        (
            'bfloat16',
            3e38,
            [2, 0],
            'same',
            'range of fp32, in which it is computed (3.4e38); use s',
        ),
        ('float32', 3e38, [2, 0], 'same', 'range of fp32'),
        ('float32', 3e38, [2, -1], 'same', 'range of fp32'),
        ('float32', 3e38, [1.2, 0], 'float32', 'range of fp32'),
        ('float32', 3e38, [1.2, 0], 'float16', 'range of fp32'),
        ('float64', 3e38, [2, 0], 'same', 'range of fp32'),
        (
            'float64',
            1e300,
            [1, 0],
            'same',
            'float64 values beyond fp32, in which sums are computed',
        ),
        ('float64', 1e300, [1e-300, 0], 'float32', 'no --merge-save-dtype merges them'),
        ('float64', -1e39, [0, 1], 'bfloat16', 'bad/__0_0.distcp holds float64 values'),
        ('float64', 7e4, [1, 0], 'float16', 'use --merge-save-dtype bfloat16 or float32'),
    ],
)
def test_overflow_of_merge_or_cast_ends_the_run(tmp_path, dtype, value, weights, save, advice):
    """The message says where the value is lost, and what would keep it."""
    dtype = getattr(torch, dtype)
    bad, _ = with_value(tmp_path, 'bad', value, dtype)
    good = write_checkpoint(tmp_path / 'good', model_tensors(4, dtype))
    for allow in (False, True):
        with pytest.raises(CheckpointError, match='output_layer.weight: the merged val') as caught:
            merge([bad, good], weights, tmp_path / 'out', save_dtype=save, allow_nonfinite=allow)
        assert advice in str(caught.value), caught.value
    assert not (tmp_path / 'out').exists()


def test_large_but_representable_values_pass(tmp_path):
    big, model = with_value(tmp_path, 'big', 6.5e4, torch.float16)
    model['decoder.final_layernorm.weight'][:] = 6.5e4
    paths = [big, write_checkpoint(tmp_path / 'other', model)]
    merge(paths, [0.5, 0.5], tmp_path / 'out', verify=True)


@pytest.mark.parametrize(
    'weights, options, message',
    [
        ([math.nan, 1], {}, 'not finite'),
        ([math.inf, 1], {}, 'not finite'),
        ([1e39, 1], {}, 'not finite in fp32'),
        ([1, -1], {'normalize': True}, 'positive sum'),
        ([-1, -2], {'normalize': True}, 'positive sum'),
        ([1], {}, '2 checkpoints, but 1 weights'),
        ([1, 1], {'save_dtype': 'int8'}, 'save dtype'),
        ([1, 1], {'byte_accounting': 'x'}, 'byte acc'),
        ([1, 1], {'threads': 0}, 'expected 1 or more'),
        ([1, 1], {'keep_fp32': ['*']}, 'no effect'),
        ([1, 1], {'keep_fp32': ['*.bais'], 'save_dtype': 'bfloat16'}, 'matches none'),
        ([1, 1], {'output_iteration': -1}, 'expected 0 or more'),
    ],
)
def test_wrong_weights_and_options(five, out, weights, options, message):
    with pytest.raises(ValueError, match=message):
        merge(five[1][:2], weights, out, **options)
    assert not out.exists()


def test_the_same_checkpoint_twice_is_refused(five, out, tmp_path):
    (tmp_path / 'link').symlink_to(five[1][0])
    with pytest.raises(CheckpointError, match='given twice'):
        merge([five[1][0], tmp_path / 'link'], [0.5, 0.5], out)


# --- library use


def test_many_times_in_one_process(five, tmp_path):
    _, paths, models = five
    expected = plain_merge(models[:2], [0.5, 0.5])
    threads = torch.get_num_threads()
    for index in range(5):
        merge(paths[:2], [0.5, 0.5], tmp_path / f'{index}')
    assert_same(load_tensors(tmp_path / '4'), expected)
    assert torch.get_num_threads() == threads


def test_verify_detects_a_wrong_output(five, out, monkeypatch):
    def wrong(self, job, readers, start, target, right=accumulate.ChunkMerger._merge_block):
        right(self, job, readers, start, target)
        if job.key == ROUTER:
            target[3] += 1e-3

    monkeypatch.setattr(accumulate.ChunkMerger, '_merge_block', wrong)
    with pytest.raises(CheckpointError, match=f'{ROUTER} .*differs from the weighted sum'):
        merge(five[1][:2], [0.5, 0.5], out, verify=True)
    assert not out.exists()


def test_integrity_manifests_are_checked_and_written(five, tmp_path):
    _, paths, _ = five
    source = copied(paths[0], tmp_path / 'source')
    merge([source, paths[1]], [0.5, 0.5], tmp_path / 'a', save_integrity=True)
    validation = dist_checkpointing.validation
    if hasattr(validation, 'verify_integrity_manifest'):  # core 0.19
        validation.verify_integrity_manifest(str(tmp_path / 'a'))
    merge([tmp_path / 'a', paths[1]], [0.5, 0.5], tmp_path / 'b', verify=True)
    file = tmp_path / 'a/__0_0.distcp'
    data = bytearray(file.read_bytes())
    data[-100] ^= 1  # in the archive's directory: the tensors are still as they were
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match='__0_0.distcp: SHA-256 .* the file has changed'):
        merge([tmp_path / 'a', paths[1]], [0.5, 0.5], tmp_path / 'c', verify=True)
    assert not (tmp_path / 'c').exists()
