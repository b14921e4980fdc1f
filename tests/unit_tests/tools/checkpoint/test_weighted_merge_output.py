"""Weighted merge: where output and report go, and what is said of both."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.unit_tests.tools.checkpoint.handmade import assert_same, copied, load_tensors, tree
from tests.unit_tests.tools.checkpoint.merge_words import cli, refused
from tools.checkpoint.common.progress import format_bytes
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge


@pytest.fixture
def out(tmp_path):
    return tmp_path / 'out'


@pytest.fixture
def one(five):
    return f'--merge-inputs {five[1][0]}:1 --merge-output'


def test_dry_run_prints_the_plan_and_writes_nothing(five, tmp_path, capsys):
    paths = five[1]
    words = f'--merge-inputs {paths[0]}:0.5 {paths[1]}:0.5 --merge-output {tmp_path}/deep/out'
    assert cli(words, '--dry-run --verify --output-iteration 5') == 0
    text = capsys.readouterr().out
    for part in (str(paths[1]), 'weight 0.5', '6 tensors', 'deep/out/iter_0000005', 'to read by 1'):
        assert part in text
    assert not list(tmp_path.iterdir())


def test_report_and_its_json(five, tmp_path, out, capsys):
    _, paths, models = five
    words = f'--merge-inputs {paths[0]}:0.5 {paths[1]}:0.5 --merge-output {out} --report-json'
    assert cli(words, tmp_path / 'r.json') == 0
    text = capsys.readouterr().out
    for part in ('discovery', 'load', 'accumulate', 'save', 'peak host memory', '/s, wrote'):
        assert part in text
    assert 'above what was loaded before the merge (Python, torch): ' in text
    report = json.loads((tmp_path / 'r.json').read_text())
    assert report['averaged_tensors'] == 6 and report['copied_extra_states'] == 1
    assert 0 <= report['merge_memory'][0] < report['peak_memory'][0]
    assert report['timings']['total'] > 0 and report['output_dir'] == str(out)
    written = sum(len(data) for data in tree(out).values())
    assert report['bytes_written'] == written
    content = report['bytes_read'] - sum(t.nbytes for t in models[0].values())
    assert report['content_bytes'] == content
    sizes = f'{format_bytes(written)} of files ({format_bytes(content)} of content) at'
    assert f'wrote {sizes}' in text
    assert f'copied: {format_bytes(content)} of content, plus file headers' in text


@pytest.mark.parametrize('accounting', ['rank0', 'each-rank', 'all', 'none'])
def test_byte_accounting(five, out, accounting):
    result = merge(five[1][:2], [0.5, 0.5], out, byte_accounting=accounting)
    written = sum(len(data) for data in tree(out).values())
    tensors = sum(t.nbytes for t in five[2][0].values())
    assert result.bytes_written == written or (
        accounting == 'none' and tensors < result.bytes_written < written
    )


def test_a_report_never_replaces_anything_but_a_report(five, tmp_path, out, capsys):
    source = copied(five[1][0], tmp_path / 'in')
    (tmp_path / 'weights.json').write_text('{"100": 1}')
    (tmp_path / 'link').symlink_to(source / 'metadata.json')
    (tmp_path / 'hard').hardlink_to(source / '.metadata')
    (tmp_path / 'dir').mkdir()
    before = tree(tmp_path)
    (tmp_path / 'loop').symlink_to(tmp_path / 'loop')
    names = 'in/metadata.json in/new.json weights.json link hard dir out loop'.split()
    words = f'--merge-inputs {source}:1 --merge-output {out} --report-json'
    for name in (*names, 'latest_checkpointed_iteration.txt', 'x' * 300):
        for dry in ([], ['--dry-run']):
            line = refused(capsys, words, tmp_path / name, *dry)
            assert f'--report-json {tmp_path / name}: ' in line
    (tmp_path / 'loop').unlink()
    assert tree(tmp_path) == before and not out.exists()
    (tmp_path / 'empty').touch()
    for name in ('new', 'new', 'empty'):
        assert cli(words, tmp_path / name, '--dry-run') == 0
        assert json.loads((tmp_path / name).read_text())['dry_run']
    assert cli(words, '/dev/null') == 0


def test_a_tracker_never_goes_back(one, tmp_path, capsys):
    tracker = tmp_path / 'latest_checkpointed_iteration.txt'
    tracker.write_text('12\n')
    for place in (tmp_path, tmp_path / 'iter_0000006'):
        for dry in ([], ['--dry-run']):
            line = refused(capsys, one, place, '--output-iteration 6', *dry)
            for part in (tracker, 'names 12', '--output-iteration 6', 'another --merge-output'):
                assert str(part) in line
    assert tracker.read_text() == '12\n' and not (tmp_path / 'iter_0000006').exists()
    for index, text in enumerate(('5', '6', 'release', 'soon')):
        root = tmp_path / f'root{index}'
        root.mkdir()
        (root / tracker.name).write_text(text)
        assert cli(one, root, '--output-iteration 6') == 0
        assert (root / tracker.name).read_text() == '6\n'
    assert cli(one, tmp_path / 'none') == 0  # touches no tracker


def test_places_where_nothing_can_be_written(one, tmp_path, out, capsys):
    (tmp_path / 'loop').symlink_to('loop')
    (tmp_path / 'nowhere').symlink_to(tmp_path / 'missing')
    (tmp_path / 'file').touch()
    for name, reason in (
        ('loop/x', 'symbolic links'),
        ('nowhere/x', 'no directory'),
        ('file/x', 'Not a directory'),
        ('n' * 300, 'too long'),
        ('n' * 300 + '/x', 'too long'),
        ('missing/' + 'n' * 300, 'too long'),
    ):
        place = tmp_path / name
        for dry in ([], ['--dry-run'], ['--output-iteration', 7]):
            line = refused(capsys, one, place, *dry)
            assert str(place.parent) in line and reason in line  # whichever part is in the way
        given = f'--merge-inputs {place}:1 --merge-output {out}'
        for words in (f'{one} {out} --common-state-checkpoint {place}', given):
            assert str(place) in refused(capsys, words)
        with pytest.raises(SystemExit):
            cli(one, out, '--report-json', place / 'r.json')
        assert 'no such directory' in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ['file', 'loop', 'nowhere']


@pytest.mark.parametrize('name', ['n' * 255, '\u2013' * 85, 'deep/' + 'n' * 250])
def test_what_the_dry_run_accepts_the_run_does_with_long_names(five, one, tmp_path, name):
    assert cli(one, tmp_path / name, '--dry-run') == 0
    assert cli(one, tmp_path / name) == 0
    assert_same(load_tensors(tmp_path / name), five[2][0])
    assert len(list(tmp_path.iterdir())) == 1


def test_a_path_too_long_for_what_is_written_below_it(one, tmp_path, capsys):
    room = os.pathconf('/', 'PC_PATH_MAX') - len(os.fsencode(tmp_path))
    long = (('d' * 60 + '/') * room)[: room - 50]
    for dry in ([], ['--dry-run']):
        line = refused(capsys, one, tmp_path / long, *dry)
        assert "can't be written: the path is too long" in line
    assert not list(tmp_path.iterdir())


def test_places_that_this_user_may_not_write(one, tmp_path, capsys, monkeypatch):
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
        for dry in ([], ['--dry-run']):
            words = [one, tmp_path / output, '--report-json', tmp_path / report, *dry]
            assert 'this user may not write' in refused(capsys, *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['closed', 'r.json']


@pytest.mark.parametrize('total, warned', [(10**9, True), (0, False)])
def test_a_full_file_system_is_told_before(one, out, capsys, monkeypatch, total, warned):
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(total, 0, 1))
    assert cli(one, out, '--dry-run') == 0
    assert (f'to be written to {out}, where 1 B are free' in capsys.readouterr().out) == warned
