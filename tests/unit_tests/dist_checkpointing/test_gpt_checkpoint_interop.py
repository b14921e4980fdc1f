"""Retargeting, entry by entry, and on checkpoints of real models."""

import io

import pytest
import torch
from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensorFactory,
)

from tests.cpu_megatron.whole_checkpoint import gpt_source, read_tensors
from tests.unit_tests.dist_checkpointing.gpt_runs import (
    MLA,
    load_into_hybrid,
    needs_latent_layers,
    save_gpt,
    sharded,
)

MAPS = interop.gpt_compatible_layer_maps('M*-M*-')


def test_keys_change_and_the_state_dict_s_own_names_stay():
    state = {
        'decoder.layers.1.self_attention.linear_qkv.weight': sharded(
            'decoder.layers.1.self_attention.linear_qkv.weight'
        ),
        'decoder.layers.5.mlp.linear_fc2.weight': sharded('decoder.layers.5.mlp.linear_fc2.weight'),
        'decoder.final_norm.weight': sharded('decoder.final_norm.weight'),
        'embedding.word_embeddings.weight': sharded('embedding.word_embeddings.weight'),
        'plain': 7,
    }
    names = list(state)
    interop.retarget_sharded_state_dict_to_gpt_checkpoint(state, MAPS)
    assert list(state) == names
    attention, mlp, norm, embedding = list(state.values())[:4]
    assert attention.key == 'decoder.layers.self_attention.linear_qkv.weight'
    assert attention.global_offset[0] == 0
    assert mlp.key == 'decoder.layers.mlp.linear_fc2.weight'
    assert mlp.global_offset[0] == 1
    assert norm.key == 'decoder.final_layernorm.weight'
    assert embedding.key == 'embedding.word_embeddings.weight'
    assert state['plain'] == 7


@pytest.mark.parametrize(
    'data', [None, b'', io.BytesIO(), [io.BytesIO(b'x')], torch.zeros(0), io.BytesIO(b'state')]
)
def test_fresh_layers_keep_what_they_hold(data):
    weight = torch.randn(2, 3)
    factory = ShardedTensorFactory('decoder.layers.0.mixer.in_proj.weight', weight, dict, dict)
    state = {
        'tensor': sharded('decoder.layers.3.mixer.D'),
        'factory': factory,
        'object': ShardedObject('decoder.layers.0.mixer._extra_state', data, (1,), (0,)),
        'head': ShardedObject('output_layer._extra_state', data, (1,), (0,)),
    }
    tensor = state['tensor'].data
    interop.retarget_sharded_state_dict_to_gpt_checkpoint(state, MAPS)
    assert all(isinstance(entry, LocalNonpersistentObject) for entry in state.values())
    assert state['tensor'].unwrap() is tensor
    assert state['factory'].unwrap() is weight
    assert state['object'].unwrap() is data
    assert state['head'].unwrap() is data


@pytest.mark.parametrize('prefix', ['', 'chained_1.'])
def test_optimizer_state_in_lists_and_dicts_under_chained_prefixes(prefix):
    keys = [
        f'{prefix}optimizer.state.exp_avg.decoder.layers.4.self_attention.linear_proj.weight',
        f'{prefix}optimizer.state.exp_avg.decoder.layers.0.mixer.D',
        f'{prefix}optimizer.state.exp_avg.decoder.final_norm.weight',
    ]
    state = {'param_state': {0: [sharded(key) for key in keys]}}
    interop.retarget_sharded_state_dict_to_gpt_checkpoint(state, MAPS)
    attention, fresh, norm = state['param_state'][0]
    assert attention.key == (
        f'{prefix}optimizer.state.exp_avg.decoder.layers.self_attention.linear_proj.weight'
    )
    assert attention.global_offset[0] == 1
    assert isinstance(fresh, LocalNonpersistentObject)
    assert norm.key == f'{prefix}optimizer.state.exp_avg.decoder.final_layernorm.weight'


def test_flattened_state_of_the_deprecated_model_space_format():
    # fully_sharded_model_space can't be saved any more: its entries are built by hand.
    key = 'optimizer.state.exp_avg.decoder.layers.5.mlp.linear_fc1.weight'
    entry = sharded(key)
    entry.data, entry.flattened_range = entry.data.flatten()[2:5], slice(2, 5)
    fresh = sharded('optimizer.state.fp32_param.decoder.layers.0.mixer.A_log')
    state = {0: {'exp_avg': entry}, 1: {'fp32_param': fresh}}
    interop.retarget_sharded_state_dict_to_gpt_checkpoint(state, MAPS)
    assert entry.key == 'optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight'
    assert (entry.global_shape, entry.global_offset) == ((2, 2, 3), (1, 0, 0))
    assert entry.flattened_range == slice(2, 5)
    assert state[1]['fp32_param'].unwrap() is fresh.data


def test_a_layer_outside_the_pattern_is_named():
    phrase = 'not part of the hybrid layer pattern'
    with pytest.raises(ValueError, match=rf"'decoder\.layers\.6\.mlp\S+ .*layer 6, .* {phrase}"):
        interop.retarget_sharded_state_dict_to_gpt_checkpoint(
            {'x': sharded('decoder.layers.6.mlp.linear_fc1.weight')}, MAPS
        )


def test_other_models_decoders_are_left_alone():
    keys = ['vision_model.decoder.layers.9.mlp.w', 'vision_model.decoder.final_norm.weight']
    state = {key: sharded(key) for key in keys}
    interop.retarget_sharded_state_dict_to_gpt_checkpoint(state, MAPS)
    assert [entry.key for entry in state.values()] == keys


@pytest.mark.parametrize(
    'pattern, indexed, model',
    [
        ('*-M*E*-', True, {'num_layers': 3, 'num_moe_experts': 4, 'moe_layer_freq': [0, 1, 0]}),
        ('*E*E', True, {'num_moe_experts': 4, 'moe_layer_freq': [1, 1]}),
        ('*EM*E', False, {'num_moe_experts': 4, 'moe_layer_freq': 1, 'gated_linear_unit': True}),
        ('*-*-', False, {'gated_linear_unit': True, 'add_bias_linear': False}),
        pytest.param('+-+-', False, MLA, marks=needs_latent_layers),
        pytest.param('+M-+-', False, MLA | {'gated_linear_unit': True}, marks=needs_latent_layers),
        ('*-*-/*-/*-', False, {'mtp_num_layers': 2}),
        ('M*-*-/*M-', False, {'mtp_num_layers': 1, 'gated_linear_unit': True}),
        ('*-*-/*-/*-', False, {'mtp_num_layers': 2, 'mtp_use_repeated_layer': True}),
    ],
)
def test_layers_stored_by_index_and_as_axis(pattern, indexed, model, tmp_path):
    expected_losses = save_gpt(tmp_path / 'gpt', **model)
    of_hybrid = {
        key: value for key, value in model.items() if key not in ('num_layers', 'moe_layer_freq')
    }
    maps, losses = load_into_hybrid(tmp_path / 'gpt', pattern, tmp_path / 'again', **of_hybrid)
    assert maps.indexed == indexed
    if 'M' not in pattern:
        assert losses == expected_losses
    source, loaded = read_tensors(tmp_path / 'gpt'), read_tensors(tmp_path / 'again')
    compared = 0
    for key, value in loaded.items():
        expected = gpt_source(source, key, pattern)
        if expected is not None:
            compared += 1
            assert torch.equal(value, expected), key
    per_layer = [key for key in loaded if 'decoder.layers.' in key and '.mixer.' not in key]
    assert compared >= len(per_layer) > 20
    assert any('.mtp.' in key for key in loaded) == ('/' in pattern)
    if 'M' not in pattern:
        assert compared == len(loaded) == len(source) + len(per_layer) - len(stacked(source))


def stacked(tensors):
    return [key for key in tensors if '.layers.' in key and 'mtp.' not in key]
