"""Plans of the converter for any layout, against independent answers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit_tests.tools.checkpoint.damage import examples
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.pp_vpp.keys import layer_of, renumber
from tools.checkpoint.pp_vpp.layout import (
    OutputSide,
    first_missing,
    interleaved,
    one_to_one,
    resplit,
)
from tools.checkpoint.pp_vpp.optimizer_state import Group, Slot
from tools.checkpoint.pp_vpp.param_match import NamedTensor, match
from tools.checkpoint.pp_vpp.rank_args import split_pattern, stage_string


@st.composite
def layouts(draw, total):
    """(pipeline size, virtual size, layers of each chunk) of ``total`` layers."""
    ranks, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    cuts = sorted(
        draw(
            st.lists(
                st.integers(0, total), min_size=ranks * chunks - 1, max_size=ranks * chunks - 1
            )
        )
    )
    return ranks, chunks, [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def apply(plan, contents):
    """The new chunks' layers, from those of the old chunks."""
    return {
        move.target: [
            layer
            for piece in move.pieces
            for layer in contents[piece.source][piece.first : piece.last]
        ]
        for move in plan.moves
    }


@examples(80)
@given(st.data(), st.integers(1, 24))
def test_reshape_takes_every_layer_once_and_back_is_the_identity(data, total):
    (p, v, layers), (q, w, others) = data.draw(layouts(total)), data.draw(layouts(total))
    old, new = interleaved(p, v), interleaved(q, w)
    numbers = iter(range(total))
    contents = {
        chunk: [next(numbers) for _ in range(n)] for chunk, n in zip(old, layers, strict=True)
    }
    plan = resplit(old, layers, q, w, others)
    made = apply(plan, contents)
    assert [layer for chunk in new for layer in made[chunk]] == list(range(total))
    assert [len(made[chunk]) for chunk in new] == others == plan.layers()
    assert [move.first_layer for move in plan.moves] == [sum(others[:i]) for i in range(len(new))]
    assert [move.is_first for move in plan.moves].index(True) == 0
    assert (
        sum(move.is_first for move in plan.moves) == sum(move.is_last for move in plan.moves) == 1
    )
    assert plan.moves[-1].is_last
    assert apply(resplit(new, others, p, v, layers), made) == contents


@examples(50)
@given(st.data(), st.integers(1, 4), st.integers(2, 4))
def test_merge_and_split_undo_each_other(data, ranks, chunks):
    layers = data.draw(
        st.lists(st.integers(0, 3), min_size=ranks * chunks, max_size=ranks * chunks)
    )
    stages, virtual = interleaved(ranks * chunks, 1), interleaved(ranks, chunks)
    contents = {
        stage: [(stage, i) for i in range(n)] for stage, n in zip(stages, layers, strict=True)
    }
    merged = apply(one_to_one(stages, virtual, layers, [OutputSide('', ranks, chunks)]), contents)
    for stage, (chunk, found) in enumerate(
        sorted(merged.items(), key=lambda item: (item[0].chunk, item[0].rank))
    ):
        assert (chunk.chunk, chunk.rank) == divmod(stage, ranks) and found == contents[
            stages[stage]
        ]
    split = one_to_one(virtual, stages, layers, [OutputSide('', ranks * chunks, None)])
    assert apply(split, merged) == contents


@examples(50)
@given(st.integers(1, 30), st.integers(1, 10**12), st.integers(1, 10**12))
def test_layers_are_divided_evenly_or_refused_whatever_the_sizes(total, ranks, chunks):
    source = interleaved(1, 1)
    if total % (ranks * chunks):
        with pytest.raises(CheckpointError, match="can't be divided"):
            resplit(source, [total], ranks, chunks)
    else:
        plan = resplit(source, [total], ranks, chunks)
        assert plan.layers() == [total // (ranks * chunks)] * (ranks * chunks)


@examples(60)
@given(st.sets(st.integers(0, 12)), st.none() | st.integers(0, 14) | st.just(10**15))
def test_the_first_missing_number(found, size):
    last = max(found, default=-1) + 1 if size is None else size
    missing = [number for number in range(min(last, 20)) if number not in found]
    assert first_missing(found, size) == (missing[0] if missing else None)


@examples(50)
@given(st.data(), st.integers(1, 3))
def test_optimizer_slots_find_their_parameters_or_are_refused(data, count):
    """Whatever is assigned is right; where all shapes differ, everything is."""
    distinct = data.draw(st.booleans())
    total = data.draw(st.integers(1, 8))
    shapes = [(i + 1,) if distinct else (data.draw(st.integers(1, 2)),) for i in range(total)]
    homes = [data.draw(st.integers(0, count - 1)) for _ in shapes]
    tensors = [NamedTensor('model', f'w{i}', torch.empty(s)) for i, s in enumerate(shapes)]
    slots = [
        Slot(optimizer=0, group=home, number=i, shape=torch.Size(shape), state={'of': i})
        for i, (home, shape) in enumerate(zip(homes, shapes, strict=True))
    ]
    groups = [
        (Group(0, g, {}, g not in homes), [slot for slot in slots if slot.group == g])
        for g in range(count)
    ]
    try:
        found = match(tensors, groups, 'optimizer')
    except CheckpointError:
        assert not distinct
    else:
        assert [slot.state['of'] for slot in found] == list(range(total))


@examples(50)
@given(st.data(), st.integers(1, 12))
def test_stage_strings_and_patterns_keep_every_layer(data, total):
    _, _, layers = data.draw(layouts(total))
    assert [part.count('t') for part in stage_string(layers).split('|')] == layers
    pattern = data.draw(st.text('M*-E', min_size=total, max_size=total))
    found = split_pattern(pattern, layers)
    assert found.replace('|', '') == pattern and [len(p) for p in found.split('|')] == layers


@examples(50)
@given(st.text(max_size=12), st.integers(0, 10**6), st.integers(0, 10**6))
def test_only_the_layer_number_of_a_key_changes(rest, one, other):
    key = f'decoder.layers.{one}.x{rest}'
    assert layer_of(key) == one
    assert renumber(renumber(key, other), one) == key
    assert renumber(rest, other) == rest or layer_of(rest) is not None
