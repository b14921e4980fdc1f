"""``fsdp_dtensor`` state dicts of a hybrid run, read from a GPT checkpoint.

Megatron-FSDP needs a GPU. What reaches the retargeting and DCP doesn't: real parameter names, and
DTensors over a device mesh, which read_fsdp_dtensors.py makes.
"""

import dataclasses
import io
from types import MappingProxyType

import pytest
import torch
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    _retarget_explicit_key_to_gpt_checkpoint,
    gpt_compatible_layer_maps,
    retarget_fsdp_state_dict_to_gpt_checkpoint,
)

from tests.cpu_megatron.torchrun import torchrun

PATTERN = 'M*-M*-'
MAPS = gpt_compatible_layer_maps(PATTERN)
QKV = 'self_attention.linear_qkv.weight'
FC1 = 'mlp.linear_fc1.weight'


def hybrid_model(prefix='module.'):
    """Model state dict of the pattern, one weight a layer and the outer ones."""
    weights = {
        f'{prefix}decoder.layers.{index}.{name}': torch.full((2,), float(index))
        for index, name in enumerate(['mixer.in_proj.weight', QKV, FC1] * 2)
    }
    return weights | {
        f'{prefix}embedding.word_embeddings.weight': torch.full((2,), 10.0),
        f'{prefix}decoder.final_norm.weight': torch.full((2,), 11.0),
    }


def gpt_keys(place='model', prefix='module.', below=('',)):
    """Flattened keys of a GPT checkpoint with the same weights."""
    names = [f'decoder.layers.{layer}.{name}' for layer in range(2) for name in (QKV, FC1)]
    names += ['embedding.word_embeddings.weight', 'decoder.final_layernorm.weight']
    return [f'{place}.{prefix}{name}{end}' for name in names for end in below]


def test_two_ranks_read_dtensors_from_a_gpt_checkpoint(tmp_path):
    torchrun(2, 'tests.unit_tests.dist_checkpointing.read_fsdp_dtensors', str(tmp_path))


@pytest.mark.parametrize('own', ['', 'module.', 'module.module.'])
@pytest.mark.parametrize('stored', ['', 'module.', 'module.module.module.'])
def test_module_depth_is_the_checkpoints(own, stored):
    state = hybrid_model(own)
    found = retarget_fsdp_state_dict_to_gpt_checkpoint(
        state, MAPS, gpt_keys(prefix=stored), checkpoint_prefix='model'
    )
    assert {f'model.{key}' for key in found} == set(gpt_keys(prefix=stored))
    assert found[f'{stored}decoder.layers.1.{FC1}'] is state[f'{own}decoder.layers.5.{FC1}']
    assert found[f'{stored}decoder.layers.0.{QKV}'] is state[f'{own}decoder.layers.1.{QKV}']


def test_names_alone_are_renamed_without_checkpoint_keys():
    state = MappingProxyType(hybrid_model('module.module.'))
    before = dict(state)
    found = retarget_fsdp_state_dict_to_gpt_checkpoint(state, MAPS)
    assert [f'model.{key}' for key in found] == gpt_keys(prefix='module.module.')
    assert dict(state) == before


def test_model_and_optimizer_of_different_depth_do_not_confuse_one_another():
    keys = gpt_keys(prefix='module.') + gpt_keys('optimizer.state', 'module.' * 3, ['.exp_avg'])
    found = retarget_fsdp_state_dict_to_gpt_checkpoint(
        {
            'model': hybrid_model(''),
            'optimizer': {'state': {key: {'exp_avg': w} for key, w in hybrid_model('').items()}},
        },
        MAPS,
        keys,
    )
    assert {f'model.{key}' for key in found['model']} == set(gpt_keys(prefix='module.'))
    assert {f'optimizer.state.{key}.exp_avg' for key in found['optimizer']['state']} == set(
        gpt_keys('optimizer.state', 'module.' * 3, ['.exp_avg'])
    )


@pytest.mark.parametrize('missing', range(len(gpt_keys())))
@pytest.mark.parametrize('own', ['module.', 'module.module.'])
def test_a_parameter_that_the_checkpoint_lacks_is_an_error(missing, own):
    keys = gpt_keys()
    lost = keys.pop(missing)
    with pytest.raises(ValueError, match='the checkpoint does not have it') as error:
        retarget_fsdp_state_dict_to_gpt_checkpoint(hybrid_model(own), MAPS, keys, 'model')
    assert lost.removeprefix('model.module.') in str(error.value)
    assert '--hybrid-layer-pattern' in str(error.value)


def test_the_error_names_what_the_checkpoint_has_elsewhere():
    with pytest.raises(ValueError, match=rf'but model\.module\.decoder\.layers\.0\.{QKV}'):
        retarget_fsdp_state_dict_to_gpt_checkpoint(hybrid_model(), MAPS, gpt_keys(), 'model_b')


@pytest.mark.parametrize('state_name', ['exp_avg', 'exp_avg_sq'])
def test_optimizer_state_that_the_checkpoint_lacks_is_an_error(state_name):
    state = {
        0: {
            'state': {
                key: {'exp_avg': weight, 'exp_avg_sq': weight + 1}
                for key, weight in hybrid_model().items()
            }
        }
    }
    keys = gpt_keys('optimizer.0.state', 'module.', ['.exp_avg', '.exp_avg_sq'])
    retarget_fsdp_state_dict_to_gpt_checkpoint(state, MAPS, keys, 'optimizer')
    keys.remove(f'optimizer.0.state.module.decoder.layers.1.{FC1}.{state_name}')
    with pytest.raises(ValueError, match=f'layers.1.{FC1}.{state_name}: .*--no-load-optim'):
        retarget_fsdp_state_dict_to_gpt_checkpoint(state, MAPS, keys, 'optimizer')


@pytest.mark.parametrize('container', [list, tuple])
def test_tensors_in_sequences_are_looked_up_too(container):
    name = f'module.decoder.layers.5.{FC1}'
    state = {name: container([torch.zeros(1), 'setting'])}
    stored = f'model.module.decoder.layers.1.{FC1}'
    found = retarget_fsdp_state_dict_to_gpt_checkpoint(state, MAPS, [f'{stored}.0'], 'model')
    (value,) = found.values()
    assert type(value) is container and value[0] is state[name][0] and value[1] == 'setting'
    with pytest.raises(ValueError, match=rf'layers\.1\.{FC1}\.0: '):
        retarget_fsdp_state_dict_to_gpt_checkpoint(state, MAPS, [f'{stored}.1'], 'model')


def test_a_parameter_under_several_prefixes_is_an_error():
    keys = gpt_keys(prefix='module.') + [f'model.module.module.decoder.layers.1.{FC1}']
    with pytest.raises(ValueError, match='under 2 prefixes') as error:
        retarget_fsdp_state_dict_to_gpt_checkpoint(hybrid_model(), MAPS, keys, 'model')
    for key in keys[3], keys[-1]:
        assert key in str(error.value)
    with pytest.raises(ValueError, match='under 2 prefixes'):
        _retarget_explicit_key_to_gpt_checkpoint(f'decoder.layers.5.{FC1}', MAPS, keys)


def test_an_optimizer_s_parameter_under_several_prefixes_is_an_error():
    state = {'state': {key: {'exp_avg': weight} for key, weight in hybrid_model().items()}}
    keys = gpt_keys('optimizer.state', 'module.', ['.exp_avg'])
    keys.append(f'optimizer.state.decoder.layers.0.{QKV}.exp_avg')
    with pytest.raises(ValueError, match='under 2 prefixes') as error:
        retarget_fsdp_state_dict_to_gpt_checkpoint(state, MAPS, keys, 'optimizer')
    assert f'optimizer.state.decoder.layers.0.{QKV}' in str(error.value)


def test_mtp_depths_have_one_layer_in_the_gpt_model():
    maps = dataclasses.replace(MAPS, mtp_pattern='*M-')
    depth = 'module.mtp.layers.0'
    own = [f'{depth}.eh_proj.weight'] + [
        f'{depth}.mtp_model_layer.layers.{index}.{name}'
        for index, name in enumerate([QKV, 'mixer.in_proj.weight', FC1])
    ]
    state = {name: torch.full((2,), float(index)) for index, name in enumerate(own)}
    keys = [f'{depth}.eh_proj.weight'] + [f'{depth}.mtp_model_layer.{name}' for name in (QKV, FC1)]
    stored = [f'model.{key}' for key in keys]
    found = retarget_fsdp_state_dict_to_gpt_checkpoint(state, maps, stored, 'model')
    assert list(found) == keys
    assert all(found[key] is state[own[index]] for key, index in zip(keys, (0, 1, 3), strict=True))
    with pytest.raises(ValueError, match=f'{FC1}: .*does not have it'):
        retarget_fsdp_state_dict_to_gpt_checkpoint(state, maps, stored[:-1], 'model')
    with pytest.raises(ValueError, match='MTP layer 0, .* not part of the hybrid layer pattern'):
        retarget_fsdp_state_dict_to_gpt_checkpoint(state, MAPS, stored, 'model')


@pytest.mark.parametrize('levels', [['step'], ['group', 'step'], ['group', '0', 'step']])
def test_names_are_found_above_any_number_of_levels(levels):
    name = f'module.decoder.layers.5.{FC1}'
    value = torch.zeros(1)
    for level in reversed(levels):
        value = {level: value}
    stored = f'optimizer.state.module.module.decoder.layers.1.{FC1}'
    found = retarget_fsdp_state_dict_to_gpt_checkpoint(
        {'state': {name: value}}, MAPS, ['.'.join([stored, *levels])], 'optimizer'
    )
    assert list(found['state']) == [stored.removeprefix('optimizer.state.')]


@pytest.mark.parametrize(
    'extra_state', [torch.zeros(3, dtype=torch.uint8), io.BytesIO(b'x'), b'', None, []]
)
def test_extra_state_that_the_checkpoint_lacks_is_left_out(extra_state):
    name = 'module.decoder.layers.1.self_attention.linear_qkv._extra_state'
    stored = 'module.decoder.layers.0.self_attention.linear_qkv._extra_state'
    state = hybrid_model() | {name: extra_state, 'module.output_layer._extra_state': extra_state}
    found = retarget_fsdp_state_dict_to_gpt_checkpoint(
        state, MAPS, [*gpt_keys(), f'model.{stored}'], 'model'
    )
    assert stored in found and 'module.output_layer._extra_state' not in found
    if extra_state != []:
        found = retarget_fsdp_state_dict_to_gpt_checkpoint(state, MAPS, gpt_keys(), 'model')
        assert stored not in found
    assert {f'model.{key}' for key in found} >= set(gpt_keys())


def test_settings_that_the_checkpoint_lacks_are_left_out():
    state = {
        'param_to_group_meta': {key: {'lr': 0.1, 'new_setting': 1} for key in hybrid_model()},
        'step': torch.tensor(3),
    }
    keys = gpt_keys('optimizer.param_to_group_meta', 'module.', ['.lr'])
    found = retarget_fsdp_state_dict_to_gpt_checkpoint(state, MAPS, keys, 'optimizer')
    settings = found.pop('param_to_group_meta')
    assert len(settings) == 6 and not found
    assert all(meta == {'lr': 0.1} for meta in settings.values())


@pytest.mark.parametrize('prefix', ['', 'module.', 'module.module.'])
def test_nested_models_are_not_mistaken_for_the_decoder(prefix):
    nested = {
        f'{prefix}{tower}.decoder.layers.{index}.{QKV}': torch.full((2,), float(index))
        for tower in ('vision_model', 'vision_model.module', 'language_model_2')
        # Layers that the pattern doesn't have, that it keeps fresh and that it translates.
        for index in (0, 1, 2, 9)
    } | {f'{prefix}vision_model.decoder.final_norm.weight': torch.ones(2)}
    found = retarget_fsdp_state_dict_to_gpt_checkpoint(nested, MAPS)
    assert list(found) == list(nested)

    # The tower's weights are no source for the decoder's.
    keys = [f'model.{key}' for key in nested] + gpt_keys(prefix=prefix)
    state = nested | hybrid_model(prefix)
    found = retarget_fsdp_state_dict_to_gpt_checkpoint(state, MAPS, keys, 'model')
    assert {f'model.{key}' for key in found} == set(keys)
    lost = f'model.{prefix}decoder.layers.0.{QKV}'
    with pytest.raises(ValueError, match='the checkpoint does not have it'):
        retarget_fsdp_state_dict_to_gpt_checkpoint(
            state, MAPS, [key for key in keys if key != lost], 'model'
        )


def test_a_layer_outside_the_pattern_is_an_error():
    state = {f'module.decoder.layers.6.{QKV}': torch.zeros(1)}
    with pytest.raises(ValueError, match=r'layers\.6\.'):
        retarget_fsdp_state_dict_to_gpt_checkpoint(state, MAPS)
