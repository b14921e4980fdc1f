"""Weighted merge: the command line."""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import pytest
from megatron.core import dist_checkpointing

from tests.unit_tests.tools.checkpoint.handmade import (
    assert_same,
    copied,
    load_tensors,
    plain_merge,
    tree,
)
from tools.checkpoint.common.progress import format_bytes
from tools.checkpoint.weighted_merge import checkpoint_coefficients, main
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge


@pytest.fixture
def out(tmp_path):
    return tmp_path / 'out'


def cli(*arguments):
    return main([str(argument) for argument in arguments])


def test_manual_mode_with_colons_in_a_path_and_a_root(five, tmp_path, capsys):
    root, paths, models = five
    odd = copied(paths[0], tmp_path / 'a:0.5:b')
    assert (
        cli('--merge-inputs', f'{odd}:0.25', f'{root}:0.75', '--merge-output', tmp_path / 'out')
        == 0
    )
    assert_same(load_tensors(tmp_path / 'out'), plain_merge([models[0], models[4]], [0.25, 0.75]))
    assert not (tmp_path / 'latest_checkpointed_iteration.txt').exists()
    assert 'weights sum' not in capsys.readouterr().out


def test_weights_are_used_exactly_with_a_warning_or_normalised(five, tmp_path, capsys):
    _, paths, models = five
    pairs = [f'{paths[0]}:3', f'{paths[1]}:-1']
    assert cli('--merge-inputs', *pairs, '--merge-output', tmp_path / 'a') == 0
    assert 'weights sum to 2 (smallest -1)' in capsys.readouterr().out
    assert_same(load_tensors(tmp_path / 'a'), plain_merge(models[:2], [3, -1]))
    assert cli('--merge-inputs', *pairs, '--normalize', '--merge-output', tmp_path / 'b') == 0
    assert_same(load_tensors(tmp_path / 'b'), plain_merge(models[:2], [1.5, -0.5]))


def test_arguments_of_a_range_change_nothing_of_pairs_but_their_least_number(
    five, tmp_path, capsys
):
    _, paths, models = five
    words = ['--merge-inputs', f'{paths[0]}:0.25', f'{paths[2]}:0.75', '--merge-output']
    words += [tmp_path / 'out', '--merge-style', 'minus-sqrt', '--min-iteration-interval', 1000]
    words += ['--ckpt-format', 'torch_dist', '--merge-byte-accounting', 'all']
    assert 'asks for 3' in refused(capsys, *words, '--min-checkpoints', 3)
    assert cli(*words, '--min-checkpoints', 2) == 0
    assert 'the pairs are merged as they are, with the weights given' in capsys.readouterr().out
    assert_same(load_tensors(tmp_path / 'out'), plain_merge([models[0], models[2]], [0.25, 0.75]))
    common = dist_checkpointing.load_common_state_dict(str(tmp_path / 'out'))
    assert common['weighted_merge_provenance']['merge_style'] is None


def test_a_range_may_be_normalised(five, tmp_path):
    root, _, models = five
    words = ['--merge-inputs', root, '--start-checkpoint', 100, '--end-checkpoint', 500]
    words += ['--merge-style', 'cosine', '--normalize', '--merge-output', tmp_path]
    assert cli(*words) == 0
    weights = list(checkpoint_coefficients([100, 200, 300, 400, 500], 'cosine').values())
    expected = plain_merge(models, [weight / math.fsum(weights) for weight in weights])
    assert_same(load_tensors(tmp_path / 'iter_0000500'), expected)


def test_range_mode(five, tmp_path, capsys):
    root, _, models = five
    assert (
        cli(
            '--merge-inputs',
            root,
            '--start-checkpoint',
            150,
            '--end-checkpoint',
            400,
            '--merge-style',
            'minus-sqrt',
            '--merge-output',
            tmp_path,
        )
        == 0
    )
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


def test_range_interval_walks_back_from_the_end(five, tmp_path):
    root, _, models = five
    assert (
        cli(
            '--merge-inputs',
            root,
            '--start-checkpoint',
            0,
            '--end-checkpoint',
            500,
            '--min-iteration-interval',
            150,
            '--min-checkpoints',
            3,
            '--merge-output',
            tmp_path / 'iter_0000007',
            '--output-iteration',
            7,
        )
        == 0
    )
    kept = [models[0], models[2], models[4]]
    assert_same(load_tensors(tmp_path / 'iter_0000007'), plain_merge(kept, [1 / 3] * 3))
    assert (tmp_path / 'latest_checkpointed_iteration.txt').read_text() == '7\n'


@pytest.mark.parametrize(
    'name, text',
    [
        ('w.json', '{"100": 0.75, "200": 0.25}'),
        ('w.yaml', '100: 0.75\n200: 0.25\n'),
    ],
)
def test_coefficients_file(five, tmp_path, name, text):
    root, _, models = five
    (tmp_path / name).write_text(text)
    assert (
        cli(
            '--merge-inputs',
            root,
            '--start-checkpoint',
            100,
            '--end-checkpoint',
            200,
            '--coefficients',
            tmp_path / name,
            '--merge-output',
            tmp_path / 'out',
        )
        == 0
    )
    assert_same(load_tensors(tmp_path / 'out/iter_0000200'), plain_merge(models[:2], [0.75, 0.25]))


@pytest.mark.parametrize(
    'text, message',
    [
        ('{"100": 0.75}', 'without a weight: [200]'),
        ('{"100": 1, "200": 1, "3": 1}', 'not in the'),
        ('[1]', 'holds list'),
        ('{', 'no JSON'),
        ('{"100": "x", "200": 1}', 'expected an iteration'),
        ('{"100": 1, "100": 2, "200": 1}', '100 twice'),
        ('{"100": NaN, "200": 1}', 'not finite'),
        ('{"100": true, "200": 1}', 'expected an iteration'),
    ],
)
def test_coefficients_file_that_is_wrong(five, tmp_path, capsys, text, message):
    (tmp_path / 'w.json').write_text(text)
    assert (
        cli(
            '--merge-inputs',
            five[0],
            '--start-checkpoint',
            100,
            '--end-checkpoint',
            200,
            '--coefficients',
            tmp_path / 'w.json',
            '--merge-output',
            tmp_path / 'out',
        )
        == 1
    )
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    'text, message',
    [
        ('100: 0.5\n200: 0.5\n100: 0.9\n', 'w.yaml: 100 twice'),
        ('{100: 0.5, 200: 0.5, "100": 0.9}', '100 twice'),
        ('010: 1\n', '010 would be taken as 8; write a plain decimal number'),
        ('0x64: 1\n200: 1', '0x64 would be taken as 100;'),
        ('1:40: 1\n200: 1', '1:40 would be taken as 100;'),
        ('1_00: 1\n200: 1', '1_00 would be taken as 100;'),
        ('100: 010\n200: 1', '010 would be taken as 8;'),
        ('100: 1:30.5\n200: 1', '1:30.5 would be taken as 90.5;'),
        (
            '100: 1e-1\n200: 1',
            "100: '1e-1', expected an iteration and its weight; write it as 1.0e-1",
        ),
        ('100: 2.5E3\n200: 1', 'write it as 2.5e+3'),
        ('100: x\n200: 1', "'x', expected an iteration and its weight\n"),
    ],
)
def test_yaml_that_would_be_taken_otherwise(five, tmp_path, capsys, text, message):
    (tmp_path / 'w.yaml').write_text(text)
    words = ['--merge-inputs', five[0], '--start-checkpoint', 100, '--end-checkpoint', 200]
    words += ['--coefficients', tmp_path / 'w.yaml', '--merge-output', tmp_path / 'out']
    assert message in refused(capsys, *words)


@pytest.mark.parametrize(
    'text', ['100: 5.0e-1\n200: 5.e-1', '100: +0\n200: 1', '{100: 0.5, 200: .5}']
)
def test_yaml_numbers(five, tmp_path, text):
    (tmp_path / 'w.yaml').write_text(text)
    words = ['--merge-inputs', five[0], '--start-checkpoint', 100, '--end-checkpoint', 200]
    words += ['--coefficients', tmp_path / 'w.yaml', '--merge-output', tmp_path / 'out']
    assert cli(*words, '--dry-run') == 0


@pytest.mark.parametrize('text', ['&a {100: *a, 200: 1}', '&a [*a, *a]', '{100: 1, 200: &a [*a]}'])
def test_coefficients_that_hold_themselves(five, tmp_path, capsys, text):
    (tmp_path / 'w.yaml').write_text(text)
    range_of_two = ('--merge-inputs', five[0], '--start-checkpoint', 100, '--end-checkpoint', 200)
    assert (
        cli(*range_of_two, '--coefficients', tmp_path / 'w.yaml', '--merge-output', tmp_path) == 1
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert 'w.yaml: ' in line and len(line) < 500


@pytest.mark.parametrize('bound', ['--start-checkpoint', '--end-checkpoint'])
def test_one_bound_makes_no_range(five, tmp_path, capsys, bound):
    root, paths, models = five
    pairs = [f'{paths[0]}:0.25', f'{paths[2]}:0.75']
    assert cli('--merge-inputs', *pairs, bound, 200, '--merge-output', tmp_path / 'out') == 0
    assert 'make a range only together' in capsys.readouterr().out
    assert_same(load_tensors(tmp_path / 'out'), plain_merge([models[0], models[2]], [0.25, 0.75]))
    line = refused(capsys, '--merge-inputs', root, bound, 200, '--merge-output', tmp_path / 'no')
    assert 'give both --start-checkpoint and --end-checkpoint' in line


def test_dry_run_prints_the_plan_and_writes_nothing(five, tmp_path, capsys):
    root, paths, _ = five
    before = tree(tmp_path)
    assert (
        cli(
            '--merge-inputs',
            f'{paths[0]}:0.5',
            f'{paths[1]}:0.5',
            '--dry-run',
            '--verify',
            '--merge-output',
            tmp_path / 'deep/out',
            '--output-iteration',
            5,
        )
        == 0
    )
    text = capsys.readouterr().out
    for part in (str(paths[1]), 'weight 0.5', '6 tensors', 'deep/out/iter_0000005', 'to read by 1'):
        assert part in text
    assert tree(tmp_path) == before and not (tmp_path / 'deep').exists()


def test_report_and_its_json(five, tmp_path, capsys):
    _, paths, _ = five
    assert (
        cli(
            '--merge-inputs',
            f'{paths[0]}:0.5',
            f'{paths[1]}:0.5',
            '--merge-output',
            tmp_path / 'out',
            '--report-json',
            tmp_path / 'r.json',
        )
        == 0
    )
    text = capsys.readouterr().out
    for part in ('discovery', 'load', 'accumulate', 'save', 'peak host memory', '/s, wrote'):
        assert part in text
    assert 'above what was loaded before the merge (Python, torch): ' in text
    report = json.loads((tmp_path / 'r.json').read_text())
    assert report['averaged_tensors'] == 6 and report['copied_extra_states'] == 1
    assert 0 <= report['merge_memory'][0] < report['peak_memory'][0]
    assert report['timings']['total'] > 0 and report['output_dir'] == str(tmp_path / 'out')
    written = sum(len(data) for data in tree(tmp_path / 'out').values())
    assert report['bytes_written'] == written
    content = (
        sum(t.nbytes for t in five[2][0].values())
        + report['bytes_read']
        - 2 * sum(t.nbytes for t in five[2][0].values())
    )
    assert report['content_bytes'] == content
    sizes = f'{format_bytes(written)} of files ({format_bytes(content)} of content) at'
    assert f'wrote {sizes}' in text and f'copied: {format_bytes(content)} of content' in text


def test_a_report_never_replaces_anything_but_a_report(five, tmp_path, capsys):
    source = copied(five[1][0], tmp_path / 'in')
    (tmp_path / 'weights.json').write_text('{"100": 1}')
    (tmp_path / 'link').symlink_to(source / 'metadata.json')
    (tmp_path / 'hard').hardlink_to(source / '.metadata')
    (tmp_path / 'dir').mkdir()
    before = tree(tmp_path)
    (tmp_path / 'loop').symlink_to(tmp_path / 'loop')
    names = [
        'in/metadata.json',
        'in/new.json',
        'weights.json',
        'link',
        'hard',
        'dir',
        'out',
        'loop',
    ]
    names += ['latest_checkpointed_iteration.txt', 'x' * 300]
    for name in names:
        for dry in ([], ['--dry-run']):
            words = ['--merge-inputs', f'{source}:1', '--merge-output', tmp_path / 'out', *dry]
            assert cli(*words, '--report-json', tmp_path / name) == 1
            error = capsys.readouterr().err
            assert f'--report-json {tmp_path / name}: ' in error and error.count('\n') == 1
    (tmp_path / 'loop').unlink()
    assert tree(tmp_path) == before and not (tmp_path / 'out').exists()
    (tmp_path / 'empty').touch()
    for name in ('new', 'new', 'empty'):
        assert cli(*words, '--report-json', tmp_path / name) == 0
        assert json.loads((tmp_path / name).read_text())['dry_run']
    assert cli(*words[:-1], '--report-json', '/dev/null') == 0


def refused(capsys, *arguments):
    """The one line of a merge that is refused."""
    assert cli(*arguments) == 1
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and error.startswith('error: ')
    return error


def test_a_tracker_never_goes_back(five, tmp_path, capsys):
    tracker = tmp_path / 'latest_checkpointed_iteration.txt'
    words = ['--merge-inputs', f'{five[1][0]}:1', '--output-iteration', 6, '--merge-output']
    tracker.write_text('12\n')
    for place in (tmp_path, tmp_path / 'iter_0000006'):
        for dry in ([], ['--dry-run']):
            error = refused(capsys, *words, place, *dry)
            for part in (
                str(tracker),
                'names 12',
                '--output-iteration 6',
                'another --merge-output',
            ):
                assert part in error
    assert tracker.read_text() == '12\n' and not (tmp_path / 'iter_0000006').exists()
    for index, text in enumerate(('5', '6', 'release', 'soon')):
        root = tmp_path / f'root{index}'
        root.mkdir()
        (root / tracker.name).write_text(text)
        assert cli(*words, root) == 0
        assert (root / tracker.name).read_text() == '6\n'
    assert cli(*words[:2], '--merge-output', tmp_path / 'none') == 0  # touches no tracker


@pytest.mark.parametrize('weights', [('1e308', '1e308'), ('inf', '-inf'), ('nan', '1')])
def test_weights_whose_sum_is_none(five, out, capsys, weights):
    pairs = [f'{path}:{weight}' for path, weight in zip(five[1], weights, strict=False)]
    words = ['--merge-inputs', *pairs, '--normalize', '--merge-output', out]
    assert 'needs a finite, positive sum' in refused(capsys, *words)


def test_places_where_nothing_can_be_written(five, tmp_path, capsys):
    (tmp_path / 'loop').symlink_to('loop')
    (tmp_path / 'nowhere').symlink_to(tmp_path / 'missing')
    (tmp_path / 'file').touch()
    pair = f'{five[1][0]}:1'
    for name, reason in (
        ('loop/x', 'symbolic links'),
        ('nowhere/x', 'no directory'),
        ('file/x', 'Not a directory'),
        ('n' * 300, 'too long'),
        ('n' * 300 + '/x', 'too long'),
        ('missing/' + 'n' * 300, 'too long'),
    ):
        for dry in ([], ['--dry-run'], ['--output-iteration', 7]):
            words = ['--merge-inputs', pair, '--merge-output', tmp_path / name, *dry]
            error = refused(capsys, *words)
            # whichever part of it is in the way
            assert str((tmp_path / name).parent) in error and reason in error
        words = ['--merge-inputs', pair, '--merge-output', tmp_path / 'out']
        error = refused(capsys, *words, '--common-state-checkpoint', tmp_path / name)
        assert str(tmp_path / name) in error
        assert str(tmp_path / name) in refused(
            capsys, '--merge-inputs', f'{tmp_path / name}:1', *words[2:]
        )
        with pytest.raises(SystemExit):
            cli(*words, '--report-json', tmp_path / name / 'r.json')
        assert 'no such directory' in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ['file', 'loop', 'nowhere']


@pytest.mark.parametrize('name', ['n' * 255, '\u2013' * 85, 'deep/' + 'n' * 250])
def test_what_the_dry_run_accepts_the_run_does_with_long_names(five, tmp_path, name):
    words = ['--merge-inputs', f'{five[1][0]}:1', '--merge-output', tmp_path / name]
    assert cli(*words, '--dry-run') == 0
    assert cli(*words) == 0
    assert_same(load_tensors(tmp_path / name), five[2][0])
    assert len(list(tmp_path.iterdir())) == 1


def test_a_path_too_long_for_what_is_written_below_it(five, tmp_path, capsys):
    room = os.pathconf('/', 'PC_PATH_MAX') - len(os.fsencode(tmp_path))
    long = (('d' * 60 + '/') * room)[: room - 50]
    words = ['--merge-inputs', f'{five[1][0]}:1', '--merge-output', tmp_path / long]
    for dry in ([], ['--dry-run']):
        assert "can't be written: the path is too long" in refused(capsys, *words, *dry)
    assert not list(tmp_path.iterdir())


def test_places_that_this_user_may_not_write(five, tmp_path, capsys, monkeypatch):
    (tmp_path / 'closed').mkdir()
    (tmp_path / 'r.json').touch()
    locked = [tmp_path / 'closed', tmp_path / 'r.json']
    monkeypatch.setattr(os, 'access', lambda path, mode, **options: Path(path) not in locked)
    for output, report in (
        ('closed/out', 'x.json'),
        ('closed/deep/out', 'x.json'),
        ('out', 'closed/x.json'),
        ('out', 'r.json'),
    ):
        words = ['--merge-inputs', f'{five[1][0]}:1', '--merge-output', tmp_path / output]
        for dry in ([], ['--dry-run']):
            error = refused(capsys, *words, '--report-json', tmp_path / report, *dry)
            assert 'this user may not write' in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ['closed', 'r.json']


@pytest.mark.parametrize('total, warned', [(10**9, True), (0, False)])
def test_a_full_file_system_is_told_before(five, out, capsys, monkeypatch, total, warned):
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(total, 0, 1))
    assert cli('--merge-inputs', f'{five[1][0]}:1', '--merge-output', out, '--dry-run') == 0
    assert (f'to be written to {out}, where 1 B are free' in capsys.readouterr().out) == warned


def test_output_that_can_not_be_shown(five, out, capsys, monkeypatch):
    """One line; a plan that nobody saw is a failure, an output that is published is none."""
    words = ['--merge-inputs', f'{five[1][0]}:1', '--merge-output', out]
    line = "error: standard output can't be written: No space left on device\n"
    for dry, code in ((['--dry-run'], 1), ([], 0)):
        with open('/dev/full', 'w') as full:
            monkeypatch.setattr(sys, 'stdout', full)
            assert cli(*words, *dry) == code
        assert capsys.readouterr().err == line
    assert out.exists()


@pytest.mark.parametrize('accounting', ['rank0', 'each-rank', 'all', 'none'])
def test_byte_accounting(five, out, accounting):
    result = merge(five[1][:2], [0.5, 0.5], out, byte_accounting=accounting)
    written = sum(len(data) for data in tree(out).values())
    tensors = sum(t.nbytes for t in five[2][0].values())
    assert result.bytes_written == written or (
        accounting == 'none' and tensors < result.bytes_written < written
    )


@pytest.mark.parametrize(
    'arguments',
    [
        [],
        ['--merge-inputs', 'a:1'],
        ['--merge-output', 'o'],
        ['--merge-inputs', 'a:1', '--merge-output', 'o', '--merge-style', 'sqrt'],
        ['--merge-inputs', 'a:1', '--merge-output', 'o', '--coefficients', 'w.json'],
        ['--merge-inputs', 'a:1', '--merge-output', 'o', '--ckpt-format', 'fsdp_dtensor'],
        *(
            ['--merge-inputs', 'a:1', '--merge-output', 'o', option, number]
            for option, number in (
                ('--min-checkpoints', '0'),
                ('--min-checkpoints', '-1'),
                ('--min-iteration-interval', '-5'),
                ('--extra-state-source-index', '-1'),
                ('--output-iteration', '-7'),
                ('--output-iteration', '9223372036854775808'),
                ('--start-checkpoint', '-5'),
                ('--end-checkpoint', '-5'),
            )
        ),
        [
            '--merge-inputs',
            'a',
            'b',
            '--merge-output',
            'o',
            '--start-checkpoint',
            '1',
            '--end-checkpoint',
            '2',
        ],
        ['--merge-inputs', 'a', '--merge-output', 'o', '--start-checkpoint', 'x'],
    ],
)
def test_wrong_usage_exits_with_2(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_help_is_complete(capsys):
    with pytest.raises(SystemExit):
        main(['--help'])
    text = ' '.join(capsys.readouterr().out.split())
    for part in ('OLDEST', '--coefficient-seed', '--keep-fp32', '--trust-checkpoints', 'torchrun'):
        assert part in text


@pytest.mark.parametrize(
    'extra, message',
    [
        (['--start-checkpoint', 300, '--end-checkpoint', 200], 'lies after'),
        (
            ['--start-checkpoint', 100, '--end-checkpoint', 250],
            'no checkpoint of iteration 250; found',
        ),
        (
            ['--start-checkpoint', 450, '--end-checkpoint', 500, '--min-checkpoints', 2],
            'asks for 2',
        ),
    ],
)
def test_ranges_that_are_wrong(five, tmp_path, capsys, extra, message):
    assert cli('--merge-inputs', five[0], *extra, '--merge-output', tmp_path / 'out') == 1
    error = capsys.readouterr().err
    assert message in error and error.count('\n') == 1
    assert not (tmp_path / 'out').exists()
