"""Retargeting a GPT model at hybrid checkpoints, entry by entry, and on those of real models."""

import dataclasses

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing import gpt_checkpoint_interop as gpt_interop
from megatron.core.dist_checkpointing import hybrid_checkpoint_interop as interop
from megatron.core.dist_checkpointing.checkpoint_layout import (
    check_sources,
    layout_from_metadata,
    read_checkpoint_layout,
)
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from tests.cpu_megatron.session import Training, distributed_optimizer, gpt, hybrid, model_parallel
from tests.cpu_megatron.whole_checkpoint import gpt_source, read_tensors
from tools.checkpoint.inspect_checkpoint import inspect_checkpoint

MAPS = gpt_interop.gpt_compatible_layer_maps('*-*-')
# What a layer of each kind stores, by symbol.
PARTS = {
    'M': ['mixer.in_proj.weight', 'mixer.A_log'],
    'G': ['self_attention.in_proj.weight', 'self_attention.A_log', 'self_attention.conv1d.weight'],
    'D': [
        'self_attention.linear_kv_up_proj.weight',
        'self_attention.core_attention.indexer.linear_wk.weight',
    ],
    '+': ['self_attention.linear_kv_up_proj.weight', 'input_layernorm.weight'],
    '*': ['self_attention.linear_qkv.weight', 'self_attention.linear_proj.weight'],
    '-': ['mlp.linear_fc1.weight', 'mlp.linear_fc2.weight'],
    'E': ['mlp.linear_fc1.layer_norm_weight', 'mlp.router.weight'],
    '?': ['short_conv.weight'],
}


def layout_of(pattern, *more_keys):
    keys = ['decoder.final_norm.weight', *more_keys] + [
        f'decoder.layers.{layer}.{part}'
        for layer, symbol in enumerate(pattern)
        for part in PARTS[symbol]
    ]
    return layout_from_metadata(Metadata({key: BytesStorageMetadata() for key in keys}))


def sharded(key, *offsets, **kwargs):
    return ShardedTensor.from_rank_offsets(key, torch.randn(2, 3), *offsets, **kwargs)


@pytest.mark.parametrize('pattern', ['*-*-', '*E*E', '-**-', '**--', 'E*'])
def test_the_maps_are_those_of_the_way_there(pattern):
    layout = layout_of(pattern)
    assert layout.family == 'hybrid'
    assert interop.hybrid_checkpoint_pattern(layout) == pattern
    assert interop.hybrid_checkpoint_layer_maps(layout) == (
        gpt_interop.gpt_compatible_layer_maps(pattern)
    )


def test_latent_attention_and_mixed_mlps_pair_too():
    assert interop.hybrid_checkpoint_layer_maps(layout_of('+-+E')) == MAPS


@pytest.mark.parametrize(
    'pattern, more_keys, reason',
    [
        ('M*-M*-', [], r"layer 0, 'M' \(2 such layers\)"),
        ('*-G-', [], "layer 2, 'G'"),
        ('D-', [], "layer 0, 'D'"),
        ('*-?', [], r"layer 2, '\?'"),
        ('**-', [], '2 attention and 1 MLP'),
        ('*-*', [], '2 attention and 1 MLP'),
        ('--', [], '0 attention'),
        ('*-', ['mtp.layers.0.eh_proj.weight'], r'MTP part \(1 depths\)'),
    ],
)
def test_what_a_gpt_model_has_no_layers_for_is_refused(pattern, more_keys, reason):
    with pytest.raises(ValueError, match=reason) as error:
        interop.hybrid_checkpoint_layer_maps(layout_of(pattern, *more_keys))
    assert repr(pattern) in str(error.value)


def test_an_attention_and_an_mlp_in_one_layer_are_no_hybrid_layer():
    layout = layout_of('*-', 'decoder.layers.0.mlp.linear_fc1.weight')
    with pytest.raises(ValueError, match=r"layer 0, '\?'"):
        interop.hybrid_checkpoint_layer_maps(layout)


@pytest.mark.parametrize('prefix', ['', 'optimizer.state.exp_avg.', 'chained_1.optimizer.state.x.'])
def test_keys_change_and_the_layer_axis_goes(prefix):
    on_axis = {'prepend_axis_num': 1}
    state = {
        'attention': sharded(
            f'{prefix}decoder.layers.self_attention.linear_qkv.weight', (0, 1, 2), **on_axis
        ),
        'mlp': [sharded(f'{prefix}decoder.layers.mlp.linear_fc2.weight', (0, 0, 2), **on_axis)],
        'norm': sharded(f'{prefix}decoder.layers.pre_mlp_layernorm.weight', (0, 1, 2), **on_axis),
        'indexed': sharded(f'{prefix}decoder.layers.1.mlp.linear_fc2.weight'),
        'final': sharded(f'{prefix}decoder.final_layernorm.weight'),
        'embedding': sharded(f'{prefix}embedding.word_embeddings.weight'),
        'other model': sharded('vision_model.decoder.layers.mlp.linear_fc2.weight'),
        'plain': 7,
    }
    names = list(state)
    interop.retarget_sharded_state_dict_to_hybrid_checkpoint(state, MAPS)
    assert list(state) == names and state.pop('plain') == 7
    attention, (mlp,), *others = state.values()
    assert [entry.key.removeprefix(prefix) for entry in [attention, mlp, *others]] == [
        'decoder.layers.2.self_attention.linear_qkv.weight',
        'decoder.layers.1.mlp.linear_fc2.weight',
        'decoder.layers.3.pre_mlp_layernorm.weight',
        'decoder.layers.3.mlp.linear_fc2.weight',
        'decoder.final_norm.weight',
        'embedding.word_embeddings.weight',
        'vision_model.decoder.layers.mlp.linear_fc2.weight',
    ]
    assert attention == dataclasses.replace(sharded(attention.key), data=attention.data)


def test_objects_and_factories_are_what_the_way_there_made_them_of():
    def build(key, data, replica_id, flattened_range):
        halves = data.chunk(2)
        return {'list': [sharded(f'{key}.w')], 'dict': {'v': halves[1]}}

    entries = {
        'object': ShardedObject('decoder.layers.3.mlp.linear_fc1._extra_state', None, (1,), (0,)),
        'expert': ShardedObject('decoder.layers.3.mlp.experts._extra_state', None, (8,), (3,)),
        'factory': ShardedTensorFactory(
            'decoder.layers.3.mlp.linear_fc1.weight', torch.randn(2, 3), build, lambda built: built
        ),
    }
    built = entries['factory'].build()['list'][0]
    expected = [dataclasses.replace(entries[name]) for name in ('object', 'expert')]
    gpt_interop.retarget_sharded_state_dict_to_gpt_checkpoint(entries, MAPS)
    assert entries['factory'].build()['list'][0].key == 'decoder.layers.mlp.linear_fc1.weight.w'
    interop.retarget_sharded_state_dict_to_hybrid_checkpoint(entries, MAPS)
    assert [entries['object'], entries['expert']] == expected
    returned = entries['factory'].build()['list'][0]
    assert returned == dataclasses.replace(built, data=returned.data)


@pytest.mark.parametrize(
    'key, reason',
    [
        ('decoder.layers.2.mlp.linear_fc1.weight', 'GPT layer 2, and the hybrid checkpoint has 2'),
        ('decoder.layers.0.cross_attention.linear_q.weight', 'neither'),
    ],
)
def test_entries_without_a_place_are_named(key, reason):
    with pytest.raises(ValueError, match=reason) as error:
        interop.retarget_sharded_state_dict_to_hybrid_checkpoint({'x': sharded(key)}, MAPS)
    assert repr(key) in str(error.value)


def save_hybrid(path, pattern, **model):
    with model_parallel():
        run = Training.start(hybrid(pattern, **model), distributed_optimizer())
        run.train(2)
        run.save(path)


def load_into_gpt(path, again, maps=None, **model):
    """Load through the retargeted request, and save what arrived under the model's own keys."""
    layout = read_checkpoint_layout(str(path))
    maps = maps or interop.hybrid_checkpoint_layer_maps(layout)

    def prepare(state):
        for part in ('model', 'optimizer'):
            interop.retarget_sharded_state_dict_to_hybrid_checkpoint(state[part], maps)
        check_sources({part: state[part] for part in ('model', 'optimizer')}, layout)
        return state

    with model_parallel(seed=99):
        run = Training.start(gpt(**model), distributed_optimizer())
        run.load(path, prepare)
        run.save(again)


def wrong_tensors(hybrid_path, gpt_path, pattern):
    """Keys of the hybrid checkpoint whose tensors are elsewhere, or nowhere, in the GPT one."""
    hybrid_tensors, gpt_tensors = read_tensors(hybrid_path), read_tensors(gpt_path)
    assert sum(key.startswith('optimizer.') for key in hybrid_tensors) > 20
    return [
        key
        for key, value in hybrid_tensors.items()
        if not torch.equal(value, gpt_source(gpt_tensors, key, pattern))
    ]


MIXED = {'num_moe_experts': 4, 'moe_layer_freq': [0, 1]}


@pytest.mark.parametrize(
    'pattern, model',
    [
        ('*-*-', {'gated_linear_unit': True, 'add_bias_linear': False}),
        ('*E*E', {'num_moe_experts': 4, 'moe_layer_freq': 1, 'gated_linear_unit': True}),
        ('*-*E', MIXED),
        ('-**-', {}),
    ],
)
def test_every_tensor_arrives_from_its_own_layer(pattern, model, tmp_path):
    of_hybrid = {key: value for key, value in model.items() if key != 'moe_layer_freq'}
    save_hybrid(tmp_path / 'hybrid', pattern, **of_hybrid)
    load_into_gpt(tmp_path / 'hybrid', tmp_path / 'again', **model)
    assert not wrong_tensors(tmp_path / 'hybrid', tmp_path / 'again', pattern)


def test_the_inspector_tells_what_a_load_will_do(tmp_path):
    def verdict(path):
        (found,) = [use for use in inspect_checkpoint(path).uses if use.name == 'hybrid into GPT']
        return found.works, found.reason

    save_hybrid(tmp_path / 'iter_0000002', '**--')
    (tmp_path / 'latest_checkpointed_iteration.txt').write_text('2\n')
    taken, reason = verdict(tmp_path)
    assert taken and 'in another order' in reason and '; optimizer state too' in reason
    save_hybrid(tmp_path / 'release', '*-*E', num_moe_experts=4)
    assert verdict(tmp_path / 'release') == (
        True,
        '--num-layers 2 --moe-layer-freq "[0, 1]"; the optimizer starts fresh, as from any release',
    )
    save_hybrid(tmp_path / 'mamba', 'M*-')
    taken, reason = verdict(tmp_path / 'mamba')
    assert not taken and "layer 0, 'M'" in reason


def test_a_swapped_order_of_layers_shows(tmp_path):
    save_hybrid(tmp_path / 'hybrid', '*-*-')
    swapped = dataclasses.replace(MAPS, mlp_to_gpt={1: 1, 3: 0})
    load_into_gpt(tmp_path / 'hybrid', tmp_path / 'again', swapped)
    wrong = wrong_tensors(tmp_path / 'hybrid', tmp_path / 'again', '*-*-')
    assert {key.split('.mlp.')[0][-1] for key in wrong} == {'1', '3'}
    assert 'decoder.layers.1.mlp.linear_fc1.weight' in wrong


def test_weights_on_one_side_only_are_an_error(tmp_path):
    save_hybrid(tmp_path / 'untied', '*-*-', tied=False)
    for model, reason in [
        ({}, 'output_layer.weight: the checkpoint has it'),
        ({'tied': False, 'num_layers': 1}, r'decoder.layers.2.*the checkpoint has it'),
        ({'tied': False, 'num_moe_experts': 4}, r'mlp.*does not have it.*--num-experts'),
        (
            {'tied': False, 'position_embedding_type': 'learned_absolute'},
            'position_embeddings.weight: the model needs it',
        ),
    ]:
        with pytest.raises(CheckpointingException, match=reason):
            load_into_gpt(tmp_path / 'untied', tmp_path / 'again', **model)
