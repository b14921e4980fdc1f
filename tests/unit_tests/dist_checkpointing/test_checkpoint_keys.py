"""The grammar of checkpoint keys: what all modules read off a key."""

import re
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.checkpoint_keys import (
    COMMON,
    MODEL,
    OPTIMIZER,
    OTHER_TRAINING,
    RNG,
    is_extra_state,
    is_optimizer_state,
    kind_of,
    mtp_stack,
    parse_key,
    parse_position,
    stacks_layers,
    without_shard,
)
from megatron.core.dist_checkpointing.checkpoint_layout import layout_from_keys
from megatron.training.gpt_hybrid_load import _strict_loader

WEIGHT = 'decoder.layers.3.mlp.linear_fc1.weight'
BUCKET = 'optimizer.distributed.dp_group_idx_2.gbuf_idx_1.dtype_(torch.bfloat16, torch.float32)'

# prefix -> optimizer, state
PREFIXES = {
    '': (None, None),
    'module.': (None, None),
    'model.module.module.': (None, None),
    'model12.': (None, None),
    'optimizer.state.exp_avg.': ('optimizer', 'exp_avg'),
    'chained_1.optimizer.state.param.': ('chained_1.optimizer', 'param'),
    'chained_0.chained_1.optimizer.state.fp32_param.': (
        'chained_0.chained_1.optimizer',
        'fp32_param',
    ),
    'optimizer.state.exp_avg.model.': ('optimizer', 'exp_avg'),
    'optimizer.state.module.module.': ('optimizer', None),
    'optimizer.state.': ('optimizer', None),
    'optimizer.1.state.module.': ('optimizer', None),
    'optimizer.param_to_group_meta.module.': ('optimizer', None),
}


@pytest.mark.parametrize('prefix', PREFIXES)
@pytest.mark.parametrize('block', ['decoder.layers', 'encoder.layers', 'mtp.layers'])
@pytest.mark.parametrize('layer', [None, 0, 10])
def test_a_key_is_taken_apart(prefix, block, layer):
    name = f'{block}.{"" if layer is None else f"{layer}."}mlp.linear_fc1.weight'
    key = parse_key(prefix + name)
    assert (key.prefix, key.name) == (prefix, name)
    assert (key.optimizer, key.state) == PREFIXES[prefix]
    assert (key.block, key.layer, key.part) == (block, layer, 'mlp.linear_fc1.weight')
    of_optimizer = prefix.startswith(('optimizer', 'chained'))
    assert is_optimizer_state(prefix + name) == of_optimizer
    assert (key.weight == prefix + name) == (not of_optimizer)


@pytest.mark.parametrize(
    'name', ['vision_model.decoder.layers.3.mlp.w', 'embedding.word_embeddings.weight', 'a.b', '']
)
def test_what_is_no_layer_of_the_model_is_all_name(name):
    key = parse_key(f'optimizer.state.exp_avg.{name}' if name == 'a.b' else name)
    assert (key.name, key.block, key.layer) == (name, None, None)


@pytest.mark.parametrize('number', ['03', '٣', '1' * 101])
def test_a_number_has_one_spelling(number):
    assert parse_key(f'decoder.layers.{number}.mlp.w').layer is None


KINDS = {
    WEIGHT: MODEL,
    'model.module.x': MODEL,
    'model1.x': MODEL,
    'output_layer.weight': MODEL,
    'model_x.y': None,
    'vision_model.x': None,
    'optimizer': OPTIMIZER,
    f'chained_0.chained_1.optimizer.state.param.{WEIGHT}': OPTIMIZER,
    f'{BUCKET}.bucket_idx_0.param': OPTIMIZER,
    'optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1': OPTIMIZER,
    'optimizers-of-another': None,
    'rng_state/shard_0.0_1.1': RNG,
    'rerun_state_machine_state/shard_0.0_1.1': OTHER_TRAINING,
    'opt_param_scheduler.max_lr': OTHER_TRAINING,
    'common_state/shard_0_1': COMMON,
    'common_state_of.x': None,
}


@pytest.mark.parametrize('key', KINDS)
def test_kinds_of_entries(key):
    assert kind_of(key) == KINDS[key]


def test_optimizers_in_a_chain_in_a_chain_are_optimizer_state_to_the_load_as_well():
    keys = ['decoder.final_layernorm.weight', f'chained_0.chained_1.optimizer.state.param.{WEIGHT}']
    assert layout_from_keys(dict.fromkeys(keys, (2, 2))).has_optimizer
    assert layout_from_keys(dict.fromkeys(keys, (2, 2))).num_layers == 0


def test_positions_and_buckets():
    key = parse_position(f'chained_1.{BUCKET}.bucket_idx_3.exp_avg')
    assert key == (f'chained_1.{BUCKET.split(".gbuf")[0]}', 1, 2, 1, 'bfloat16', 3, 'exp_avg')
    settings = parse_position('optimizer.distributed.dp_group_idx_4.optimizer/shard_0_1')
    position = 'optimizer.distributed.dp_group_idx_4'
    assert settings == (position, 0, 4, None, None, None, 'optimizer')
    assert parse_position(f'optimizer.state.exp_avg.{WEIGHT}') is None


def test_multi_token_prediction():
    key = parse_key('mtp.layers.1.mtp_model_layer.layers.2.mlp.w')
    assert key.layer == 1 and mtp_stack(key) == (2, 'mlp.w')
    for other in ('mtp.layers.1.transformer_layer.mlp.w', 'mtp_model_layer.layers.2.w', WEIGHT):
        assert mtp_stack(parse_key(other)) is None


@pytest.mark.parametrize('key', ['a._extra_state', '_extra_state', 'a._extra_state3/shard_0_1'])
def test_extra_state(key):
    assert is_extra_state(key)
    assert not is_extra_state(key.replace('_extra_state', '_extra_states'))
    assert not is_extra_state(key.replace('_extra_state', '_extra_state.x'))


def test_extra_state_of_any_expert_may_be_missing_from_a_load():
    """Grouped experts have ``_extra_state``, ``_extra_state1``, …"""

    class Experts(torch.nn.Module):
        def state_dict(self):
            return {'weight': 1, '_extra_state': 2, '_extra_state1': 3}

        def load_state_dict(self, state_dict, strict):
            return state_dict

    assert _strict_loader(Experts())({'weight': 1}, strict=False) == {'weight': 1}


def test_no_other_module_takes_keys_apart():
    root = Path(__file__).resolve().parents[3]
    sources = [path for part in ('megatron', 'tools') for path in (root / part).rglob('*.py')]
    pattern = re.compile(
        r"""layers\\\.|optimizer\\\.|chained_\\d|_idx_\(|'_extra_state'\)|'/shard_'|'common_state/"""
    )
    found = [
        f'{path.relative_to(root)}: {line}'
        for path in sources
        if path.name != 'checkpoint_keys.py'
        for line in path.read_text().splitlines()
        if pattern.search(line)
    ]
    assert len(sources) > 100 and not found, found


def test_objects_and_stacked_layers():
    assert without_shard('rng_state/shard_0.0_1.1') == 'rng_state'
    assert without_shard(WEIGHT) == WEIGHT
    assert stacks_layers('vision_model.decoder.layers.mlp.w') and not stacks_layers(WEIGHT)
    assert not stacks_layers('embedding.w')
