"""The inspector on what is no checkpoint, or a damaged, hostile or oddly named one."""

import argparse
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from tests.cpu_megatron.torchrun import REPOSITORY
from tests.unit_tests.tools.checkpoint.handmade import (
    set_common_form,
)
from tests.unit_tests.tools.checkpoint.inspect_runs import TRACKER
from tools.checkpoint import gpt_into_hybrid, resume_report
from tools.checkpoint.inspect_checkpoint import main


class Touches:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def copy(real, tmp_path):
    shutil.copytree(real / 'moe', tmp_path / 'iter_0000007')
    return tmp_path / 'iter_0000007'


def one_line(capsys, *paths):
    """The only line that is printed, on standard error."""
    assert main([str(path) for path in paths]) == 1
    out, error = capsys.readouterr()
    assert out == '' and error.count('\n') == 1, (out, error)
    return error


@pytest.mark.parametrize('place', ['.metadata', 'common.pt', 'embedded', 'rank file', 'args'])
def test_nothing_in_a_checkpoint_is_run(place, copy, vpp, tmp_path, capsys):
    touched = tmp_path / 'touched'
    hostile = Touches(touched)
    if place == '.metadata':
        (copy / place).write_bytes(pickle.dumps(hostile))
    elif place == 'rank file':
        copy = tmp_path / 'vpp'
        shutil.copytree(vpp, copy)
        path = next(copy.glob('iter_*/mp_rank_00_001')) / 'model_optim_rng.pt'
        torch.save(torch.load(path) | {'x': hostile}, path)
    else:
        state = {'iteration': 7, 'x': hostile}
        if place == 'args':
            state = {'iteration': 7, 'args': argparse.Namespace(x=hostile)}
        set_common_form(copy, state, 'embedded' if place == 'embedded' else 'legacy')
    error = one_line(capsys, copy)
    assert 'refused class posix.mkdir' in error and '--trust-checkpoints' not in error
    assert not touched.exists()


def damaged(change):
    def apply(directory):
        metadata = dcp.FileSystemReader(directory).read_metadata()
        change(metadata)
        (directory / '.metadata').write_bytes(pickle.dumps(metadata))

    return apply


def set_path(metadata, path):
    info = next(iter(metadata.storage_data.values()))
    object.__setattr__(info, 'relative_path', path)


def first_tensor(metadata):
    return next(
        entry for entry in metadata.state_dict_metadata.values() if hasattr(entry, 'properties')
    )


def cut(name):
    def apply(directory):
        (path,) = sorted(directory.glob(name))[:1]
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return apply


FAULTS = {
    'data cut short': (cut('*.distcp'), 'truncated'),
    'data missing': (lambda d: sorted(d.glob('*.distcp'))[0].unlink(), 'No such file'),
    'metadata cut short': (cut('.metadata'), 'truncated or damaged'),
    'metadata empty': (lambda d: (d / '.metadata').write_bytes(b''), 'truncated or damaged'),
    'metadata missing': (lambda d: (d / '.metadata').unlink(), 'was not finished'),
    'unfinished': (lambda d: (d / 'metadata.json').unlink(), 'unfinished'),
    'format missing': (lambda d: (d / 'metadata.json').write_text('[1]'), 'expected'),
    'another format': (
        lambda d: (d / 'metadata.json').write_text('{"sharded_backend": "zarr"}'),
        "'zarr', expected 'torch_dist'",
    ),
    'common.pt damaged': (lambda d: (d / 'common.pt').write_bytes(b'PK'), 'common.pt'),
    'common.pt a list': (lambda d: torch.save([1, 2], d / 'common.pt'), 'list, expected a dict'),
    'common.pt a directory': (lambda d: (d / 'common.pt').mkdir(), 'common.pt'),
    'file outside': (damaged(lambda m: set_path(m, '../secret')), 'outside the checkpoint'),
    'file of another type': (damaged(lambda m: set_path(m, 7)), 'damaged (storage of '),
    'no dtype': (
        damaged(lambda m: setattr(first_tensor(m).properties, 'dtype', 'x')),
        'damaged (entry ',
    ),
    'no size': (damaged(lambda m: setattr(first_tensor(m), 'size', None)), 'damaged (entry '),
    'manifest damaged': (lambda d: (d / 'integrity.json').write_text('x'), 'no integrity manifest'),
}


@pytest.mark.parametrize('name', FAULTS)
def test_faults_are_one_line(name, copy, capsys):
    change, message = FAULTS[name]
    if 'common.pt' in name:
        (copy / 'common.pt').unlink(missing_ok=True)
    change(copy)
    assert message in one_line(capsys, copy)
    (copy.parent / TRACKER).write_text('7')
    assert message in one_line(capsys, copy.parent)


@pytest.mark.parametrize('fault', ['data cut short', 'data missing', 'file outside'])
def test_every_look_sees_that_data_is_missing(fault, copy, capsys):
    (copy.parent / TRACKER).write_text('7')
    FAULTS[fault][0](copy)
    reason = one_line(capsys, copy).removeprefix('error: ')
    assert FAULTS[fault][1] in reason
    assert gpt_into_hybrid.main([str(copy.parent), '*E*E']) == 1
    assert capsys.readouterr().out == f'Will not load: {reason}'
    assert resume_report.main([str(copy)]) == 1
    assert capsys.readouterr().err == f'error: {reason}'


def test_legacy_faults_are_one_line(vpp, tmp_path, capsys):
    copy = tmp_path / 'iter_0000002'
    rank = copy / 'mp_rank_00_001/model_optim_rng.pt'
    shutil.copytree(next(vpp.glob('iter_*')), copy)
    whole = rank.read_bytes()
    for content, message in (
        (whole[: len(whole) // 2], 'truncated or damaged'),
        (b'', 'truncated or damaged'),
    ):
        rank.write_bytes(content)
        assert message in one_line(capsys, copy)
    for state, message in (
        ([1], 'holds list'),
        ({'iteration': 2}, 'key `model` is missing'),
        ({'model0': {1: torch.ones(1)}}, 'expected names of parameters'),
        ({'model0': [1]}, 'holds list'),
    ):
        torch.save(state, rank)
        assert message in one_line(capsys, copy)
    rank.unlink()
    assert 'no model_optim_rng.pt' in one_line(capsys, copy)
    rank.parent.rename(copy / 'mp_rank_x')
    assert 'not a rank directory' in one_line(capsys, copy)


def test_paths_that_are_no_checkpoint(tmp_path, capsys):
    assert "doesn't exist" in one_line(capsys, tmp_path / 'absent')
    (tmp_path / 'file').touch()
    assert 'is a file' in one_line(capsys, tmp_path / 'file')
    (tmp_path / 'empty').mkdir()
    assert 'not a checkpoint' in one_line(capsys, tmp_path / 'empty')
    (tmp_path / 'root/iter_0000001').mkdir(parents=True)
    assert 'name one of its iter_*' in one_line(capsys, tmp_path / 'root')
    (tmp_path / 'root' / TRACKER).write_text('3')
    assert 'names 3, but' in one_line(capsys, tmp_path / 'root')
    (tmp_path / 'root' / TRACKER).write_text('x')
    assert "holds 'x'" in one_line(capsys, tmp_path / 'root')
    assert 'File name too long' in one_line(capsys, 'x' * 5000)
    assert "doesn't exist" in one_line(capsys, '--diff', tmp_path / 'absent', tmp_path)


def test_unreadable_files(copy, capsys, monkeypatch):
    read_bytes = Path.read_bytes

    def refusing(path):
        if path.name == '.metadata':
            raise PermissionError(13, 'Permission denied', str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, 'read_bytes', refusing)
    assert "can't be read: Permission denied" in one_line(capsys, copy)

    def closed(path):
        raise PermissionError(13, 'Permission denied', str(path))

    monkeypatch.setattr(Path, 'iterdir', closed)
    assert f"{copy}: can't be read: [Errno 13] Permission denied" in one_line(capsys, copy)


@pytest.mark.parametrize('name', ['a b', 'a\nb', 'Größe 模型', 'a:b', b'a\xff', '-x'])
def test_odd_names(name, copy, capsys):
    odd = copy.parent / os.fsdecode(name)
    shutil.copytree(copy, odd)
    assert main([str(odd)]) == 0
    out = capsys.readouterr().out
    out.encode()
    assert out.count('\n') == 17
    if name in ('a b', 'Größe 模型'):
        assert out.splitlines()[0] == str(odd)
    assert main(['--json', str(odd)]) == 0
    assert json.loads(capsys.readouterr().out)['directory'] == str(odd)
    (odd / 'metadata.json').unlink()
    assert 'unfinished' in one_line(capsys, odd)
    assert main(['--diff', str(copy), str(odd)]) == 1


def test_output_that_can_not_be_shown(copy, capsys, monkeypatch):
    with open('/dev/full', 'w') as full:
        monkeypatch.setattr(sys, 'stdout', full)
        error = one_line(capsys, copy)
    assert error == "error: standard output can't be written: No space left on device\n"


def test_wrong_usage(capsys):
    for words in ([], ['a', '--diff', 'b', 'c'], ['--diff', 'a']):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
    capsys.readouterr()


@pytest.mark.loads
def test_as_a_script(copy, tmp_path):
    """In a process that hasn't loaded megatron, from anywhere; --help without loading torch."""
    script = REPOSITORY / 'tools/checkpoint/inspect_checkpoint.py'

    def python(*words, **variables):
        return subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=tmp_path,
            text=True,
            capture_output=True,
            env=os.environ | variables,
        )

    done = python(script, copy.name)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines()[1].split() == ['format', 'torch_dist']
    off = python(script, copy.name, MEGATRON_OVERLAY='0')
    assert (off.returncode, off.stderr) == (0, '')
    assert off.stdout.count('unknown: MEGATRON_OVERLAY=0') == 1
    helps = python('-X', 'importtime', script, '--help')
    assert helps.returncode == 0 and 'torch' not in helps.stderr
    assert helps.stdout.startswith('usage: inspect_checkpoint.py ')
    assert '--diff A B' in helps.stdout and 'exit status' in helps.stdout
