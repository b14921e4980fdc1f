"""Wrong sources and arguments end in one line before anything is written."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.cpu_megatron.whole_checkpoint import ALONE
from tests.unit_tests.tools.checkpoint.handmade import model_tensors, write_checkpoint
from tests.unit_tests.tools.checkpoint.pp_vpp_damage import RESHAPE, SIDES, add_file, check
from tests.unit_tests.tools.checkpoint.pp_vpp_files import (
    ITERATION,
    MERGE,
    TRACKER,
    load,
    refused,
    same,
)
from tests.unit_tests.tools.checkpoint.pp_vpp_runs import run
from tools.checkpoint.convert_ckpt_pp_vpp import main

ONE_STAGE = {
    'side of a killed conversion': (
        add_file(f'{ITERATION}/.unpublished'),
        MERGE,
        'marked .unpublished: one side of a conversion that was killed',
    ),
    'distrib_optim.pt': (
        add_file(f'{ITERATION}/mp_rank_00_001/distrib_optim.pt'),
        MERGE,
        r'distrib_optim\.pt: optimizer state.*--drop-optimizer',
    ),
    'layer-wise optimizer': (
        add_file(f'{ITERATION}/mp_rank_00_001/layer_wise_optimizer_0.pt'),
        MERGE,
        r'layer_wise_optimizer_0\.pt: optimizer state',
    ),
    'unknown file of a rank': (
        add_file(f'{ITERATION}/mp_rank_00_001/more.pt'),
        MERGE,
        r'more\.pt: not a file',
    ),
    'directory name': (
        add_file(f'{ITERATION}/mp_rank_0_001/x'),
        MERGE,
        'mp_rank_0_001: not a rank directory',
    ),
    'directory name with a tail': (
        add_file(f'{ITERATION}/mp_rank_00_001_bak/x'),
        MERGE,
        'bak: not a rank directory',
    ),
    'another directory name for a rank': (
        add_file(f'{ITERATION}/mp_rank_00_0001/x'),
        MERGE,
        '0001: not a rank directory',
    ),
    'mixed layouts': (
        lambda root: shutil.copytree(
            root / ITERATION / 'mp_rank_00_000', root / ITERATION / 'mp_rank_01'
        ),
        MERGE,
        'different numbers of fields',
    ),
    'tracker missing': (
        lambda root: (root / TRACKER).unlink(),
        MERGE,
        rf'{TRACKER}: no such file; iterations in \S+SRC: 2; name one with --iteration',
    ),
    'tracker and iterations missing': (
        lambda root: ((root / TRACKER).unlink(), shutil.rmtree(root / ITERATION)),
        MERGE,
        f'SRC: no metadata.json and no {TRACKER}: not a checkpoint',
    ),
    'path of another iteration': (
        None,
        MERGE.replace('SRC', f'SRC/{ITERATION}') + ' --iteration 3',
        f'SRC/{ITERATION}: names {ITERATION}, but the iteration to convert is 3 .*root .*SRC$',
    ),
    'path of an iteration that is the output': (
        None,
        MERGE.replace('SRC', f'SRC/{ITERATION}').replace('OUT', 'SRC'),
        'SRC: both source and output',
    ),
    'path of another iteration for the cloud': (
        lambda root: shutil.copytree(root / ITERATION, root / 'iter_0000003'),
        'merge --load-dir-edge SRC --load-dir-cloud SRC/iter_0000003 --save-dir-edge OUT '
        '--save-dir-cloud OUT2 --merge-stages 0,3 --merge-cloud-stages 1,2',
        'SRC/iter_0000003: names iter_0000003, but the iteration to convert is 2 ',
    ),
    'no output but an empty one': (
        None,
        'merge --load-dir SRC --save-dir= --pipeline-size 2',
        'needs --save-dir',
    ),
    'no sizes but empty ones': (
        None,
        f'{RESHAPE} --pipeline-size= --virtual-size 2',
        'needs --pipeline-size',
    ),
    'tracker garbage': (add_file(TRACKER, 'soon'), MERGE, "holds 'soon', expected one integer"),
    'tracker names nothing': (
        add_file(TRACKER, '9'),
        MERGE,
        r'names 9, but \S+ is no directory; iterations in \S+SRC: 2$',
    ),
    'iteration not there': (None, f'{MERGE} --iteration 5', 'iterations in .*: 2$'),
    'source missing': (lambda root: shutil.rmtree(root), MERGE, "SRC: doesn't exist$"),
    'source a file': (
        lambda root: (shutil.rmtree(root), root.touch()),
        MERGE,
        'SRC: is a file, expected a directory$',
    ),
    'torch_dist': (
        lambda root: (
            shutil.rmtree(root / ITERATION),
            write_checkpoint(root / ITERATION, model_tensors(1)),
        ),
        MERGE,
        'torch_dist checkpoint.*weighted_merge.py',
    ),
    'torch_dcp': (
        lambda root: (
            shutil.rmtree(root / ITERATION),
            dcp.save({'model.x': torch.ones(1)}, checkpoint_id=root / ITERATION, **ALONE),
        ),
        MERGE,
        'a torch_dcp checkpoint, expected legacy',
    ),
    'iteration under another name': (
        lambda root: ((root / TRACKER).unlink(), (root / ITERATION).rename(root / 'latest')),
        MERGE.replace('SRC', 'SRC/latest'),
        'SRC/latest: has the name of no iteration',
    ),
    'Hugging Face': (
        lambda root: (shutil.rmtree(root), add_file('config.json')(root)),
        MERGE,
        'a Hugging Face checkpoint, expected one that Megatron saved',
    ),
    'both cloud modes': (
        None,
        f'{SIDES} --merge-stages 0,3 --merge-cloud-stages 1,2 --middle-stages 1,2',
        '--merge-cloud-stages and --middle-stages exclude',
    ),
    'no cloud mode': (None, f'{SIDES} --merge-stages 0,3', 'needs --merge-cloud-stages or'),
    'one and two sources': (
        None,
        f'{SIDES} --load-dir-edge SRC --merge-stages 0,3 --merge-cloud-stages 1,2',
        '--load-dir and --load-dir-edge exclude',
    ),
    'one of two sources': (
        None,
        'merge --load-dir-edge SRC --save-dir-edge OUT --save-dir-cloud OUT2 '
        '--merge-stages 0,3 --merge-cloud-stages 1,2',
        'needs --load-dir-cloud',
    ),
    'plain and edge/cloud': (
        None,
        f'{MERGE} --merge-stages 0,3',
        '--pipeline-size and --merge-stages exclude',
    ),
    'no output': (None, 'merge --load-dir SRC --pipeline-size 2', 'needs --save-dir'),
    'stages not divisible': (None, f'{MERGE[:-1]}3', 'has 4 stages, expected a multiple'),
    'nothing to merge': (None, f'{MERGE[:-1]}4', 'has 4 stages, expected a multiple'),
    'split of standard stages': (
        None,
        'split --load-dir SRC --save-dir OUT',
        'split it? already|it is split already',
    ),
    'split without sides': (
        None,
        'split --load-dir-edge SRC --load-dir-cloud SRC --save-dir OUT',
        'needs --num-cloud-vpp-chunks or --middle-ranks',
    ),
    'layers not divisible': (
        None,
        f'{RESHAPE} --pipeline-size 2 --virtual-size 2',
        '6 layers can.t be divided',
    ),
    'layers per chunk: wrong sum': (
        None,
        f'{RESHAPE} --pipeline-size 2 --virtual-size 2 --layers-per-chunk 3,2,2,3',
        'adds up to 10, but the checkpoint has 6',
    ),
    'layers per chunk: wrong number': (
        None,
        f'{RESHAPE} --pipeline-size 2 --virtual-size 2 --layers-per-chunk 3,3',
        '2 numbers, expected 4',
    ),
    'reshape to the same': (
        None,
        f'{RESHAPE} --pipeline-size 4 --virtual-size 1 --layers-per-chunk 1,2,2,1',
        'has this layout already',
    ),
}


@pytest.mark.parametrize('name', ONE_STAGE)
def test_refused(name, pp4, tmp_path, capsys):
    check(ONE_STAGE[name], pp4, tmp_path, capsys)


def test_usage_errors_end_with_2(capsys):
    for words in (
        'merge --merge-stages a',
        'merge --workers 0',
        'split --split-rank -1',
        'join',
        'reshape --load-dir a --save-dir b',
    ):
        with pytest.raises(SystemExit) as stop:
            main(words.split())
        assert stop.value.code == 2


def test_real_distributed_optimizer_is_refused_and_dropped(tmp_path, capsys):
    run(
        2,
        '--num-layers 2 --bf16 --pipeline-model-parallel-size 2 --use-distributed-optimizer',
        f'--save {tmp_path}/SRC --exit-interval 1',
    )
    capsys.readouterr()
    command = 'reshape --load-dir SRC --save-dir OUT --pipeline-size 1 --virtual-size 1'
    refused(command, tmp_path, capsys, r'distrib_optim\.pt: .*--drop-optimizer')
    words = command.replace('SRC', f'{tmp_path}/SRC').replace('OUT', f'{tmp_path}/OUT').split()
    assert main([*words, '--drop-optimizer']) == 0
    found = load(tmp_path / 'OUT', '00', 'iter_0000001')
    stages = [load(tmp_path / 'SRC', f'00_00{i}', 'iter_0000001')['model'] for i in (0, 1)]
    assert (
        same(
            found['model']['decoder.layers.1.mlp.linear_fc1.weight'],
            stages[1]['decoder.layers.0.mlp.linear_fc1.weight'],
        )
        == []
    )
    assert 'optimizer' not in found
