"""Edge/cloud pairs as runs write them whose stages have tensor sizes of their own.

The edge is pipeline rank 0, so files are named as in a run with a pipeline, and `args` of all
stages hold the sizes of the whole run and the largest tensor size.
"""

import copy
import shutil

import pytest
from megatron.training.checkpointing import get_checkpoint_name

from tests.unit_tests.tools.checkpoint.pp_vpp_damage import SIDES, SPLIT, edit, put, remove
from tests.unit_tests.tools.checkpoint.pp_vpp_files import (
    ITERATION,
    MERGE,
    TRACKER,
    joined_optimizer,
    load,
    refused,
    same,
    save,
)
from tools.checkpoint.convert_ckpt_pp_vpp import main

MIDDLE = f'{SPLIT} --middle-ranks 1,2'


def file_of(sources, chunks, tensor, rank, **sizes):
    """What a rank of such a run saves: its stages as chunks, and one optimizer over them."""
    stages = [load(sources, f'{tensor:02d}_00{stage}') for stage in chunks]
    state = copy.copy(stages[0])
    del state['model']
    state['model0'], state['model1'] = [*(stage['model'] for stage in stages), {}][:2]
    state['optimizer'] = joined_optimizer(stages)
    of_the_run = {
        'tensor_model_parallel_size': 2,
        'pipeline_model_parallel_size': 3,
        'virtual_pipeline_model_parallel_size': 2,
        'world_size': 5,
        'rank': rank,
    }
    for name, value in (of_the_run | sizes).items():
        setattr(state['args'], name, value)
    return state


def write_pair(root, edge, cloud, cloud_root='CLOUD', **sizes):
    """Rank 0 of TP 1, ranks 1 and 2 of TP 2; the run's first process writes the only tracker."""
    save(file_of(edge, (0, 3), 0, 0, **sizes), root / 'EDGE', '00_000')
    for stage in (1, 2):
        for tensor in (0, 1):
            state = file_of(cloud, (stage,), tensor, 2 * stage - 1 + tensor, **sizes)
            save(state, root / cloud_root, f'{tensor:02d}_00{stage}')
    (root / 'EDGE' / TRACKER).write_text('2')


def at(root, command):
    words = command.split()
    return [str(root / w) if w in ('SRC', 'EDGE', 'CLOUD', 'OUT', 'OUT2') else w for w in words]


STAGES = {'00_000': 0, '00_001': 1, '01_001': 1, '00_002': 1, '01_002': 1, '00_003': 0}


@pytest.mark.parametrize(
    'cloud_root, sizes',
    [
        ('CLOUD', {}),
        ('EDGE', {}),
        ('CLOUD', {'tensor_model_parallel_size': 1}),
        ('CLOUD', {'use_tp_pp_dp_mapping': True, 'data_parallel_size': 1}),
    ],
    ids=['two directories', 'one directory', 'args smaller', 'whole pipelines'],
)
def test_pair_with_tensor_sizes_of_its_own_is_split(cloud_root, sizes, pp4, pp4_tp2, tmp_path):
    write_pair(tmp_path, pp4, pp4_tp2, cloud_root, **sizes)
    assert main(at(tmp_path, MIDDLE.replace('CLOUD', cloud_root))) == 0
    assert {path.name[8:] for path in (tmp_path / 'OUT' / ITERATION).iterdir()} == STAGES.keys()
    for rank, source in STAGES.items():
        found, expected = load(tmp_path / 'OUT', rank), load((pp4, pp4_tp2)[source], rank)
        assert same(found['model'], expected['model']) == []
        assert same(found['optimizer'], expected['optimizer']) == []
        args = found['args']
        assert args.tensor_model_parallel_size == 1 + source
        assert (args.pipeline_model_parallel_size, args.world_size) == (4, 6)
        assert args.virtual_pipeline_model_parallel_size is None


def test_pair_is_merged_again_with_the_largest_size_in_all_args(pp4, pp4_tp2, tmp_path):
    """As the script that this one replaces splits: it leaves the tensor size as it was."""
    for rank, source in STAGES.items():
        state = load((pp4, pp4_tp2)[source], rank)
        state['args'].tensor_model_parallel_size = 2
        save(state, tmp_path / 'SRC', rank)
    (tmp_path / 'SRC' / TRACKER).write_text('2')
    assert main(at(tmp_path, f'{SIDES} --merge-stages 0,3 --merge-cloud-stages 1,2')) == 0
    assert load(tmp_path / 'OUT', '00_000')['args'].tensor_model_parallel_size == 1
    for tensor in ('00', '01'):
        found = load(tmp_path / 'OUT2', f'{tensor}_000')
        assert found['args'].tensor_model_parallel_size == 2
        for chunk in (0, 1):
            stage = load(pp4_tp2, f'{tensor}_00{1 + chunk}')
            assert same(found[f'model{chunk}'], stage['model']) == []


LOST = {
    'largest tensor size that no stage has': (
        None,
        {'tensor_model_parallel_size': 8},
        r'tensor-parallel rank 1 of stage 0 is missing \(found 0, expected 8 ranks\)',
    ),
    'tensor rank of the cloud': (
        remove('mp_rank_01_001', 'mp_rank_01_002'),
        {},
        r'tensor-parallel rank 1 of stage 0 is missing \(found 0, expected 2 ranks\)',
    ),
    'tensor rank of one stage of the cloud': (
        remove('mp_rank_01_002'),
        {},
        'stage 2 has tensor-parallel ranks 0, stage 1 has 0, 1',
    ),
}


@pytest.mark.parametrize('name', LOST)
def test_lost_tensor_ranks_are_told(name, pp4, pp4_tp2, tmp_path, capsys):
    mutate, sizes, pattern = LOST[name]
    write_pair(tmp_path, pp4, pp4_tp2, **sizes)
    if mutate:
        mutate(tmp_path / 'CLOUD')
    refused(MIDDLE, tmp_path, capsys, pattern)


def test_tensor_ranks_left_over_from_another_run_show_in_their_shapes(
    pp4, pp4_tp2, tmp_path, capsys
):
    source = shutil.copytree(pp4, tmp_path / 'SRC')
    for stage in range(4):
        save(load(pp4_tp2, f'01_00{stage}'), source, f'01_00{stage}')
        edit(put(1234, 'args', 'seed'), f'01_00{stage}')(source)
    pattern = r'has 8 columns on each of 2 tensor ranks, expected 32 in all as in \S+ \(16 on each'
    refused(f'{MERGE} --drop-optimizer', tmp_path, capsys, pattern)


def test_lost_tensor_rank_of_the_edge_shows_in_its_shapes(pp4_tp2, tmp_path, capsys):
    write_pair(tmp_path, pp4_tp2, pp4_tp2)
    refused(MIDDLE, tmp_path, capsys, r'CLOUD/.* columns on each of 2 tensor ranks, expected')


def expected_path(root, tensor, experts=None):
    # every rank is given: what is not, megatron asks its groups, which other tests may have made
    return get_checkpoint_name(
        str(root), 2, False, True, tensor, 0, experts is not None, experts or 0
    ).removesuffix('/model_optim_rng.pt')


@pytest.mark.parametrize('experts', [None, 1])
def test_sides_are_named_as_a_run_with_a_pipeline_reads_them(experts, pp4, tmp_path):
    """And `split` takes the names of a run without one too, as older outputs have them."""
    source = shutil.copytree(pp4, tmp_path / 'SRC')
    every = [f'00_00{stage}' for stage in range(4)]
    if experts:
        for path in list((source / ITERATION).iterdir()):
            shutil.copytree(path, f'{path}_001')
            path.rename(f'{path}_000')
        every = [f'{rank}_00{expert}' for rank in every for expert in (0, 1)]
    edit(put(1 + (experts or 0), 'args', 'expert_model_parallel_size'), *every)(source)
    for number, rank in enumerate(every):  # each file is another one
        edit(put(number, 'args', 'local_rank'), rank)(source)
    assert main(at(tmp_path, f'{SIDES} --merge-stages 0,3 --merge-cloud-stages 1,2')) == 0
    for side in ('OUT', 'OUT2'):
        found = {str(path) for path in (tmp_path / side / ITERATION).iterdir()}
        assert expected_path(tmp_path / side, 0, experts) in found
        assert len(found) == 1 + (experts or 0)
        shutil.copytree(tmp_path / side, tmp_path / {'OUT': 'EDGE', 'OUT2': 'CLOUD'}[side])
    outputs = []
    for old in (False, True):
        for side in ('EDGE', 'CLOUD') if old else ():
            for path in (tmp_path / side / ITERATION).iterdir():
                path.rename(path.with_name(path.name.replace('_00_000', '_00', 1)))
        out = tmp_path / f'split{old}'
        command = at(tmp_path, f'{SPLIT} --num-cloud-vpp-chunks 2')
        assert main([str(out) if word == str(tmp_path / 'OUT') else word for word in command]) == 0
        outputs += [
            same(load(out, rank)[key], load(source, rank)[key])
            for rank in every
            for key in ('model', 'optimizer')
        ]
    assert outputs == [[]] * 4 * len(every)
