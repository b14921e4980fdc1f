"""Paths and trackers as users have them."""

import os
from pathlib import Path

import pytest

from tools.checkpoint.common.directory import resolve_checkpoint
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.common.paths import (
    TRACKER_NAME,
    iteration_dir,
    iteration_dirname,
    list_iterations,
    parse_iteration_dirname,
    read_tracker,
)
from tools.checkpoint.common.staging import staging_prefix


def checkpoint(path):
    path.mkdir(parents=True)
    (path / 'metadata.json').write_text('{}')
    return path


@pytest.mark.parametrize(
    'text, expected',
    [
        ('100', 100),
        ('100\n', 100),
        ('100\r\n', 100),
        (' 100 ', 100),
        ('0', 0),
        ('release', 'release'),
        ('release\n', 'release'),
        ('0000012', 12),
    ],
)
def test_tracker_as_megatron_reads_it(tmp_path, text, expected):
    (tmp_path / TRACKER_NAME).write_bytes(text.encode())
    assert read_tracker(tmp_path) == expected


@pytest.mark.parametrize(
    'data',
    [
        b'',
        b' \r\n',
        b'1 00',
        b'+5',
        b'-5',
        b'1_000',
        b'1.0',
        b'1e3',
        b'latest',
        b'Release',
        b'100 release',
        b'100\n200',
        '\u0661\u0662'.encode(),
        b'\xff\xfe1\x000\x00',
        b'\0' * 8,
    ],
)
def test_tracker_with_anything_else_is_named(tmp_path, data):
    (tmp_path / TRACKER_NAME).write_bytes(data)
    with pytest.raises(CheckpointError, match=f'{TRACKER_NAME}: holds .*expected one integer'):
        read_tracker(tmp_path)


def test_tracker_missing_or_pointing_nowhere(tmp_path):
    with pytest.raises(CheckpointError, match='no such file'):
        read_tracker(tmp_path)
    (tmp_path / TRACKER_NAME).write_text('7')
    with pytest.raises(CheckpointError, match='names 7, but .*iter_0000007 is no directory'):
        resolve_checkpoint(tmp_path)


@pytest.mark.parametrize(
    'name, iteration',
    [
        ('iter_0000100', 100),
        ('iter_0000000', 0),
        ('iter_12345678', 12345678),
        ('iter_100', None),
        ('iter_00000100', None),
        ('iter_0000100.tmp', None),
        ('.iter_0000100', None),
        ('iter_000010x', None),
        ('release', None),
        ('iter_\u0661234567', None),
    ],
)
def test_iteration_directory_names(name, iteration):
    assert parse_iteration_dirname(name) == iteration
    if iteration is not None:
        assert iteration_dirname(iteration) == name


def test_listing_and_choosing(tmp_path):
    for iteration in (300, 100, 12345678):
        checkpoint(tmp_path / iteration_dirname(iteration))
    (tmp_path / 'iter_0000200').write_text('a file')
    assert list(list_iterations(tmp_path)) == [100, 300, 12345678]
    assert iteration_dir(tmp_path, 300).name == 'iter_0000300'
    with pytest.raises(CheckpointError, match='iterations in .*: 100, 300, 12345678'):
        iteration_dir(tmp_path, 200)


def test_resolving(tmp_path):
    direct = checkpoint(tmp_path / 'iter_0000005')
    assert resolve_checkpoint(direct) == direct
    (tmp_path / TRACKER_NAME).write_text('5\n')
    assert resolve_checkpoint(tmp_path) == direct
    release = checkpoint(tmp_path / 'release')
    (tmp_path / TRACKER_NAME).write_text('release')
    assert resolve_checkpoint(tmp_path) == release


def test_the_directory_that_a_shell_is_in(tmp_path, monkeypatch):
    """Its name tells the iteration, and that it is a release."""
    for name in 'iter_0000005', 'release':
        direct = checkpoint(tmp_path / name)
        (direct / 'below').mkdir()
        monkeypatch.chdir(direct)
        assert resolve_checkpoint('.') == direct
        monkeypatch.chdir('below')
        assert resolve_checkpoint('..') == direct
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint('release') == Path('release')


@pytest.mark.parametrize(
    'names, clause',
    [
        ([], 'not a checkpoint'),
        (['mp_rank_00/'], 'legacy `torch`'),
        (['model.safetensors'], 'Hugging Face'),
        (['iter_0000001/'], 'a root'),
        (['__0_0.distcp'], 'unfinished'),
    ],
)
def test_what_is_no_checkpoint_is_described(tmp_path, names, clause):
    for name in names:
        (tmp_path / name).mkdir() if name.endswith('/') else (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=clause):
        resolve_checkpoint(tmp_path)


def test_missing_and_file(tmp_path):
    with pytest.raises(CheckpointError, match="doesn't exist"):
        resolve_checkpoint(tmp_path / 'nowhere')
    (tmp_path / 'file').touch()
    with pytest.raises(CheckpointError, match='is a file'):
        resolve_checkpoint(tmp_path / 'file')
    with pytest.raises(CheckpointError, match='file: is a file, expected a directory'):
        list_iterations(tmp_path / 'file')


def test_names_of_what_is_staged_are_short_and_of_one_target_only():
    names = ['n' * 250, 'n' * 249 + 'm', 'n' * 90, '\u2013' * 85, '\udcff' * 200]
    prefixes = [staging_prefix(Path('/a') / name) for name in names]
    assert len(set(prefixes)) == len(names)
    assert all(len(os.fsencode(prefix)) < 190 for prefix in prefixes)
    assert prefixes[2].startswith(f'.{names[2]}.tmp-')
