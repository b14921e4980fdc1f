"""Conversion where weights don't tell all: frozen parameters, equal layer norms, half precision.

Runs of one process; each test's other answer is that of the same run saved ``fully_reshardable``.
"""

import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tests.cpu_megatron import warm
from tests.cpu_megatron.session import (
    Training,
    distributed_optimizer,
    gpt,
    hybrid,
    model_parallel,
)
from tests.unit_tests.tools.checkpoint.handmade import ensure_group
from tests.unit_tests.tools.checkpoint.optimizer_layout_runs import CASES
from tests.unit_tests.tools.checkpoint.optimizer_twins import Twins, differences, read_all
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.convert_ckpt_optimizer import convert_optimizer

STEPS = 2
BF16 = {'bf16': True}
PLAIN = {'normalization': 'RMSNorm', 'add_bias_linear': False, **BF16}
MOE = {'num_moe_experts': 4, 'gated_linear_unit': True, **BF16}
LATENT = {
    'multi_latent_attention': True,
    **dict.fromkeys(('q_lora_rank', 'kv_lora_rank'), 16),
    **dict.fromkeys(('qk_head_dim', 'qk_pos_emb_head_dim', 'v_head_dim'), 8),
}


def make(directory, model, frozen=(), trained=None, bucket_size=None, **optimizer):
    """Train, and save in both formats.

    Args:
        model: makes its chunks
        frozen: what is in the names of the parameters that are
        trained: or of those that are not
        optimizer: options of it
    """
    ensure_group()
    twins = Twins(*(directory / name / f'iter_{STEPS:07d}' for name in ('buckets', 'parameters')))
    with model_parallel():
        chunks = model()
        for name, param in (pair for chunk in chunks for pair in chunk.named_parameters()):
            if trained is not None:
                param.requires_grad = any(part in name for part in trained)
            elif any(part in name for part in frozen):
                param.requires_grad = False
        options = {'bf16': chunks[0].config.bf16, **optimizer}
        run = Training.start(chunks, distributed_optimizer(**options), bucket_size)
        run.train(STEPS)
        run.save(twins.in_buckets, 'dp_reshardable')
        run.save(twins.by_parameter)
    return twins


def converted(twins, directory):
    result = convert_optimizer(twins.in_buckets, directory / 'out', verify=True)
    assert differences(directory / 'out', twins.by_parameter) == []
    assert result.proven == result.elements + result.copies
    return result


FROZEN = {
    'embedding': (lambda: gpt(tied=False, **BF16), {'frozen': ['embedding']}),
    'all norms': (lambda: gpt(**PLAIN), {'frozen': ['norm']}),
    'one of equal norms': (lambda: gpt(**PLAIN), {'frozen': ['input_layernorm'], 'lr': 1e-9}),
    'all but a bias': (lambda: gpt(**BF16), {'trained': ['linear_fc2.bias']}),
    'gated, fp32': (lambda: gpt(gated_linear_unit=True), {'frozen': ['linear_fc1']}),
    'several buckets': (lambda: gpt(**BF16), {'frozen': ['linear_qkv'], 'bucket_size': 3000}),
    'router': (lambda: gpt(**MOE), {'frozen': ['router']}),
    'experts': (lambda: gpt(**MOE), {'frozen': ['experts']}),
    'all but experts': (lambda: gpt(**MOE), {'trained': ['experts']}),
    'layers of a hybrid': (lambda: hybrid('M*-M', **BF16), {'frozen': ['layers.0.', 'layers.1.']}),
}


@pytest.mark.parametrize('name', FROZEN)
def test_frozen_parameters(tmp_path, name):
    model, options = FROZEN[name]
    twins = make(tmp_path, model, **options)
    result = converted(twins, tmp_path)
    stored = read_all(twins.by_parameter)[0]
    weights = {key for key in stored if not key.startswith('optimizer.')}
    with_state = {key.split('.', 3)[3] for key in stored if key.startswith('optimizer.state.param')}
    assert result.without_state == sorted(weights - with_state) != []


@pytest.fixture(scope='module')
def of_four_ranks(tmp_path_factory):
    directory = tmp_path_factory.mktemp('layouts')
    warm.run(4, 'tests.unit_tests.tools.checkpoint.optimizer_layout_runs', str(directory))
    return directory


@pytest.mark.parametrize('name', CASES)
def test_layouts_of_four_ranks(of_four_ranks, tmp_path, name):
    kinds = ('dp_reshardable', 'fully_reshardable')
    twins = Twins(*(of_four_ranks / name / kind / 'iter_0000000' for kind in kinds))
    result = converted(twins, tmp_path)
    assert bool(result.without_state) == bool(CASES[name][2])


def refused(twins, directory, *words):
    with pytest.raises(CheckpointError) as error:
        convert_optimizer(twins.in_buckets, directory / 'out')
    assert not (directory / 'out').exists()
    for part in words:
        assert part in str(error.value)


def test_one_of_two_neighbours_that_are_equal(tmp_path):
    """Either may be frozen: both ways fill the bucket, and both are the weights."""
    twins = make(tmp_path, lambda: gpt(qk_layernorm=True, **PLAIN), ['k_layernorm'], lr=1e-9)
    refused(twins, tmp_path, 'several ways', 'k_layernorm.weight frozen', 'q_layernorm')


def test_a_part_of_a_stack(tmp_path):
    """``fully_reshardable`` can't hold it; core's own save ends in the same."""
    ensure_group()
    directory = tmp_path / f'iter_{STEPS:07d}'
    with model_parallel():
        chunks = gpt(**BF16)
        for name, param in chunks[0].named_parameters():
            param.requires_grad = 'layers.0.' not in name
        run = Training.start(chunks, distributed_optimizer(**BF16))
        run.train(STEPS)
        run.save(directory, 'dp_reshardable')
    refused(
        Twins(directory, directory), tmp_path, 'decoder.layers.', 'of layers [1]', 'of [0] none'
    )


EQUAL = {
    'queries and keys': lambda: gpt(qk_layernorm=True, **PLAIN),
    'with biases': lambda: gpt(qk_layernorm=True, **BF16),
    'MTP': lambda: gpt(mtp_num_layers=1, **PLAIN),
    'latent attention': lambda: gpt(qk_layernorm=True, **LATENT, **PLAIN),
    'hybrid': lambda: hybrid('M*-M*-', **PLAIN),
}


@pytest.mark.parametrize('name', EQUAL)
def test_layer_norms_that_are_equal(tmp_path, name):
    """All of them are ones still, in bf16; their moments are not."""
    twins = make(tmp_path, EQUAL[name], lr=1e-9, weight_decay=0.0)
    tensors, _ = read_all(twins.by_parameter)
    norms = [key for key in tensors if not key.startswith('optimizer.') and 'norm' in key]
    gains = [key for key in norms if key.endswith('weight')]
    assert len(gains) >= 3 and all(bool((tensors[key] == 1).all()) for key in gains)
    moments = [tensors[f'optimizer.state.exp_avg.{key}'].flatten().tolist() for key in gains]
    assert len({tuple(moment) for moment in moments}) == len(gains)
    converted(twins, tmp_path)


def rewrite(directory, change):
    """Store the optimizer's tensors for which ``change(state, values)`` isn't None otherwise."""
    metadata = FileSystemReader(directory).read_metadata()
    with open(directory / 'changed.distcp', 'wb') as file:
        for index, place in list(metadata.storage_data.items()):
            if '.gbuf_idx_' not in index.fqn:
                continue
            with open(directory / place.relative_path, 'rb') as stored:
                stored.seek(place.offset)
                values = torch.load(io.BytesIO(stored.read(place.length)))
            values = change(index.fqn.rpartition('.')[2], values)
            if values is None:
                continue
            begin = file.tell()
            torch.save(values, file)
            length = file.tell() - begin
            metadata.storage_data[index] = _StorageInfo('changed.distcp', begin, length)
            metadata.state_dict_metadata[index.fqn].properties.dtype = values.dtype
    (directory / '.metadata').write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_moments_of_half_precision(tmp_path, dtype):
    """They are widened, as core does for ``fully_reshardable``."""
    twins = make(tmp_path, lambda: gpt(**BF16))
    directory = twins.in_buckets
    rewrite(directory, lambda state, values: values.to(dtype) if state == 'exp_avg' else None)
    convert_optimizer(directory, tmp_path / 'out', verify=True)
    made, expected = read_all(tmp_path / 'out')[0], read_all(twins.by_parameter)[0]
    for key, value in expected.items():
        if key.startswith('optimizer.state.exp_avg.'):
            value = value.to(dtype).float()
        assert made[key].dtype == value.dtype and torch.equal(made[key], value), key


def test_remainders_of_main_parameters(tmp_path):
    """Any would fit any weight: nothing to prove a place with."""
    twins = make(tmp_path, lambda: gpt(**BF16))
    remainders = {'param': lambda values: values.view(torch.int32).to(torch.int16)}
    rewrite(twins.in_buckets, lambda state, v: remainders[state](v) if state == 'param' else None)
    refused(twins, tmp_path, '.param: stored as int16', '--store-param-remainders')
