"""Weighted merge: which checkpoints the command line means, and their weights."""

import math

import pytest
from megatron.core import dist_checkpointing

from tests.unit_tests.tools.checkpoint.handmade import (
    assert_same,
    copied,
    load_tensors,
    plain_merge,
)
from tests.unit_tests.tools.checkpoint.merge_words import cli, refused
from tools.checkpoint.weighted_merge import checkpoint_coefficients


@pytest.fixture
def out(tmp_path):
    return tmp_path / 'out'


def test_manual_mode_with_colons_in_a_path_and_a_root(five, tmp_path, out, capsys):
    root, paths, models = five
    odd = copied(paths[0], tmp_path / 'a:0.5:b')
    assert cli(f'--merge-inputs {odd}:0.25 {root}:0.75 --merge-output {out}') == 0
    assert_same(load_tensors(out), plain_merge([models[0], models[4]], [0.25, 0.75]))
    assert not (tmp_path / 'latest_checkpointed_iteration.txt').exists()
    assert 'weights sum' not in capsys.readouterr().out


def test_weights_are_used_exactly_with_a_warning_or_normalised(five, tmp_path, capsys):
    _, paths, models = five
    pairs = f'--merge-inputs {paths[0]}:3 {paths[1]}:-1 --merge-output'
    assert cli(pairs, tmp_path / 'a') == 0
    assert 'weights sum to 2 (smallest -1)' in capsys.readouterr().out
    assert_same(load_tensors(tmp_path / 'a'), plain_merge(models[:2], [3, -1]))
    assert cli(pairs, tmp_path / 'b', '--normalize') == 0
    assert_same(load_tensors(tmp_path / 'b'), plain_merge(models[:2], [1.5, -0.5]))


@pytest.mark.parametrize('weights', [('1e308', '1e308'), ('inf', '-inf'), ('nan', '1')])
def test_weights_whose_sum_is_none(five, out, capsys, weights):
    pairs = [f'{path}:{weight}' for path, weight in zip(five[1], weights, strict=False)]
    line = refused(capsys, '--merge-inputs', *pairs, '--normalize --merge-output', out)
    assert 'needs a finite, positive sum' in line


def test_arguments_of_a_range_change_nothing_of_pairs_but_their_least_number(five, out, capsys):
    _, paths, models = five
    words = f'--merge-inputs {paths[0]}:0.25 {paths[2]}:0.75 --merge-output {out}'
    words += ' --merge-style minus-sqrt --min-iteration-interval 1000 --ckpt-format torch_dist'
    words += ' --merge-byte-accounting all --min-checkpoints'
    assert 'asks for 3' in refused(capsys, words, 3)
    assert cli(words, 2) == 0
    assert 'the pairs are merged as they are, with the weights given' in capsys.readouterr().out
    assert_same(load_tensors(out), plain_merge([models[0], models[2]], [0.25, 0.75]))
    common = dist_checkpointing.load_common_state_dict(str(out))
    assert common['weighted_merge_provenance']['merge_style'] is None


@pytest.mark.parametrize('bound', ['--start-checkpoint', '--end-checkpoint'])
def test_one_bound_makes_no_range(five, tmp_path, out, capsys, bound):
    root, paths, models = five
    pairs = f'{paths[0]}:0.25 {paths[2]}:0.75'
    assert cli(f'--merge-inputs {pairs} {bound} 200 --merge-output {out}') == 0
    assert 'make a range only together' in capsys.readouterr().out
    assert_same(load_tensors(out), plain_merge([models[0], models[2]], [0.25, 0.75]))
    line = refused(capsys, f'--merge-inputs {root} {bound} 200 --merge-output {tmp_path}/no')
    assert 'give both --start-checkpoint and --end-checkpoint' in line


def from_to(five, start, end, out):
    return (
        f'--merge-inputs {five[0]} --start-checkpoint {start} --end-checkpoint {end} '
        f'--merge-output {out}'
    )


def test_range_mode(five, tmp_path):
    models = five[2]
    assert cli(from_to(five, 150, 400, tmp_path), '--merge-style minus-sqrt') == 0
    out = tmp_path / 'iter_0000400'
    weights = list(checkpoint_coefficients([200, 300, 400], 'minus-sqrt').values())
    assert_same(load_tensors(out), plain_merge(models[1:4], weights))
    assert (tmp_path / 'latest_checkpointed_iteration.txt').read_text() == '400\n'
    common = dist_checkpointing.load_common_state_dict(str(out))
    provenance = common['weighted_merge_provenance']
    assert common['iteration'] == 400
    assert provenance['iterations'] == [200, 300, 400] and provenance['weights'] == weights
    assert provenance['merge_style'] == 'minus-sqrt'
    assert provenance['implementation'] == 'dcp-metadata-same-layout'
    assert provenance['common_state_source'].endswith('iter_0000400')
    assert provenance['extra_state_source'].endswith('iter_0000200')


def test_a_range_may_be_normalised(five, tmp_path):
    assert cli(from_to(five, 100, 500, tmp_path), '--merge-style cosine --normalize') == 0
    weights = list(checkpoint_coefficients([100, 200, 300, 400, 500], 'cosine').values())
    expected = plain_merge(five[2], [weight / math.fsum(weights) for weight in weights])
    assert_same(load_tensors(tmp_path / 'iter_0000500'), expected)


def test_range_interval_walks_back_from_the_end(five, tmp_path):
    models, out = five[2], tmp_path / 'iter_0000007'
    few = '--min-iteration-interval 150 --min-checkpoints 3 --output-iteration 7'
    assert cli(from_to(five, 0, 500, out), few) == 0
    assert_same(load_tensors(out), plain_merge([models[0], models[2], models[4]], [1 / 3] * 3))
    assert (tmp_path / 'latest_checkpointed_iteration.txt').read_text() == '7\n'


@pytest.mark.parametrize(
    'start, end, message',
    [
        (300, 200, 'lies after'),
        (100, 250, 'no checkpoint of iteration 250; found'),
        (450, 500, 'asks for 2'),
    ],
)
def test_ranges_that_are_wrong(five, out, capsys, start, end, message):
    assert message in refused(capsys, from_to(five, start, end, out), '--min-checkpoints 2')
    assert not out.exists()


@pytest.mark.parametrize(
    'name, text', [('w.json', '{"100": 0.75, "200": 0.25}'), ('w.yaml', '100: 0.75\n200: 0.25\n')]
)
def test_coefficients_file(five, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert cli(from_to(five, 100, 200, tmp_path / 'out'), '--coefficients', tmp_path / name) == 0
    expected = plain_merge(five[2][:2], [0.75, 0.25])
    assert_same(load_tensors(tmp_path / 'out/iter_0000200'), expected)


@pytest.mark.parametrize(
    'text', ['100: 5.0e-1\n200: 5.e-1', '100: +0\n200: 1', '{100: 0.5, 200: .5}']
)
def test_yaml_numbers(five, tmp_path, text):
    (tmp_path / 'w.yaml').write_text(text)
    words = from_to(five, 100, 200, tmp_path / 'out')
    assert cli(words, '--dry-run --coefficients', tmp_path / 'w.yaml') == 0


@pytest.mark.parametrize(
    'name, text, message',
    [
        ('json', '{"100": 0.75}', 'without a weight: [200]'),
        ('json', '{"100": 1, "200": 1, "3": 1}', 'not in the'),
        ('json', '[1]', 'holds list'),
        ('json', '{', 'no JSON'),
        ('json', '{"100": "x", "200": 1}', 'expected an iteration'),
        ('json', '{"100": 1, "100": 2, "200": 1}', '100 twice'),
        ('json', '{"100": NaN, "200": 1}', 'not finite'),
        ('json', '{"100": true, "200": 1}', 'expected an iteration'),
        # what YAML would take otherwise than it is meant
        ('yaml', '100: 0.5\n200: 0.5\n100: 0.9\n', 'w.yaml: 100 twice'),
        ('yaml', '{100: 0.5, 200: 0.5, "100": 0.9}', '100 twice'),
        ('yaml', '010: 1\n', '010 would be taken as 8; write a plain decimal number'),
        ('yaml', '0x64: 1\n200: 1', '0x64 would be taken as 100;'),
        ('yaml', '1:40: 1\n200: 1', '1:40 would be taken as 100;'),
        ('yaml', '1_00: 1\n200: 1', '1_00 would be taken as 100;'),
        ('yaml', '100: 010\n200: 1', '010 would be taken as 8;'),
        ('yaml', '100: 1:30.5\n200: 1', '1:30.5 would be taken as 90.5;'),
        ('yaml', '100: 1e-1\n200: 1', "'1e-1', expected an iteration and its weight; write it as"),
        ('yaml', '100: 1e-1\n200: 1', ' write it as 1.0e-1'),
        ('yaml', '100: 2.5E3\n200: 1', 'write it as 2.5e+3'),
        ('yaml', '100: x\n200: 1', "'x', expected an iteration and its weight\n"),
        # what holds itself
        ('yaml', '&a {100: *a, 200: 1}', 'w.yaml: '),
        ('yaml', '&a [*a, *a]', 'w.yaml: '),
        ('yaml', '{100: 1, 200: &a [*a]}', 'w.yaml: '),
    ],
)
def test_coefficients_file_that_is_wrong(five, tmp_path, capsys, name, text, message):
    file = tmp_path / f'w.{name}'
    file.write_text(text)
    line = refused(capsys, from_to(five, 100, 200, tmp_path / 'out'), '--coefficients', file)
    assert message in line and len(line) < 500
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    'style, expected',
    [
        ('linear', [1 / 3, 1 / 3, 1 / 3]),
        ('minus-sqrt', [0.577350, 0.239146, 0.183503]),
        ('minus-sqrt__reverse', [0.183503, 0.239146, 0.577350]),
        ('cosine', [0.25, 0.5, 0.25]),
        ('inverse-sqrt', [2 - math.sqrt(2), math.sqrt(2) - 2 / math.sqrt(3), 2 / math.sqrt(3) - 1]),
    ],
)
def test_schedules_of_three(style, expected):
    weights = checkpoint_coefficients([300, 100, 200], style)
    assert list(weights) == [100, 200, 300]
    assert list(weights.values()) == pytest.approx(expected, abs=5e-7)


def test_schedule_of_five_and_of_one():
    weights = checkpoint_coefficients(range(5), 'minus-sqrt')
    assert [round(w, 6) for w in weights.values()] == [
        0.447214,
        0.185242,
        0.142141,
        0.119831,
        0.105573,
    ]
    for style in ('linear', 'minus-sqrt', 'cosine', 'inverse-sqrt'):
        assert checkpoint_coefficients([7], style) == {7: 1.0}
        for n in range(1, 40):
            assert sum(checkpoint_coefficients(range(n), style).values()) == pytest.approx(1)
    assert set(checkpoint_coefficients(range(7), 'linear').values()) == {1 / 7}


def test_scramble_is_a_permutation_fixed_by_its_seed():
    plain = checkpoint_coefficients(range(20), 'minus-sqrt')
    one = checkpoint_coefficients(range(20), 'minus-sqrt__scramble')
    assert one == checkpoint_coefficients(range(20), 'minus-sqrt__scramble', seed=0)
    assert one != checkpoint_coefficients(range(20), 'minus-sqrt__scramble', seed=1)
    assert list(one.values()) != list(plain.values())
    assert sorted(one.values()) == sorted(plain.values())


@pytest.mark.parametrize(
    'iterations, style',
    [
        ([1, 1], 'linear'),
        ([], 'linear'),
        ([1], 'sqrt'),
        ([1], 'linear__twice'),
        ([1], 'linear__'),
        ([1], 'linear__reverse__scramble'),
    ],
)
def test_impossible_schedules(iterations, style):
    with pytest.raises(ValueError):
        checkpoint_coefficients(iterations, style)
