"""Warnings of arguments without weights, between GPT and hybrid."""

from argparse import Namespace

import pytest
from megatron.training.checkpointing import _warn_of_other_functions


def test_no_warning_of_query_groups_without_grouped_query_attention(capsys):
    own = Namespace(group_query_attention=False, num_attention_heads=4, num_query_groups=1)
    saved = Namespace(group_query_attention=False, num_attention_heads=4, num_query_groups=4)
    _warn_of_other_functions(own, saved, 'GPT')
    assert capsys.readouterr().out == ''


@pytest.mark.parametrize(
    'name, own, saved',
    [
        ('num_attention_heads', 2, 4),
        ('moe_router_topk', 1, 2),
        ('rotary_interleaved', True, False),
        ('apply_layernorm_1p', True, False),
    ],
)
def test_warning(name, own, saved, capsys):
    _warn_of_other_functions(Namespace(**{name: own}), Namespace(**{name: saved}), 'GPT')
    assert f'{name} is {own!r} in this run and was {saved!r}' in capsys.readouterr().out
