"""Patterns with fewer attention than MLP layers: what is paired, what is refused, what is said."""

import re
from argparse import ArgumentParser, Namespace
from math import e, log

import pytest
import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.checkpoint_layout import (
    check_sources,
    layout_from_keys,
    read_checkpoint_layout,
)
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    _retarget_explicit_key_to_gpt_checkpoint,
    gpt_compatible_layer_maps,
    retarget_sharded_state_dict_to_gpt_checkpoint,
)
from megatron.core.dist_checkpointing.load_plan import any_run, plan_load, words_on_optimizer
from megatron.core.dist_checkpointing.mamba_from_attention import with_warm_start
from megatron.core.dist_checkpointing.stored_checkpoint import StoredCheckpoint
from megatron.training.arguments import add_megatron_arguments

from tests.cpu_megatron.mamba_reference import rms_norm_gated
from tests.cpu_megatron.session import gpt, hybrid, model_parallel
from tests.cpu_megatron.whole_checkpoint import read_tensors

HIDDEN, HEADS, GROUPS, CHANNELS = 32, 4, 2, 8
ROWS = (HEADS + 2 * GROUPS) * CHANNELS
FITTING = {
    'mamba_num_heads': HEADS,
    'mamba_head_dim': CHANNELS,
    'mamba_state_dim': CHANNELS,
    'mamba_num_groups': HEADS,
}
INDEXER = {'dsa_indexer_n_heads': 2, 'dsa_indexer_head_dim': 8, 'dsa_indexer_topk': 4}
LATENT = ('self_attention.linear_kv_up_proj.weight', 'self_attention.linear_proj.weight')


def layout_of(layers, attention=('self_attention.linear_qkv.weight',), mlp='mlp.linear_fc1.weight'):
    return layout_from_keys(
        {f'decoder.layers.{part}': (layers, ROWS, HIDDEN) for part in (*attention, mlp)}
        | {'decoder.final_layernorm.weight': (HIDDEN,)}
    )


def plan(pattern, layout, **arguments):
    saved = Namespace(
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        group_query_attention=True,
        hidden_size=HIDDEN,
        kv_channels=CHANNELS,
        mamba_num_heads=None,
        mamba_head_dim=64,
        mamba_state_dim=128,
        mamba_num_groups=8,
    )
    stored = StoredCheckpoint(layout, {'args': saved})
    return plan_load(stored, any_run(stored, hybrid_layer_pattern=pattern, **arguments), 'hybrid')


@pytest.mark.parametrize(
    ('pattern', 'attention', 'mlp', 'replaced'),
    [
        ('M-*-M-*-', {2: 1, 6: 3}, {1: 0, 3: 1, 5: 2, 7: 3}, {0: (0,), 2: (4,)}),
        ('MM-|M*-M', {4: 1}, {2: 0, 5: 1}, {0: (0, 1)}),
        ('*MG-GM-', {0: 0}, {3: 0, 6: 1}, {1: (4, 5)}),
        ('-*-', {1: 1}, {0: 0, 2: 1}, {0: ()}),
        ('M-M-', {}, {1: 0, 3: 1}, {0: (0,), 1: (2,)}),
    ],
)
def test_each_mlp_ends_the_block_of_a_gpt_layer(pattern, attention, mlp, replaced):
    maps = gpt_compatible_layer_maps(pattern, layout_of(len(mlp)), replace_attention=True)
    assert (maps.attention_to_gpt, maps.mlp_to_gpt, maps.replaced) == (attention, mlp, replaced)
    fresh = {i for i, symbol in enumerate(pattern.replace('|', '')) if symbol in 'MG'}
    assert maps.fresh_init == fresh and maps.keeps_gpt_order and maps.num_gpt_layers == len(mlp)


@pytest.mark.parametrize('pattern', ['**--', 'M*-*-', '-*M-*'])
def test_with_as_many_attention_as_mlp_layers_the_ith_goes_to_the_ith(pattern):
    plain, replacing = (
        gpt_compatible_layer_maps(pattern, layout_of(2), replace) for replace in (False, True)
    )
    assert plain == replacing and not replacing.replaced
    assert list(plain.attention_to_gpt.values()) == [0, 1]


@pytest.mark.parametrize(
    ('pattern', 'layers', 'reason'),
    [
        ('**-M-M-', 3, r'layers 0 and 1 are attention before one MLP, layer 2.*GPT layer 0'),
        ('M-M-*', 2, r'layer 4 is attention after the last MLP'),
        ('**M-', 1, r'2 attention .* 1 MLP .* equal, nonzero number of both\.'),
        ('M*', 1, r'1 attention .* 0 MLP .* equal, nonzero number of both\.'),
        ('M-*-', 3, r'for 2 GPT layer\(s\), the checkpoint has 3 layers; give it 3 MLP layers'),
        ('M-*-M-', 2, r'for 3 GPT layer\(s\), the checkpoint has 2 layers; give it 2 MLP layers'),
        ('M-*E', 2, r"one of '-' or 'E'"),
        ('M-*E', 2, r'mixes'),
        ('ME*E', 2, r"layer 1 is 'E', the MLP of GPT layer 0 is dense: use '-'"),
    ],
)
def test_what_does_not_pair_is_refused_with_the_reason(pattern, layers, reason):
    refusal = plan(pattern, layout_of(layers), replace_gpt_attention=True).refusal
    assert re.search(reason, refusal), refusal


def test_attention_is_left_unread_when_it_is_asked_for_only():
    refused = plan('M-*-', layout_of(2))
    assert '1 attention' in refused.refusal and '--replace-gpt-attention' in refused.refusal
    taken = plan('M-*-', layout_of(2), replace_gpt_attention=True)
    assert not taken.refusal
    assert 'attention is replaced: of GPT layer 0 by layer 0 (M)' in taken.notes
    assert 'by nothing' in ''.join(plan('-*-', layout_of(2), replace_gpt_attention=True).notes)
    # arguments made by hand, without the overlay's, are those of a run that didn't ask
    stored = StoredCheckpoint(layout_of(2))
    args = any_run(stored, hybrid_layer_pattern='M-*-')
    del args.replace_gpt_attention, args.init_mamba_from_attention
    assert '--replace-gpt-attention' in plan_load(stored, args, 'hybrid').refusal


def test_explicit_names_are_of_the_block_s_layer():
    maps = gpt_compatible_layer_maps('M-*-', layout_of(2), True)
    names = {
        'model.module.decoder.layers.0.mixer.D': None,
        'module.decoder.layers.1.mlp.linear_fc1.weight': 'module.decoder.layers.0.mlp',
        'decoder.layers.2.self_attention.linear_qkv.weight': 'decoder.layers.1.self_attention',
    }
    for name, start in names.items():
        found = _retarget_explicit_key_to_gpt_checkpoint(name, maps)
        assert (found is None) == (start is None) and (found or '').startswith(start or '')


def test_sparse_attention_takes_multi_latent_attention_and_a_fresh_indexer():
    plain, latent = layout_of(2), layout_of(2, LATENT)
    refusal = plan('D-D-', plain).refusal
    assert "not multi-latent (MLA), so it goes into '*' layers, not into 'D'" in refusal
    taken = plan('M-D-', latent, replace_gpt_attention=True)
    maps = taken.layer_maps
    assert maps.attention_to_gpt == {2: 1}
    assert any('indexers of 1 sparse attention layer(s)' in note for note in taken.notes)
    assert maps.is_fresh_indexer('self_attention.core_attention.indexer.linear_wk.weight')
    assert not maps.is_fresh_indexer('self_attention.linear_kv_up_proj.weight')
    own = layout_of(2, (*LATENT, 'self_attention.core_attention.indexer.linear_wk.weight'))
    assert not plan('D-D-', own).layer_maps.fresh_indexers


LATENT_MODEL = {
    'multi_latent_attention': True,
    'q_lora_rank': 16,
    'kv_lora_rank': 8,
    'qk_head_dim': 8,
    'qk_pos_emb_head_dim': 4,
    'v_head_dim': 8,
    'rope_type': 'rope',
    'add_bias_linear': False,
}


def test_a_sparse_attention_layer_reads_a_latent_one(tmp_path):
    with model_parallel():
        save(tmp_path, **LATENT_MODEL)
        [model] = hybrid('M-D-', **LATENT_MODEL, **INDEXER)
        before = {key: value.clone() for key, value in model.named_parameters()}
        layout = read_checkpoint_layout(str(tmp_path))
        maps = gpt_compatible_layer_maps('M-D-', layout, True)
        request = model.sharded_state_dict()
        retarget_sharded_state_dict_to_gpt_checkpoint(request, maps)
        check_sources(request, layout, may_be_unread=maps.may_be_unread)
        model.load_state_dict(
            dist_checkpointing.load(request, str(tmp_path), validate_access_integrity=False)
        )
        gpt_tensors, read = read_tensors(tmp_path), []
        for key, value in model.named_parameters():
            part = key.removeprefix('decoder.layers.2.')
            if part == key:
                continue
            if 'indexer' in part:
                assert torch.equal(value, before[key]), key
                continue
            assert torch.equal(value, gpt_tensors[f'decoder.layers.{part}'][1]), key
            read.append(part)
        assert (
            'self_attention.linear_kv_up_proj.weight' in read and 'input_layernorm.weight' in read
        )


@pytest.mark.parametrize(
    ('pattern', 'options', 'reason'),
    [
        ('M-*-', {'mamba_num_heads': None}, '8 heads of 8'),
        ('M-*-', {'mamba_head_dim': 16}, '4 heads of 16'),
        ('M-*-', {'mamba_state_dim': 16}, 'states of 16'),
        ('M-*-', {'mamba_num_groups': GROUPS}, '2 groups'),
        ('M-*-', {'tensor_model_parallel_size': 4}, 'among 4 tensor parallel ranks'),
        ('MM-*-', {}, 'layers 0 and 1 both stand in the place of the attention of GPT layer 0'),
        ('*-*-', {}, 'no Mamba layer'),
        ('G-*-', {}, 'no Mamba layer'),
        ('M-*-', {'kv_channels': 16}, 'expected 128 rows'),
        ('M-*-', {'attention_output_gate': True}, '--attention-output-gate'),
        ('M-*-', {'num_attention_heads': None}, 'no arguments say how many attention heads'),
    ],
)
def test_a_warm_start_that_does_not_fit_is_refused_with_what_would(pattern, options, reason):
    arguments = FITTING | {'replace_gpt_attention': True, 'init_mamba_from_attention': True}
    assert not plan('M-*-', layout_of(2), **arguments).refusal
    refusal = plan(pattern, layout_of(2), **(arguments | options)).refusal
    assert '--init-mamba-from-attention' in refusal and reason in refusal
    if 'heads of' in refusal:
        words = refusal.rpartition('pass ')[2].rstrip('.').split()
        passed = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        assert passed == {f'--{k.replace("_", "-")}': v for k, v in FITTING.items()}


def test_other_heads_are_named_before_sizes_that_follow_from_them():
    arguments = FITTING | {'replace_gpt_attention': True, 'init_mamba_from_attention': True}
    refusal = plan('M-*-', layout_of(2), **arguments, group_query_attention=False).refusal
    assert refusal.endswith('Pass --group-query-attention --num-query-groups 2.')


@pytest.mark.parametrize(('pattern', 'told'), [('M-*-', True), ('M-M-', False)])
def test_norms_of_queries_and_keys_are_not_in_hybrid_layers(pattern, told):
    norms = [f'self_attention.{name}_layernorm.weight' for name in 'qk']
    layout = layout_of(2, ['self_attention.linear_qkv.weight', *norms])
    found = plan(pattern, layout, replace_gpt_attention=True)
    assert any('--qk-layernorm' in note and '--spec' in note for note in found.notes) == told
    sentence, _ = words_on_optimizer(StoredCheckpoint(layout), found)
    assert ('--spec' in sentence) == told


def test_the_parser_has_the_arguments():
    args = add_megatron_arguments(ArgumentParser()).parse_args([])
    assert (args.replace_gpt_attention, args.init_mamba_from_attention) == (False, False)
    args = add_megatron_arguments(ArgumentParser()).parse_args(
        ['--replace-gpt-attention', '--init-mamba-from-attention']
    )
    assert (args.replace_gpt_attention, args.init_mamba_from_attention) == (True, True)


def test_weights_of_the_attention_that_is_kept_have_to_be_read(tmp_path):
    with model_parallel():
        save(tmp_path, qk_layernorm=True)
        layout = read_checkpoint_layout(str(tmp_path))
        [model] = hybrid('M-*-', num_query_groups=GROUPS)
        request = model.sharded_state_dict()
        maps = gpt_compatible_layer_maps('M-*-', layout, True)
        retarget_sharded_state_dict_to_gpt_checkpoint(request, maps)
        with pytest.raises(CheckpointingException, match=r'k_layernorm\.bias: .*--qk-layernorm'):
            check_sources(request, layout, may_be_unread=maps.may_be_unread)
        # of a checkpoint without attention that is kept, no weight of it is missed
        [model] = hybrid('M-M-', num_query_groups=GROUPS)
        request = model.sharded_state_dict()
        maps = gpt_compatible_layer_maps('M-M-', layout, True)
        retarget_sharded_state_dict_to_gpt_checkpoint(request, maps)
        check_sources(request, layout, may_be_unread=maps.may_be_unread)


def save(path, **model):
    [gpt_model] = gpt(**{'num_layers': 2, 'num_query_groups': GROUPS} | model)
    dist_checkpointing.save(gpt_model.sharded_state_dict(), str(path))


def test_a_warm_layer_computes_attention_without_softmax(tmp_path):
    """With A = 0, dt = 1, D = 0 and an identity convolution; SiLU comes after that, as ever."""
    with model_parallel(), torch.no_grad():
        save(tmp_path)
        [model] = hybrid('M-*-', **FITTING, num_query_groups=GROUPS)
        layout = read_checkpoint_layout(str(tmp_path))
        maps = gpt_compatible_layer_maps('M-*-', layout, True)
        sizes = Namespace(num_attention_heads=HEADS, hidden_size=HIDDEN, **FITTING)
        request = model.sharded_state_dict()
        retarget_sharded_state_dict_to_gpt_checkpoint(
            request, with_warm_start(maps, layout, sizes, GROUPS)
        )
        model.load_state_dict(
            dist_checkpointing.load(request, str(tmp_path), validate_access_integrity=False)
        )
        layer = model.decoder.layers[0]
        forget_nothing(layer.mixer)
        hidden = torch.randn(10, 1, HIDDEN)
        computed = (layer(hidden, None) - hidden)[:, 0]
        z = F.linear(attention_input(hidden[:, 0], tmp_path), layer.mixer.in_proj.weight[:HIDDEN])
        for swapped in ('', 'qk', 'kv'):
            y = attention_without_softmax(hidden[:, 0], tmp_path, swapped)
            norm = layer.mixer.norm
            gated = rms_norm_gated(y, norm.weight, z, norm.eps, CHANNELS, False)
            proj = read_tensors(tmp_path)['decoder.layers.self_attention.linear_proj.weight'][0]
            same = torch.allclose(computed, F.linear(gated, proj), atol=1e-5)
            assert same == (not swapped)


def forget_nothing(mixer):
    """A = 0, dt = 1, D = 0 and a convolution that gives back its input."""
    mixer.A_log.fill_(-torch.inf)
    mixer.in_proj.weight[-HEADS:] = 0
    mixer.dt_bias.fill_(log(e - 1))  # whose softplus is 1
    mixer.D.zero_()
    for name, value in mixer.named_parameters():
        if 'conv1d' in name:
            value.zero_()
        if 'conv1d' in name and 'weight' in name:
            value[..., -1] = 1


def attention_input(hidden, path):
    tensors, prefix = read_tensors(path), 'decoder.layers.self_attention.linear_qkv.layer_norm_'
    weight, bias = tensors[f'{prefix}weight'][0], tensors[f'{prefix}bias'][0]
    return F.layer_norm(hidden, (HIDDEN,), weight, bias, 1e-5)


def attention_without_softmax(hidden, path, swapped=''):
    """y[t] = sum over s up to t of (q[t]·k[s]) v[s], head by head, from the attention's weights."""
    qkv = read_tensors(path)['decoder.layers.self_attention.linear_qkv.weight'][0]
    normed = attention_input(hidden, path)
    per_group = HEADS // GROUPS
    y = torch.zeros(len(hidden), HEADS * CHANNELS)
    for head in range(HEADS):
        group, member = divmod(head, per_group)
        first = group * (per_group + 2)
        rows = {'q': first + member, 'k': first + per_group, 'v': first + per_group + 1}
        if swapped:
            rows[swapped[0]], rows[swapped[1]] = rows[swapped[1]], rows[swapped[0]]
        q, k, v = (
            F.silu(normed @ qkv[rows[name] * CHANNELS : (rows[name] + 1) * CHANNELS].T)
            for name in 'qkv'
        )
        for t in range(len(hidden)):
            for s in range(t + 1):
                y[t, head * CHANNELS : (head + 1) * CHANNELS] += (q[t] @ k[s]) * v[s]
    return y
