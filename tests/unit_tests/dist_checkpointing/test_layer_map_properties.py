"""Layer maps of any hybrid pattern, against counting its symbols."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import gpt_compatible_layer_maps

from tests.unit_tests.tools.checkpoint.damage import examples


@examples(100)
@given(st.data(), st.sampled_from('-E'))
def test_maps_turned_around_are_the_identity(data, mlp):
    pairs = data.draw(st.integers(1, 12))
    symbols = data.draw(st.permutations(['*', mlp] * pairs + ['M'] * data.draw(st.integers(0, 9))))
    bars = data.draw(st.sets(st.integers(1, len(symbols) - 1)))
    pattern = ''.join('|' * (i in bars) + symbol for i, symbol in enumerate(symbols))
    maps = gpt_compatible_layer_maps(pattern)
    places = {symbol: [i for i, s in enumerate(symbols) if s == symbol] for symbol in f'*{mlp}M'}
    for found, symbol in ((maps.attention_to_gpt, '*'), (maps.mlp_to_gpt, mlp)):
        back = {gpt: hybrid for hybrid, gpt in found.items()}
        assert [back[gpt] for gpt in range(pairs)] == places[symbol] and len(found) == pairs
    assert maps.fresh_init == set(places['M']) and maps.num_gpt_layers == pairs
    assert [maps.gpt_layer(i) for i in range(len(symbols))] == [
        None if symbol == 'M' else symbols[:i].count(symbol) for i, symbol in enumerate(symbols)
    ]


@examples(100)
@given(st.text('M*-EG|+x', max_size=12))
def test_a_pattern_has_maps_only_if_its_numbers_agree(pattern):
    symbols = pattern.replace('|', '')
    counts = {symbol: symbols.count(symbol) for symbol in '*-E'}
    right = (
        set(symbols) <= set('M*-E')
        and counts['*'] == counts['-'] + counts['E'] > 0
        and 0 in (counts['-'], counts['E'])
    )
    if right:
        assert gpt_compatible_layer_maps(pattern).num_gpt_layers == counts['*']
    else:
        with pytest.raises(ValueError):
            gpt_compatible_layer_maps(pattern)
