"""A second run into the same output: refused, or with --overwrite in place of the first."""

import os
import shutil
import signal

import pytest
from megatron.training.checkpointing import read_metadata

from tests.unit_tests.tools.checkpoint.pp_vpp_files import ITERATION, TRACKER, load, same, tree
from tests.unit_tests.tools.checkpoint.test_convert_ckpt_pp_vpp_safety import (
    sides_command,
    stopped_at,
)
from tools.checkpoint.common.trackers import held_text
from tools.checkpoint.convert_ckpt_pp_vpp import main
from tools.checkpoint.pp_vpp import torch_file


@pytest.fixture(scope='module')
def merged(pp4_tp2, tmp_path_factory):
    root = tmp_path_factory.mktemp('merged')
    assert main(sides_command(pp4_tp2, root)) == 0
    return root


@pytest.fixture
def first(merged, tmp_path):
    """Both outputs of another source, of which files would be left over."""
    return shutil.copytree(merged, tmp_path, dirs_exist_ok=True)


def model_of(source):
    return load(source, '00_000')['model'], load(source, '00_001')['model']


def models(root):
    return [load(root / side, '00_000')['model0'] for side in ('edge', 'cloud')]


def files(root):
    return {path.name for side in ('edge', 'cloud') for path in (root / side / ITERATION).iterdir()}


def test_the_new_output_replaces_all_of_the_old(pp4, first, capsys):
    command = sides_command(pp4, first)
    before = tree(first)
    assert main(command) == 1 and '--overwrite' in capsys.readouterr().err
    (first / 'edge' / TRACKER).write_text('9')
    assert main([*command, '--overwrite', '--dry-run']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith(', replacing what was there') for line in lines) == 2
    assert f'{first}/edge/{TRACKER}: says 9, would say 2' in lines
    assert tree(first) == before and models(first) != []
    assert main([*command, '--overwrite']) == 0
    assert 'replacing what was there' in capsys.readouterr().out
    assert same(models(first), list(model_of(pp4))) == []
    assert files(first) == {'mp_rank_00_000'}  # the first had two tensor ranks
    assert tree(first) == [path for path in before if 'mp_rank_01' not in path]
    assert {(first / side / TRACKER).read_text() for side in ('edge', 'cloud')} == {'2\n'}


def test_overwrite_where_nothing_is(pp4, tmp_path, capsys):
    assert main([*sides_command(pp4, tmp_path), '--overwrite']) == 0
    assert 'replacing' not in capsys.readouterr().out
    assert same(models(tmp_path), list(model_of(pp4))) == []


def test_other_iterations_stay(pp4, pp4_tp2, first):
    other = shutil.copytree(first / 'edge' / ITERATION, first / 'edge' / 'iter_0000001')
    before = tree(other)
    assert main([*sides_command(pp4, first), '--overwrite']) == 0
    assert tree(other) == before
    edge, _ = model_of(pp4_tp2)
    assert same(load(first / 'edge', '00_000', 'iter_0000001')['model0'], edge) == []


def test_a_failure_leaves_the_old(pp4, pp4_tp2, first, capsys, monkeypatch):
    before = tree(first)

    def fail(path, *args):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(torch_file, 'write', fail)
    assert main([*sides_command(pp4, first), '--overwrite']) == 1
    assert 'No space left' in capsys.readouterr().err
    assert tree(first) == before
    assert same(models(first), list(model_of(pp4_tp2))) == []


def test_megatron_stops_at_a_tracker_of_what_is_being_replaced(tmp_path):
    (tmp_path / TRACKER).write_text(held_text('2'))
    with pytest.raises(SystemExit):
        read_metadata(str(tmp_path / TRACKER))


@pytest.mark.parametrize('name', ['edge written', 'renamed 1', 'renamed 2', 'tracked 1'])
def test_killed_run_leaves_the_old_or_the_new(name, pp4, pp4_tp2, first):
    command = [*sides_command(pp4, first), '--overwrite']
    assert os.waitstatus_to_exitcode(stopped_at(name, command, signal.SIGKILL)) == -signal.SIGKILL
    assert main(sides_command(pp4, first)) == 1  # without overwriting it only brings this to an end
    source = pp4_tp2 if name in ('edge written', 'renamed 1') else pp4
    assert same(models(first), list(model_of(source))) == []
    assert {(first / side / TRACKER).read_text() for side in ('edge', 'cloud')} == {'2\n'}
    assert main(command) == 0
    assert same(models(first), list(model_of(pp4))) == []
    assert not [path for path in tree(first) if '.tmp-' in path]
