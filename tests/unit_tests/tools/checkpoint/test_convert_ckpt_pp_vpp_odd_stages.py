"""Stages without layers, and multi-token prediction on a stage of its own."""

import functools
import shutil

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from tests.unit_tests.tools.checkpoint.pp_vpp_damage import edit, pop, put
from tests.unit_tests.tools.checkpoint.pp_vpp_files import load, refused, same
from tests.unit_tests.tools.checkpoint.pp_vpp_runs import run
from tools.checkpoint.convert_ckpt_pp_vpp import main

LAYOUT = 'Ettt||m|L'
STAGES = [f'00_00{i}' for i in range(4)]
CHUNKS = ('--merge-cloud-stages 1,2', '--num-cloud-vpp-chunks 2')
RANKS = ('--middle-stages 1,2', '--middle-ranks 1,2')


@pytest.fixture(scope='module')
def odd(tmp_path_factory):
    root = tmp_path_factory.mktemp('odd') / 'source'
    run(
        4,
        '--num-layers 3 --mtp-num-layers 1 --bf16 --pipeline-model-parallel-size 4',
        f'--pipeline-model-parallel-layout {LAYOUT} --save {root} --exit-interval 2',
    )
    assert load(root, STAGES[1])['model'] == {}
    assert any(key.startswith('mtp.') for key in load(root, STAGES[2])['model'])
    return root


def as_a_run_saves(root, *ranks):
    """Without what a merge keeps of each stage."""
    edit(pop('pipeline_stage_states'), *ranks)(root)


def check_split(root, source, layout):
    for rank in STAGES:
        found, expected = load(root, rank), load(source, rank)
        for key in ('model', 'optimizer'):
            assert same(found[key], expected[key]) == []
        assert found['args'].pipeline_model_parallel_layout == layout
        assert found['args'].num_layers_per_virtual_pipeline_stage is None


def test_plain(odd, tmp_path, capsys):
    merged, back = tmp_path / 'merged', tmp_path / 'back'
    merge = f'merge --load-dir {odd} --save-dir {merged} --pipeline-size 2'
    assert main(merge.split()) == 0
    assert 'note: multi-token prediction is in model1 of rank 0; ' in capsys.readouterr().err
    for rank, chunks in (('00_000', (0, 2)), ('00_001', (1, 3))):
        found = load(merged, rank)
        for number, stage in enumerate(chunks):
            assert same(found[f'model{number}'], load(odd, STAGES[stage])['model']) == []
        assert found['args'].pipeline_model_parallel_layout == LAYOUT
        assert found['args'].num_layers_per_virtual_pipeline_stage is None
    PipelineParallelLayerLayout(LAYOUT, 2).validate_layer_layout(3, 1)
    as_a_run_saves(merged, '00_000', '00_001')
    assert main(f'split --load-dir {merged} --save-dir {back}'.split()) == 0
    check_split(back, odd, LAYOUT)


@pytest.fixture(scope='module')
def merged_sides(odd, tmp_path_factory):
    """Directories with EDGE and CLOUD, by mode."""

    @functools.cache
    def merge(mode):
        root = tmp_path_factory.mktemp('sides')
        sides = f'--save-dir-edge {root}/EDGE --save-dir-cloud {root}/CLOUD'
        assert main(f'merge --load-dir {odd} {sides} --merge-stages 0,3 {mode[0]}'.split()) == 0
        return root

    return merge


def split_sides(root, mode):
    split = f'split --load-dir-edge {root}/EDGE --load-dir-cloud {root}/CLOUD'
    return f'{split} --save-dir {root}/OUT {mode[1]}'


@pytest.mark.parametrize('mode', [CHUNKS, RANKS])
@pytest.mark.parametrize('own', [True, False])
def test_sides(mode, own, odd, merged_sides, tmp_path):
    root = shutil.copytree(merged_sides(mode), tmp_path / 'sides')
    cloud = ['00_000'] if mode is CHUNKS else ['00_001', '00_002']
    for side, ranks in (('EDGE', ['00_000']), ('CLOUD', cloud)):
        for rank in ranks:  # 0 layers a chunk is no size that Megatron takes
            args = load(root / side, rank)['args']
            assert args.num_layers_per_virtual_pipeline_stage is None
        if own:
            as_a_run_saves(root / side, *ranks)
    assert main(split_sides(root, mode).split()) == 0
    check_split(root / 'OUT', odd, LAYOUT)


LOST = {
    None: 'a chunk is empty, and without num_layers',
    4: 'hold 3 layers, but args say num_layers 4',
}


@pytest.mark.parametrize('mode', [CHUNKS, RANKS])
@pytest.mark.parametrize('layers', LOST)
def test_lost_stages_are_refused(layers, mode, merged_sides, tmp_path, capsys):
    root = shutil.copytree(merged_sides(mode), tmp_path / 'sides')
    ranks = ['00_000'] if mode is CHUNKS else ['00_001', '00_002']
    for side, files in (('EDGE', ['00_000']), ('CLOUD', ranks)):
        edit(put(layers, 'args', 'num_layers'), *files)(root / side)
    capsys.readouterr()
    refused(split_sides(root, mode), root, capsys, LOST[layers])
