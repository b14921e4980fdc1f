"""Weighted merge over several ranks: the same bits, and one agreed end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit_tests.tools.checkpoint.handmade import (
    assert_same,
    load_tensors,
    plain_merge,
    write_run,
)
from tests.unit_tests.tools.checkpoint.merge_ranks import (
    merge_and_die,
    merge_blind,
    merge_in_existing_groups,
    merge_misled,
    merge_with_read_error,
    merges,
    start,
)
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge

REPOSITORY = Path(__file__).resolve().parents[4]
WEIGHTS = [0.6, 0.3, 0.1]
EXTRA = {f'decoder.layers.{i}._extra_state': bytes([i]) for i in range(3)}


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp('run'), [100, 200, 300], extra_states=EXTRA)


@pytest.mark.parametrize('size', [4, 8])
def test_same_bits_on_any_number_of_ranks(run, tmp_path, size):
    paths, models = run
    found = start(size, merges, paths, WEIGHTS, tmp_path)
    assert sorted(found) == list(range(size)), found
    assert all(value == found[0] for value in found.values()), found
    expected = plain_merge(models, WEIGHTS)
    alone = merge(paths, WEIGHTS, tmp_path / 'alone')
    assert_same(load_tensors(tmp_path / 'alone'), expected)
    for index, (bytes_read, _, bytes_written) in enumerate(found[0]):
        out = tmp_path / f'{index}/iter_0000005'
        assert_same(load_tensors(out), expected)
        assert (tmp_path / f'{index}/latest_checkpointed_iteration.txt').read_text() == '5\n'
        assert bytes_read == alone.bytes_read
        assert (
            bytes_written
            == sum(file.stat().st_size for file in out.iterdir())
            - ((out / 'integrity.json').stat().st_size if index == 2 else 0)
            or index == 2
        )
        assert len({file.name[:4] for file in out.glob('*.distcp')}) == size
    balanced, plain = found[0][1][1], found[0][0][1]
    assert max(balanced) - min(balanced) <= max(plain) - min(plain)


def test_existing_groups_are_used_and_left(run, tmp_path):
    """One that speaks gloo on the CPU itself; beside any other a gloo group of the merge's own."""
    backends = ['gloo', 'cpu:gloo', 'cpu:gloo,cuda:gloo', 'cuda:gloo', None]
    found = start(2, merge_in_existing_groups, backends, run[0], WEIGHTS, tmp_path)
    assert found == dict.fromkeys(range(2), [3.0] * len(backends))
    for index in range(len(backends)):
        assert_same(load_tensors(tmp_path / f'{index}'), plain_merge(run[1], WEIGHTS))


@pytest.mark.parametrize('blind', [0, 1])
def test_a_rank_that_can_not_see_the_inputs(run, tmp_path, blind):
    root = run[0][0].parent
    found = start(2, merge_blind, blind, root, run[0], WEIGHTS, tmp_path / 'out')
    if str(found.get(blind, '')).startswith('cannot'):
        pytest.skip(f'no mount namespaces here: {found[blind]}')
    assert len(set(found.values())) == 1 and len(found) == 2, found
    assert str(root) in found[0] and found[0].startswith('CheckpointError'), found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('misled', [0, 1])
@pytest.mark.parametrize('what', ['a file cut short', 'another run'])
def test_a_rank_that_sees_other_files(run, tmp_path, misled, what):
    path, other = run[0][1], tmp_path / 'other'
    if what == 'another run':  # of the same layout, to the byte
        write_run(other, [7, 200, 9], extra_states=EXTRA)
        other = other / path.name
    else:
        path = max(path.glob('*.distcp'), key=lambda file: file.stat().st_size)
        other.write_bytes(path.read_bytes()[:-100])
    found = start(2, merge_misled, misled, path, other, run[0], WEIGHTS, tmp_path / 'out')
    if str(found.get(misled, '')).startswith('cannot'):
        pytest.skip(f'no mount namespaces here: {found[misled]}')
    assert len(set(found.values())) == 1 and len(found) == 2, found
    assert str(path) in found[0] and found[0].startswith('CheckpointError'), found
    assert [file.name for file in tmp_path.iterdir()] == ['other']


def test_a_rank_that_can_not_see_the_output(run, tmp_path):
    shared = tmp_path / 'shared'
    shared.mkdir()
    found = start(2, merge_blind, 1, shared, run[0], WEIGHTS, shared / 'out')
    if str(found.get(1, '')).startswith('cannot'):
        pytest.skip(f'no mount namespaces here: {found[1]}')
    assert found[0] == found[1] and 'not shared' in found[0], found
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize('victim', [0, 1])
def test_a_rank_that_dies(run, tmp_path, victim):
    found = start(3, merge_and_die, victim, run[0], WEIGHTS, tmp_path / 'out')
    survivors = {0, 1, 2} - {victim}
    assert set(found) == survivors
    assert all('another rank of 3 stopped' in text for text in found.values()), found
    assert not (tmp_path / 'out').exists()
    merge(run[0], WEIGHTS, tmp_path / 'out')  # what was left is not in the way
    assert [path.name for path in tmp_path.iterdir()] == ['out']
    assert_same(load_tensors(tmp_path / 'out'), plain_merge(run[1], WEIGHTS))


def test_an_error_on_one_rank_is_everyones(run, tmp_path):
    found = start(3, merge_with_read_error, 2, run[0], WEIGHTS, tmp_path / 'out')
    assert len(set(found.values())) == 1 and len(found) == 3, found
    assert 'Input/output error (rank 2 of 3)' in found[0]
    assert list(tmp_path.iterdir()) == []


def test_torchrun(run, tmp_path):
    pairs = [f'{path}:{weight}' for path, weight in zip(run[0], WEIGHTS, strict=True)]
    done = subprocess.run(
        [
            sys.executable,
            '-m',
            'torch.distributed.run',
            '--standalone',
            '--nproc-per-node=2',
            str(REPOSITORY / 'tools/checkpoint/weighted_merge.py'),
            '--merge-inputs',
            *pairs,
            '--merge-output',
            str(tmp_path / 'out'),
        ],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('merged 3 checkpoints') == 1 and 'by 2 ranks' in done.stdout
    assert 'Traceback' not in done.stderr and 'Warning' not in done.stderr, done.stderr
    assert_same(load_tensors(tmp_path / 'out'), plain_merge(run[1], WEIGHTS))
