"""Layer maps and retargeting, entry by entry, and on checkpoints of real models."""

import dataclasses
import io
import pickle
import re
import shutil

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop
from megatron.core.dist_checkpointing.checkpoint_layout import (
    check_sources,
    layout_from_keys,
    read_checkpoint_layout,
)
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.read_record import recording_reads
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from tests.cpu_megatron.session import Training, distributed_optimizer, gpt, hybrid, model_parallel
from tests.cpu_megatron.whole_checkpoint import gpt_source, read_tensors
from tools.checkpoint.gpt_into_hybrid import main

MAPS = interop.gpt_compatible_layer_maps('M*-M*-')
TRACKER = 'latest_checkpointed_iteration.txt'


def sharded(key, shape=(2, 3), **kwargs):
    return ShardedTensor.from_rank_offsets(key, torch.randn(shape), **kwargs)


def test_maps_pair_the_ith_positions():
    maps = interop.gpt_compatible_layer_maps('M*M|-*-')
    assert maps == interop.GPTCompatLayerMaps({1: 0, 4: 1}, {3: 0, 5: 1}, frozenset({0, 2}), 2)
    assert interop.gpt_compatible_layer_maps('E*') == interop.GPTCompatLayerMaps(
        {1: 0}, {0: 0}, frozenset(), 1
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        maps.num_gpt_layers = 3


@pytest.mark.parametrize(
    'pattern, keeps', [('M*M-*M-', True), ('**--', False), ('*-*M*--', False), ('E*', False)]
)
def test_maps_tell_whether_layers_are_computed_in_another_order(pattern, keeps):
    assert interop.gpt_compatible_layer_maps(pattern).keeps_gpt_order is keeps


@pytest.mark.parametrize(
    'pattern, reason',
    [
        (None, 'empty'),
        ('', 'empty'),
        ('|', 'no layers'),
        ('*-/*-', 'MTP'),
        ('/MM', 'MTP'),
        # callers match on upstream's phrases
        ('*-G', "'G'.* cannot be translated"),
        ('D-', "'D'.* cannot be translated"),
        ('+-', r"'\+'"),
        ('*-x', 'x'),
        ('*-*E', "dense.* one of '-' or 'E'"),
        ('**-', '2 attention.* equal, nonzero'),
        ('M*-M*', '1 MLP.* equal, nonzero'),
        ('MM', '0 attention.* equal, nonzero'),
        ('--', '0 attention.* equal, nonzero'),
    ],
)
def test_patterns_without_a_gpt_counterpart_are_refused(pattern, reason):
    with pytest.raises(ValueError, match=reason) as error:
        interop.gpt_compatible_layer_maps(pattern)
    assert repr(pattern) in str(error.value)


def test_a_tensor_gets_the_layer_as_its_leading_axis():
    entry = sharded('k')
    entry = interop._prepend_gpt_layer_axis(entry, 1, 4)
    expected = ShardedTensor.from_rank_offsets('k', entry.data, (0, 1, 4), prepend_axis_num=1)
    assert (entry.global_shape, entry.global_offset, entry.axis_fragmentations) == (
        expected.global_shape,
        expected.global_offset,
        expected.axis_fragmentations,
    )
    assert entry.prepend_axis_num == 1
    entry.validate_metadata_integrity()


def test_an_object_gets_the_layer_axis_instead_of_its_placeholder():
    placeholder = interop._prepend_gpt_layer_axis(ShardedObject('k', None, (1,), (0,)), 2, 4)
    assert (placeholder.global_shape, placeholder.global_offset) == ((4,), (2,))
    expert = interop._prepend_gpt_layer_axis(ShardedObject('k', None, (8,), (3,)), 2, 4)
    assert (expert.global_shape, expert.global_offset) == ((4, 8), (2, 3))


def test_what_a_factory_builds_gets_the_layer_axis_however_deep():
    def build(key, data, replica_id, flattened_range):
        halves = data.chunk(2)
        return {'list': [sharded(key, (1, 3))], 'dict': {'w': sharded(key), 'v': halves[1]}}

    inner = ShardedTensorFactory('k', torch.randn(2, 3), build, lambda built: built)
    factory = interop._prepend_gpt_layer_axis(inner, 0, 2)
    built = factory.build()
    assert built['list'][0].global_shape == (2, 1, 3)
    assert built['dict']['w'].prepend_axis_num == 1
    assert isinstance(built['dict']['v'], torch.Tensor)


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


def save_gpt(path, layout_options=None, **model):
    """Train, save, and train on; returns the losses after the save."""
    with model_parallel():
        run = Training.start(gpt(**model), distributed_optimizer())
        run.train(2)
        if layout_options:
            save_state = run.state_dict

            def with_options(metadata, is_loading=False):
                return save_state(metadata | layout_options, is_loading)

            run.state_dict = with_options
        run.save(path)
        return run.train(2)


def load_into_hybrid(path, pattern, again, **model):
    """Load through the retargeted request, and save what arrived under the model's own keys.

    Returns:
        The layer maps, and the losses of the next steps.
    """
    layout = read_checkpoint_layout(str(path))
    maps = interop.gpt_compatible_layer_maps(pattern, layout)

    def prepare(state):
        for part in ('model', 'optimizer'):
            interop.retarget_sharded_state_dict_to_gpt_checkpoint(state[part], maps)
        parts = {part: state[part] for part in ('model', 'optimizer')}
        check_sources(parts, layout, with_mtp=bool(maps.mtp_pattern))
        return state

    with model_parallel(seed=99):
        run = Training.start(hybrid(pattern, **model), distributed_optimizer())
        run.load(path, prepare)
        run.save(again)
        return maps, run.train(2)


MLA = {
    'multi_latent_attention': True,
    'q_lora_rank': 8,
    'kv_lora_rank': 12,
    'qk_head_dim': 8,
    'qk_pos_emb_head_dim': 4,
    'v_head_dim': 6,
    'rope_type': 'rope',
}
needs_latent_layers = pytest.mark.skipif(
    not hasattr(Symbols, 'MLA'), reason='HybridModel has no MLA layers before 0.19'
)


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


def test_weights_on_one_side_only_are_an_error(tmp_path):
    save_gpt(tmp_path / 'untied', tied=False)
    with pytest.raises(CheckpointingException, match='output_layer.weight.*nothing in the model'):
        load_into_hybrid(tmp_path / 'untied', '*-*-', tmp_path / 'again')
    save_gpt(tmp_path / 'tied')
    with pytest.raises(CheckpointingException, match='output_layer.weight.*does not have it'):
        load_into_hybrid(tmp_path / 'tied', '*-*-', tmp_path / 'again', tied=False)
    with pytest.raises(CheckpointingException, match='position_embeddings.weight'):
        load_into_hybrid(
            tmp_path / 'tied',
            '*-*-',
            tmp_path / 'again',
            position_embedding_type='learned_absolute',
        )


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
    for has, lacks in ((common, common | other), (common | other, common)):
        with model_parallel():
            stored = nested_values(gpt(**has)[0].sharded_state_dict())
            request = hybrid(pattern, **lacks)[0].sharded_state_dict()
        layout = layout_from_keys({entry.key: tuple(entry.global_shape) for entry in built(stored)})
        interop.retarget_sharded_state_dict_to_gpt_checkpoint(request, maps)
        with pytest.raises(CheckpointingException, match=r'\(\d+ such keys') as error:
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
    'key',
    [
        'decoder.layers.mlp.linear_fc2.weight',
        'optimizer.state.exp_avg_sq.decoder.layers.self_attention.linear_qkv.weight',
    ],
)
def test_an_entry_that_the_load_skips_is_missed_after_it(key, tmp_path, monkeypatch):
    save_gpt(tmp_path / 'gpt')
    layout = read_checkpoint_layout(str(tmp_path / 'gpt'))
    maps = interop.gpt_compatible_layer_maps('M*-*-', layout)
    plan_everything = MCoreLoadPlanner.create_local_plan

    def skip(planner):
        plan = plan_everything(planner)
        items = [
            item
            for item in plan.items
            if (item.dest_index.fqn, tuple(item.dest_index.offset or ())[:1]) != (key, (1,))
        ]
        return dataclasses.replace(plan, items=items)

    with model_parallel(seed=99):
        run = Training.start(hybrid('M*-*-'), distributed_optimizer())

        def load():
            def prepare(state):
                parts = {part: state[part] for part in ('model', 'optimizer')}
                for part in parts.values():
                    interop.retarget_sharded_state_dict_to_gpt_checkpoint(part, maps)
                record.requested.update(check_sources(parts, layout))
                return state

            with recording_reads({}) as record:
                run.load(tmp_path / 'gpt', prepare)
            return record

        load().check()
        monkeypatch.setattr(MCoreLoadPlanner, 'create_local_plan', skip)
        record = load()
        with pytest.raises(CheckpointingException, match=rf'{re.escape(key)} \(from \[1, 0, 0\]\)'):
            record.check()


def test_a_pattern_of_other_layers_than_the_checkpoint_s_is_refused(tmp_path):
    save_gpt(tmp_path / 'dense')
    layout = read_checkpoint_layout(str(tmp_path / 'dense'))
    assert (layout.family, layout.num_layers, layout.indexed) == ('gpt', 2, False)
    for pattern, reason in [('*-', '2 layers'), ('*E*E', 'dense'), ('*-*E', 'mixes')]:
        with pytest.raises(ValueError, match=reason):
            interop.gpt_compatible_layer_maps(pattern, layout)


def test_attention_of_another_kind_is_refused_by_name(tmp_path):
    save_gpt(tmp_path / 'dense')
    save_gpt(tmp_path / 'latent', **MLA)
    dense, latent = (read_checkpoint_layout(str(tmp_path / name)) for name in ('dense', 'latent'))
    assert (dense.latent_attention, latent.latent_attention) == (False, True)
    with pytest.raises(ValueError, match=r"multi-latent \(MLA\), so it goes into '\+'.*not.*'\*'"):
        interop.gpt_compatible_layer_maps('M*-*-', latent)
    reason = r"not multi-latent \(MLA\), so it goes into '\*'" if hasattr(Symbols, 'MLA') else r'\+'
    with pytest.raises(ValueError, match=reason):
        interop.gpt_compatible_layer_maps('M+-+-', dense)


def test_mtp_depths_that_do_not_pair_are_refused(tmp_path):
    save_gpt(tmp_path / 'plain')
    save_gpt(tmp_path / 'mtp', mtp_num_layers=2)
    plain, mtp = (read_checkpoint_layout(str(tmp_path / name)) for name in ('plain', 'mtp'))
    assert (plain.mtp_depths, mtp.mtp_depths) == (0, 2)
    for pattern, layout, reason in [
        ('*-*-/*-', plain, "MTP part '\\*-' has no source"),
        ('*-*-/*-', mtp, '1 MTP depths, the checkpoint 2'),
        ('*-*-/*-/*-/*-', mtp, '3 MTP depths, the checkpoint 2'),
        ('*-*-/M/M', mtp, '0 attention .* and 0 MLP'),
        ('*-*-/*-*-/*-*-', mtp, '2 attention .* and 2 MLP'),
        ('*-*-/G-/G-', mtp, '0 attention .* and 1 MLP'),
        ('*-*-/*Q/*Q', mtp, "'Q'"),
    ]:
        with pytest.raises(ValueError, match=reason):
            interop.gpt_compatible_layer_maps(pattern, layout)
    # The other kind of MLP has other keys.
    with pytest.raises(CheckpointingException, match=r'mtp\.layers\.0\.transformer_layer\.mlp'):
        load_into_hybrid(tmp_path / 'mtp', '*-*-/*E/*E', tmp_path / 'again', num_moe_experts=4)
    assert interop.gpt_compatible_layer_maps('*-*-/M*-/M*-', mtp).keeps_gpt_order
    assert not interop.gpt_compatible_layer_maps('*-*-/-*/-*', mtp).keeps_gpt_order
    # Without an MTP part the depths stay unread.
    assert not interop.gpt_compatible_layer_maps('*-*-', mtp).mtp_pattern


def test_the_dry_run_tells_what_a_load_will_do(tmp_path, capsys):
    save_gpt(tmp_path / 'iter_0000002')
    (tmp_path / TRACKER).write_text('2\n')
    assert main([str(tmp_path), 'M*-*-']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split('<-')[1].strip() for line in lines if '<-' in line] == [
        'fresh initialisation',
        'attention of GPT layer 0',
        'dense MLP of GPT layer 0',
        'attention of GPT layer 1',
        'dense MLP of GPT layer 1',
    ]
    assert lines[-2:] == [
        'Optimizer state: fully_reshardable',
        'Will load, with its optimizer state. The checkpoint has no random state; pass '
        '--no-load-rng to start it fresh.',
    ]
    assert not any('order' in line for line in lines)
    assert main([str(tmp_path), '*M*--']) == 0
    assert 'computes its layers in the order' in capsys.readouterr().out
    assert main(['--', str(tmp_path), '-*-*']) == main([str(tmp_path), '-*-*']) == 0
    capsys.readouterr()
    for other in ('iter_0000001', 'release'):
        shutil.copytree(tmp_path / 'iter_0000002', tmp_path / other)
    for path, pattern, reason in [
        (tmp_path, '*-', '2 layers'),
        (tmp_path, '*E*E', 'dense'),
        (tmp_path / 'nowhere', '*-*-', "doesn't exist"),
        (tmp_path / 'iter_0000002', '*-*-', f'random weights; pass --load {tmp_path}.'),
        (tmp_path / 'iter_0000001', '*-*-', f'pass --load {tmp_path} --ckpt-step 1.'),
        (tmp_path / 'release', '*-*-', 'whose tracker names it'),
        (tmp_path / 'iter_0000002/metadata.json', '*-*-', 'is a file'),
        ('x' * 5000, '*-*-', 'File name too long'),
    ]:
        assert main([str(path), pattern]) == 1
        out = capsys.readouterr().out
        assert out.startswith('Will not load: ') and reason in out and out.count('\n') == 1
    assert main([str(tmp_path), '*-*-', '--ckpt-step=1']) == 0
    assert capsys.readouterr().out.startswith(f'{tmp_path}/iter_0000001: GPT')
    assert main([str(tmp_path), '*-*-', '--ckpt-step=3']) == 1
    assert 'iterations in' in capsys.readouterr().out
    (tmp_path / TRACKER).write_text('two')
    assert main([str(tmp_path), '*-*-']) == 1
    assert "holds 'two'" in capsys.readouterr().out
    (tmp_path / TRACKER).write_text('release')
    assert main([str(tmp_path), '*-*-']) == 0
    assert 'the optimizer starts fresh' in capsys.readouterr().out.splitlines()[-1]
    (tmp_path / 'release/metadata.json').unlink()
    assert main([str(tmp_path), '*-*-']) == 1
    assert 'an unfinished checkpoint' in capsys.readouterr().out


def test_the_dry_run_tells_of_a_layer_for_all_depths(tmp_path, capsys):
    save_gpt(tmp_path / 'iter_0000001', mtp_num_layers=1)
    (tmp_path / TRACKER).write_text('1')
    for pattern, depths in (('*-*-/*-', 1), ('*-*-/*-/*-', 2)):
        assert main([str(tmp_path), pattern]) == 0
        out = capsys.readouterr().out
        assert f'{depths} depth(s)  <-  1 MTP layer(s)' in out
        assert ('--mtp-use-repeated-layer' in out) is (depths > 1)


class Hostile:
    def __reduce__(self):
        return print, ('RAN',)


def test_the_dry_run_runs_nothing_from_the_metadata(tmp_path, capsys):
    (tmp_path / TRACKER).write_text('release')
    (tmp_path / 'release').mkdir()
    (tmp_path / 'release/.metadata').write_bytes(pickle.dumps(Hostile()))
    assert main([str(tmp_path), '*-*-']) == 1
    out = capsys.readouterr().out
    assert 'RAN' not in out and 'builtins.print' in out and out.count('\n') == 1
    assert '--trust-checkpoints' not in out  # which this command doesn't have


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
