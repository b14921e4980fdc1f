"""Weights, chunk geometry and plans of a merge for any input, against independent answers."""

import itertools
import json
from decimal import Decimal, getcontext
from fractions import Fraction
from math import pi, sin
from pathlib import Path

import numpy
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.unit_tests.tools.checkpoint.damage import damaged_bytes, examples
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.merge.coefficients import load_coefficients
from tools.checkpoint.merge.geometry import Box, apart, runs, tiling_fault
from tools.checkpoint.merge.plan import make_plan
from tools.checkpoint.merge.schedules import STYLES, checkpoint_coefficients
from tools.checkpoint.merge.source import Slice, Source, TensorEntry

getcontext().prec = 50


def direct(name, i, n):
    """The weight of checkpoint i of n in closed form, not as a difference of the curve."""
    if name == 'linear':
        return Fraction(1, n)
    if name == 'minus-sqrt':  # √b - √a = (b - a) / (√b + √a)
        return 1 / (Decimal(n) * ((Decimal(i) / n).sqrt() + (Decimal(i + 1) / n).sqrt()))
    if name == 'cosine':  # (cos a - cos b) / 2 = sin((a + b) / 2) sin((b - a) / 2)
        return sin(pi * (2 * i + 1) / (2 * n)) * sin(pi / (2 * n))
    one, two = (1 + 3 * Decimal(x) / n for x in (i, i + 1))
    return 2 * (two.sqrt() - one.sqrt()) / (one * two).sqrt()


@examples(60)
@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=60, unique=True),
    st.sampled_from(STYLES),
    st.integers(0, 2**31),
)
def test_weights_sum_to_one_and_follow_their_formula(iterations, style, seed):
    name, _, modifier = style.partition('__')
    n = len(iterations)
    found = checkpoint_coefficients(iterations, style, seed)
    assert list(found) == sorted(iterations)
    assert abs(sum(map(Fraction, found.values())) - 1) < Fraction(1, 10**12)
    expected = [float(direct(name, i, n)) for i in range(n)]
    weights = list(found.values())
    if modifier == 'reverse':
        expected.reverse()
    elif modifier == 'scramble':
        weights, expected = sorted(weights), sorted(expected)
    assert weights == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert found == checkpoint_coefficients(iterations[::-1], style, seed)


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@examples(60)
@given(ODD | st.dictionaries(st.integers(0, 300).map(str), ODD), st.sampled_from(['json', 'yaml']))
def test_a_file_of_weights_gives_each_iteration_one_or_is_refused(
    tmp_path_factory, content, suffix
):
    file = tmp_path_factory.getbasetemp() / f'weights.{suffix}'
    file.write_text(json.dumps(content))
    try:
        found = load_coefficients(file, [100, 200])
    except CheckpointError as error:
        assert str(error).isprintable()
    else:
        assert list(found) == [100, 200]
        assert all(isinstance(weight, float) for weight in found.values())


@examples(60)
@given(
    damaged_bytes(b'{"100": 0.25, "200": 7.5e-1}')
    | damaged_bytes(b'# weights\n100: 0.25\n200: &a 0.75\n'),
    st.sampled_from(['json', 'yaml']),
)
def test_a_damaged_file_of_weights_gives_what_python_reads_or_is_refused(
    tmp_path_factory, content, suffix
):
    file = tmp_path_factory.getbasetemp() / f'damaged.{suffix}'
    file.write_bytes(content)
    try:
        found = load_coefficients(file, [100, 200])
    except CheckpointError as error:
        assert str(error).isprintable()
    else:
        text = content.decode()
        plain = json.loads(text) if suffix == 'json' else yaml.safe_load(text)
        assert found == {int(key): float(value) for key, value in plain.items()}


# --- chunks


@st.composite
def tilings(draw, shape):
    """Boxes that cover ``shape`` once, from cuts at random places."""
    boxes = [Box((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        rest = box.sizes[dim] - at
        boxes.append(Box(box.offsets, _replaced(box.sizes, dim, at)))
        if rest:
            moved = _replaced(box.offsets, dim, box.offsets[dim] + at)
            boxes.append(Box(moved, _replaced(box.sizes, dim, rest)))
    return draw(st.permutations(list(dict.fromkeys(boxes))))


def _replaced(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@examples(80)
@given(st.data(), SHAPES)
def test_chunks_tile_a_tensor_exactly_if_every_element_is_covered_once(data, shape):
    boxes = data.draw(tilings(shape))
    if data.draw(st.booleans()):  # move, change or double a chunk
        at = data.draw(st.integers(0, len(boxes) - 1))
        number = st.integers(-1, 6)
        boxes[at] = Box(*(tuple(data.draw(number) for _ in shape) for _ in range(2)))
    inside = all(
        o >= 0 and s >= 0 and o + s <= n
        for box in boxes
        for o, s, n in zip(box.offsets, box.sizes, shape, strict=True)
    )
    counts = numpy.zeros(shape, int)
    for box in boxes if inside else []:
        counts[tuple(map(slice, box.offsets, box.ends))] += 1
    assert (tiling_fault(shape, boxes) is None) == (inside and bool((counts == 1).all()))


@examples(60)
@given(st.data(), SHAPES)
def test_boxes_that_share_elements_stay_together(data, shape):
    boxes = [box for _ in range(2) for box in data.draw(tilings(shape)) if box.numel]
    groups = list(apart(boxes))
    assert sorted(box for group in groups for box in group) == sorted(boxes)
    for one, other in itertools.combinations(groups, 2):
        assert not any(a.intersection(b) for a in one for b in other)


def test_what_ranks_have_of_a_tensor_comes_apart():
    """However many: of 5400 chunks in two layouts none is compared with more than a few."""
    layouts = [
        [
            Box((i, j, k * 12 // n), (1, 1, 12 // n))
            for i in range(3)
            for j in range(100)
            for k in range(n)
        ]
        for n in (12, 6)
    ]
    groups = list(apart([*layouts[0], *layouts[1]]))
    assert max(map(len, groups)) == 3 and len(groups) == 3 * 100 * 6


@examples(60)
@given(st.data(), SHAPES)
def test_any_chunk_is_put_together_from_those_of_another_layout(data, shape):
    whole = numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape)
    stored = data.draw(tilings(shape))
    for box in data.draw(tilings(shape)):
        found = numpy.full(box.numel, -1)
        for other in stored:
            part = box.intersection(other)
            if part is None:
                continue
            flat = whole[tuple(map(slice, other.offsets, other.ends))].reshape(-1)
            for to, origin, length in runs(part, box, other):
                assert (found[to : to + length] == -1).all()
                found[to : to + length] = flat[origin : origin + length]
        assert (found == whole[tuple(map(slice, box.offsets, box.ends))].reshape(-1)).all()


@st.composite
def sources(draw):
    shapes = draw(
        st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=5)
    )
    made = []
    for number in range(draw(st.integers(1, 3))):
        source = Source(Path(f'/s{number}'), {})
        for key, shape in enumerate(shapes):
            chunks = {
                box: Slice('f', 0, 4 * box.numel) for box in draw(tilings(shape)) if box.numel
            }
            source.tensors[f'model.{key}'] = TensorEntry(shape, torch.float32, chunks)
        source.extra_states = {f'model.{i}._extra_state': Slice('f', 0, 3) for i in range(4)}
        made.append(source)
    return made


@examples(50)
@given(sources(), st.integers(1, 5), st.booleans())
def test_a_plan_makes_every_element_once_from_every_source(made, world_size, balance):
    plan = make_plan(made, made[0], world_size=world_size, balance=balance)
    assert len(plan.shares) == world_size
    jobs = [job for share in plan.shares for job in share.chunks]
    entries = sorted(job.key for share in plan.shares for job in share.byte_entries)
    assert entries == sorted(made[0].extra_states)
    for key, entry in made[0].tensors.items():
        counts = numpy.zeros(entry.shape, int)
        for job in (job for job in jobs if job.key == key):
            counts[tuple(map(slice, job.box.offsets, job.box.ends))] += 1
            for source, stored in zip(made, job.stored, strict=True):
                parts = [job.box.intersection(part.box) for part in stored]
                assert sum(part.numel for part in parts) == job.box.numel
                assert {part.path.parent for part in stored} == {source.directory}
        assert (counts == 1).all()
    loads = [sum(job.source_bytes for job in share.chunks) for share in plan.shares]
    if balance:  # greedy: the fullest rank exceeds the emptiest by one chunk at most
        assert max(loads) - min(loads) <= max(job.source_bytes for job in jobs)
    assert plan.output_bytes == sum(
        4 * numpy.prod(entry.shape, dtype=int) for entry in made[0].tensors.values()
    )


def test_many_chunks_in_four_dimensions_take_no_grid():
    """Edges of all chunks in all dimensions would be a grid of 10^11 cells."""
    side = range(5)
    boxes = [Box(at, (1,) * 4) for at in itertools.product(side, repeat=4)]
    assert tiling_fault((5,) * 4, boxes) is None
    moved = [*boxes[:-1], boxes[0]]
    assert tiling_fault((5,) * 4, moved) == 'chunks overlap'
