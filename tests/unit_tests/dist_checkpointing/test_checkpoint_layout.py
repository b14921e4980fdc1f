"""That model and checkpoint have the same weights, told before anything is read."""

import re

import pytest
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop
from megatron.core.dist_checkpointing.checkpoint_layout import check_sources, layout_from_keys
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from tests.cpu_megatron.session import gpt, hybrid, model_parallel
from tests.unit_tests.dist_checkpointing.gpt_runs import sharded

MOE = {'num_moe_experts': 2}
EXPERT_BIAS = {'moe_router_score_function': 'sigmoid', 'moe_router_enable_expert_bias': True}


@pytest.mark.parametrize(
    'common, other, argument',
    [
        (MOE, EXPERT_BIAS, '--moe-router-enable-expert-bias'),
        (MOE, {'moe_shared_expert_intermediate_size': 8}, '--moe-shared-expert-intermediate-size'),
        (MOE, {'add_bias_linear': True}, '--disable-bias-linear'),
        ({}, {'tied': False}, '--untie-embeddings-and-output-weights'),
        ({}, {'position_embedding_type': 'learned_absolute'}, '--position-embedding-type'),
        ({'add_bias_linear': False}, {'add_qkv_bias': True}, '--add-qkv-bias'),
        ({'normalization': 'RMSNorm'}, {'normalization': 'LayerNorm'}, '--normalization'),
    ],
)
def test_the_argument_that_makes_the_difference_is_named(common, other, argument):
    pattern = '*E*E' if common is MOE else '*-*-'
    maps = interop.gpt_compatible_layer_maps(pattern)
    for saved, run, reason in (
        (common, common | other, 'the checkpoint does not have it'),
        (common | other, common, 'nothing in the model reads it'),
    ):
        with model_parallel():
            stored = nested_values(gpt(**saved)[0].sharded_state_dict())
            request = hybrid(pattern, **run)[0].sharded_state_dict()
        layout = layout_from_keys({entry.key: tuple(entry.global_shape) for entry in built(stored)})
        interop.retarget_sharded_state_dict_to_gpt_checkpoint(request, maps)
        with pytest.raises(CheckpointingException, match=rf'{reason} \(\d+ such keys') as error:
            check_sources({'model': request}, layout)
        assert re.findall(r'--[a-z-]+', str(error.value)) == [argument]


def test_norms_that_hybrid_layers_do_not_have_need_another_spec():
    maps = interop.gpt_compatible_layer_maps('*-*-')
    with model_parallel():
        stored = nested_values(gpt(qk_layernorm=True)[0].sharded_state_dict())
        request = hybrid('*-*-', qk_layernorm=True)[0].sharded_state_dict()
    layout = layout_from_keys({entry.key: tuple(entry.global_shape) for entry in built(stored)})
    interop.retarget_sharded_state_dict_to_gpt_checkpoint(request, maps)
    with pytest.raises(CheckpointingException, match='_layernorm.*--qk-layernorm, --spec'):
        check_sources({'model': request}, layout)


def built(entries):
    for entry in entries:
        if isinstance(entry, ShardedTensorFactory):
            yield from built(nested_values({'': entry.build()}))
        elif isinstance(entry, ShardedTensor):
            yield entry


def test_missing_optimizer_state_is_not_the_model_s():
    state = {'x': sharded('optimizer.state.momentum_buffer.decoder.layers.mlp.linear_fc1.weight')}
    layout = layout_from_keys({'decoder.layers.mlp.linear_fc1.weight': (1, 2, 3)})
    with pytest.raises(CheckpointingException, match='--optimizer .or pass --no-load-optim'):
        check_sources(state, layout)


@pytest.mark.parametrize(
    ('key', 'shape'),
    [
        ('decoder.layers.2147483648.mlp.linear_fc1.weight', (4, 4)),
        ('decoder.layers.mlp.linear_fc1.weight', (2147483648, 4, 4)),
    ],
)
def test_layers_of_absurd_number_are_damage(key, shape):
    with pytest.raises(
        CheckpointingException, match=r'^decoder\..* layers; the metadata is damaged'
    ):
        layout_from_keys({key: shape})
