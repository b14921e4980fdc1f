"""What saved arguments are compared for, between GPT and hybrid."""

from argparse import Namespace
from math import ceil
from types import SimpleNamespace

import pytest
from megatron.core.dist_checkpointing.checkpoint_layout import layout_from_keys
from megatron.core.dist_checkpointing.saved_arguments import (
    arguments_in,
    contradiction,
    other_functions,
    other_weights,
)

GPT = layout_from_keys(
    {
        'decoder.layers.mlp.linear_fc1.weight': (2, 8, 4),
        'decoder.layers.self_attention.linear_qkv.weight': (2, 12, 4),
        'decoder.final_layernorm.weight': (4,),
    }
)


@pytest.mark.parametrize(
    ('saved', 'reason'),
    [
        ({'hybrid_layer_pattern': '*-*-'}, "pattern '*-*-'"),
        ({'hybrid_override_pattern': '*-*-'}, "pattern '*-*-'"),
        ({'num_layers': 7}, '7 layers'),
        ({'num_layers': 2}, None),
        ({}, None),
    ],
)
def test_contradictions(saved, reason):
    found = contradiction(Namespace(**saved), GPT)
    assert found is None if reason is None else reason in found and 'decoder.' in found


def test_groups_of_queries_mean_nothing_without_grouped_query_attention():
    own = Namespace(group_query_attention=False, num_attention_heads=4, num_query_groups=1)
    saved = Namespace(group_query_attention=False, num_attention_heads=4, num_query_groups=4)
    assert other_weights(own, saved) is None


@pytest.mark.parametrize('name', ['num_attention_heads', 'num_query_groups'])
def test_attention_that_is_cut_elsewhere(name):
    saved = Namespace(group_query_attention=True, num_attention_heads=8, num_query_groups=4)
    own = Namespace(**{**vars(saved), name: 2})
    assert other_weights(own, saved).endswith(
        {
            'num_attention_heads': 'Pass --num-attention-heads 8.',
            'num_query_groups': 'Pass --group-query-attention --num-query-groups 4.',
        }[name]
    )
    assert other_weights(Namespace(), saved) is None


def test_a_run_that_groups_queries_and_should_not():
    own = Namespace(group_query_attention=True, num_attention_heads=8, num_query_groups=4)
    saved = Namespace(group_query_attention=False, num_attention_heads=8, num_query_groups=1)
    assert other_weights(own, saved).endswith('Leave out --group-query-attention.')


def test_arguments_saved_as_a_dict():
    assert arguments_in({'args': {'num_layers': 2, 3: 4}}) == SimpleNamespace(num_layers=2)
    assert vars(arguments_in({'args': None})) == vars(arguments_in({})) == {}
    saved = Namespace(num_layers=2)
    assert arguments_in({'args': saved}) is saved


def padded(size, tensor_parallel, multiple=16):
    step = multiple * tensor_parallel
    return Namespace(
        padded_vocab_size=ceil(size / step) * step,
        make_vocab_size_divisible_by=multiple,
        tensor_model_parallel_size=tensor_parallel,
    )


@pytest.mark.parametrize('tensor_parallel', [1, 2, 4])
def test_a_vocabulary_may_be_padded_otherwise_but_not_be_another(tensor_parallel):
    by_size = {size: padded(size, 1).padded_vocab_size for size in range(1, 300)}
    for own in range(1, 200, 7):
        run = padded(own, tensor_parallel)
        sizes = {padded(size, tensor_parallel).padded_vocab_size: set() for size in by_size}
        for size, saved in by_size.items():
            sizes[padded(size, tensor_parallel).padded_vocab_size].add(saved)
        for saved in range(16, 240, 16):
            reason = other_weights(run, padded(saved, 1))
            assert (reason is None) == (saved in sizes[run.padded_vocab_size]), (own, saved)
    assert 'vocabulary' in other_weights(padded(500, tensor_parallel), padded(64, 1))
    assert other_weights(padded(31, 1), Namespace()) is None


@pytest.mark.parametrize(
    'name, own, saved',
    [
        ('moe_router_topk', 1, 2),
        ('rotary_interleaved', True, False),
        ('apply_layernorm_1p', True, False),
        ('position_embedding_type', 'none', 'rope'),
    ],
)
def test_what_the_weights_do_not_show(name, own, saved):
    differing = other_functions(Namespace(**{name: own}), Namespace(**{name: saved}))
    assert list(differing) == [(name, own, saved)]
    assert not list(other_functions(Namespace(**{name: own}), Namespace()))


@pytest.mark.parametrize('name', ['no_rope_freq', 'window_attn_skip_freq'])
def test_what_goes_by_the_number_of_a_layer_differs_even_where_it_is_the_same(name):
    args = Namespace(**{name: 2})
    assert list(other_functions(args, args)) == [(name, 2, 2)]
    assert not list(other_functions(Namespace(**{name: None}), Namespace()))
