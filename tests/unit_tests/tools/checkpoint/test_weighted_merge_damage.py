"""Weighted merge: files cut anywhere, odd names, missing rights: one line, or the right result."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.unit_tests.tools.checkpoint.handmade import (
    assert_same,
    copied,
    leave_group,
    load_tensors,
    set_common_form,
    tree,
)
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.weighted_merge import main
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge


def attempt(directory, out):
    """Merge; whether it was refused, in one line and without a trace."""
    try:
        merge([directory], [1.0], out, threads=1)
    except CheckpointError as error:
        assert str(error) and '\n' not in str(error)
        assert not out.exists()
        return True
    shutil.rmtree(out)
    return False


@pytest.mark.parametrize('form', ['legacy', 'embedded'])
def test_files_cut_anywhere(five, tmp_path, form):
    source = copied(five[1][0], tmp_path / 'source')
    set_common_form(source, {'iteration': 100, 'text': 'x' * 500}, form)
    assert not attempt(source, tmp_path / 'out')
    for file in sorted(source.iterdir()):
        data = file.read_bytes()
        for size in {*range(0, len(data) - 1, max(len(data) // 15, 1)), len(data) - 2}:
            file.write_bytes(data[:size])
            assert attempt(source, tmp_path / 'out'), (file.name, size)
        file.write_bytes(data)
    assert not attempt(source, tmp_path / 'out')


@pytest.mark.parametrize(
    'name', ['a b', 'ünï', '-dash', 'new\nline', 'a:1', 'x' * 200, 'link', 'trailing/', 'release']
)
def test_odd_directory_names(five, tmp_path, name):
    source, out = f'{tmp_path}/{name}', f'{tmp_path}/out/{name}'
    if name == 'link':
        (tmp_path / name).symlink_to(five[1][0])
    else:
        copied(five[1][0], Path(source))
    if name == 'release':
        (tmp_path / 'latest_checkpointed_iteration.txt').write_text('release\n')
        source = str(tmp_path)
    assert main(['--merge-inputs', f'{source}:1', f'--merge-output={out}']) == 0
    assert_same(load_tensors(Path(out)), five[2][0])


def test_without_rights(five):
    """As a user who may read the source and nothing more."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        source = copied(five[1][0], root / 'source')
        (root / 'closed').mkdir()
        (root / 'open').mkdir()
        (root / 'open').chmod(0o777)
        hidden = copied(five[1][1], root / 'hidden')
        for path in (hidden / '.metadata', hidden / '__0_0.distcp'):
            path.chmod(0)
        for path in [*source.iterdir(), source, root / 'closed']:
            path.chmod(0o555)
        before = tree(source)
        child = os.fork()
        if child == 0:
            os._exit(_unprivileged(root))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert tree(source) == before
        assert [path.name for path in (root / 'open').iterdir()] == ['out']
        assert list((root / 'closed').iterdir()) == []
        assert_same(load_tensors(root / 'open/out'), five[2][0])
        (root / 'closed').chmod(0o755)
        source.chmod(0o755)


def _unprivileged(root):
    leave_group()
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    try:
        for directory, out, part in (
            ('source', 'closed/out', 'closed/out: can'),
            ('hidden', 'open/x', 'Permission denied'),
        ):
            try:
                merge([root / directory], [1.0], root / out, threads=1)
            except CheckpointError as error:
                assert part in str(error) and '\n' not in str(error), error
            else:
                return 2
        merge([root / 'source'], [1.0], root / 'open/out', threads=1)
    except BaseException as error:
        print(repr(error), flush=True)
        return 3
    return 0
