"""Stages, chunks and ranks that are missing, out of order, or not all named."""

import shutil

import pytest

from tests.unit_tests.tools.checkpoint.pp_vpp_damage import (
    SIDES,
    SPLIT,
    check,
    edit,
    exchange,
    pop,
    put,
    remove,
)
from tests.unit_tests.tools.checkpoint.pp_vpp_files import ITERATION, MERGE, path_of, refused
from tools.checkpoint.convert_ckpt_pp_vpp import main


def reshaped_to_six(root):
    new = root.parent / 'new'
    sizes = '--pipeline-size 6 --virtual-size 1'
    assert main(f'reshape --load-dir {root} --save-dir {new} {sizes}'.split()) == 0
    shutil.rmtree(root)
    new.rename(root)


def overwrite(one, other):
    """A rank's file copied into another's directory."""

    def mutate(root):
        shutil.copyfile(path_of(root, one), path_of(root, other))

    return mutate


def copied_without_ranks(root):
    """As a tool saves, which has one rank for all files."""
    every = [f'{tensor}_00{stage}' for tensor in ('00', '01') for stage in range(4)]
    edit(put(0, 'args', 'rank'), *every)(root)
    overwrite('00_001', '01_001')(root)


ONE_STAGE = {
    'stage named twice in a flag': (
        None,
        f'{SIDES} --merge-stages 0,0,3 --merge-cloud-stages 1,2',
        '0 is named twice',
    ),
    'stage named on both sides': (
        None,
        f'{SIDES} --merge-stages 0,3 --merge-cloud-stages 1,2,3',
        'stage 3 is named by',
    ),
    'stage left out': (
        None,
        f'{SIDES} --merge-stages 0,3 --merge-cloud-stages 1',
        'stage 2 is named by neither',
    ),
    'middle stage left out': (
        None,
        f'{SIDES} --merge-stages 0,3 --middle-stages 2',
        'stage 1 is named by neither',
    ),
    'stage that is not there': (
        None,
        f'{SIDES} --merge-stages 0,4 --merge-cloud-stages 1,2,3',
        'rank 4, found 0, 1, 2, 3',
    ),
    'stages out of order': (
        None,
        f'{SIDES} --merge-stages 3,0 --merge-cloud-stages 1,2',
        '3 before 0',
    ),
    'last stage to the cloud': (
        None,
        f'{SIDES} --merge-stages 0,1 --merge-cloud-stages 2,3',
        '--merge-cloud-stages names stage 3, the last of 4',
    ),
    'first stage to the cloud': (
        None,
        f'{SIDES} --merge-stages 1,2 --middle-stages 0,3',
        '--middle-stages names stage 0, the first of 4',
    ),
    'edge between stages of the cloud': (
        reshaped_to_six,
        f'{SIDES} --merge-stages 0,2,5 --merge-cloud-stages 1,3,4',
        '--merge-stages names stage 2, which lies between stages 1 and 4',
    ),
    'first and last stage exchanged': (
        exchange('00_000', '00_003'),
        MERGE,
        r'00_000/\S+, key `model`: no embedding\.\*, expected the embedding in the first stage',
    ),
    'last stage exchanged': (
        exchange('00_002', '00_003'),
        f'{MERGE} --drop-optimizer',
        r'00_002/\S+, key `model`: holds decoder\.final_layernorm\.weight, expected in the',
    ),
    'stage missing at the end': (remove('mp_rank_00_003'), MERGE, 'stage 3 is missing'),
    'stage missing in between': (remove('mp_rank_00_001'), MERGE, 'stage 1 is missing'),
    'one stage too many': (
        lambda root: shutil.copytree(
            root / ITERATION / 'mp_rank_00_003', root / ITERATION / 'mp_rank_00_004'
        ),
        f'{MERGE[:-1]}5',
        'has 5 pipeline stages, but args say',
    ),
    'middle stages exchanged': (
        exchange('00_001', '00_002'),
        MERGE,
        r'00_001/\S+: args\.rank is 2, expected 1: the process of mp_rank_00_002 saved it',
    ),
    'middle stages exchanged, kept as ranks': (
        exchange('00_001', '00_002'),
        f'{SIDES} --merge-stages 0,3 --middle-stages 1,2',
        'the directories are exchanged, rename them by args.rank',
    ),
    'stage copied over another': (
        overwrite('00_001', '00_002'),
        f'{MERGE} --drop-optimizer',
        r'00_002/\S+: a copy of the file in mp_rank_00_001 \(args\.rank 1 and all else',
    ),
    'another TP rank in one stage': (
        lambda root: shutil.copytree(
            root / ITERATION / 'mp_rank_00_002', root / ITERATION / 'mp_rank_01_002'
        ),
        MERGE,
        'stage 2 has tensor-parallel ranks 0, 1, stage 0 has 0',
    ),
    'TP rank missing': (
        edit(put(2, 'args', 'tensor_model_parallel_size'), *(f'00_00{i}' for i in range(4))),
        MERGE,
        'tensor-parallel rank 1 of stage 0 is missing',
    ),
    'too many TP ranks': (
        lambda root: [
            shutil.copytree(
                root / ITERATION / f'mp_rank_00_00{i}', root / ITERATION / f'mp_rank_01_00{i}'
            )
            for i in range(4)
        ],
        MERGE,
        r'01_000/\S+: a copy of the file in mp_rank_00_000',
    ),
}


@pytest.mark.parametrize('name', ONE_STAGE)
def test_refused(name, pp4, tmp_path, capsys):
    check(ONE_STAGE[name], pp4, tmp_path, capsys)


@pytest.mark.parametrize(
    'change, pattern',
    [
        (exchange('00_001', '01_001'), r'00_001/\S+: args\.rank is 3, expected 2: the process of'),
        (exchange('00_001', '01_002'), r'00_001/\S+: args\.rank is 5, expected 2: the process of'),
        (overwrite('00_000', '01_000'), r'01_000/\S+: a copy of the file in mp_rank_00_000'),
        (copied_without_ranks, r'01_001/\S+: a copy of the file in mp_rank_00_001'),
    ],
)
def test_tensor_ranks_out_of_order_are_refused(change, pattern, pp4_tp2, tmp_path, capsys):
    check((change, MERGE, pattern), pp4_tp2, tmp_path, capsys)


def test_order_survives_conversions(pp4, tmp_path, capsys):
    """Outputs have the ranks of their own layout, by which an exchange shows as in a source."""
    reshaped_to_six(shutil.copytree(pp4, tmp_path / 'SRC'))
    exchange('00_003', '00_004')(tmp_path / 'SRC')
    capsys.readouterr()
    command = 'reshape --load-dir SRC --save-dir OUT --pipeline-size 3 --virtual-size 1'
    refused(command, tmp_path, capsys, r'00_003/\S+: args\.rank is 4, expected 3: the process of')


@pytest.fixture(scope='module')
def sides(pp4, tmp_path_factory):
    """The edge and both kinds of cloud."""
    root = tmp_path_factory.mktemp('sides')
    for name, mode in (('CHUNKS', '--merge-cloud-stages'), ('RANKS', '--middle-stages')):
        edge = 'EDGE' if name == 'CHUNKS' else 'EDGE_AGAIN'
        assert (
            main(
                [
                    'merge',
                    '--load-dir',
                    str(pp4),
                    '--save-dir-edge',
                    str(root / edge),
                    '--save-dir-cloud',
                    str(root / name),
                    '--merge-stages',
                    '0,3',
                    mode,
                    '1,2',
                ]
            )
            == 0
        )
    return root


SPLITS = {
    'number of chunks': (
        'CHUNKS',
        None,
        f'{SPLIT} --num-cloud-vpp-chunks 3',
        'has 2 chunks, expected 3',
    ),
    'ranks for chunks': (
        'RANKS',
        None,
        f'{SPLIT} --num-cloud-vpp-chunks 2',
        'names pipeline rank 0, found 1, 2',
    ),
    'chunks of a middle rank': (
        'RANKS',
        None,
        f'{SPLIT} --num-cloud-vpp-chunks 2 --split-cloud-rank 1',
        'model1` is empty',
    ),
    'chunks for ranks': (
        'CHUNKS',
        None,
        f'{SPLIT} --middle-ranks 0',
        'nothing in other chunks, found model0',
    ),
    'rank left out': ('RANKS', None, f'{SPLIT} --middle-ranks 1', 'rank 2 would be left out'),
    'rank twice': ('RANKS', None, f'{SPLIT} --middle-ranks 1,1', '1 is named twice'),
    'rank missing': ('RANKS', None, f'{SPLIT} --middle-ranks 1,2,3', 'rank 3, found 1, 2'),
    'edge rank missing': (
        'CHUNKS',
        None,
        f'{SPLIT} --num-cloud-vpp-chunks 2 --split-rank 1',
        'rank 1, found 0',
    ),
    'both modes': (
        'CHUNKS',
        None,
        f'{SPLIT} --num-cloud-vpp-chunks 2 --middle-ranks 1',
        'exclude each other',
    ),
    'edge chunk empty': (
        'CHUNKS',
        edit(put({}, 'model1'), '00_000'),
        f'{SPLIT} --num-cloud-vpp-chunks 2',
        'model1` is empty',
    ),
    'edge chunk missing': (
        'CHUNKS',
        edit(pop('model1'), '00_000'),
        f'{SPLIT} --num-cloud-vpp-chunks 2',
        'has 1 chunks, expected 2',
    ),
    'chunk missing in between': (
        'CHUNKS',
        edit(pop('model0'), '00_000'),
        f'{SPLIT} --num-cloud-vpp-chunks 2',
        'key `model0` is missing',
    ),
    'edge alone': (
        'CHUNKS',
        None,
        'split --load-dir EDGE --save-dir OUT',
        '2 layers, but args say',
    ),
    'kept stage state damaged': (
        'CHUNKS',
        edit(put([], 'pipeline_stage_states'), '00_000'),
        f'{SPLIT} --num-cloud-vpp-chunks 2',
        'pipeline_stage_states',
    ),
    'merge of chunks': (
        'CHUNKS',
        None,
        'merge --load-dir EDGE --save-dir OUT --pipeline-size 1',
        'has 1 stages, expected a multiple',
    ),
    'iteration of the cloud': (
        'CHUNKS',
        lambda edge: shutil.move(
            edge.parent / 'CLOUD' / ITERATION, edge.parent / 'CLOUD' / 'iter_0000003'
        ),
        f'{SPLIT} --num-cloud-vpp-chunks 2',
        'CLOUD/iter_0000002: no such directory',
    ),
}


@pytest.mark.parametrize('name', SPLITS)
def test_split_refused(name, sides, tmp_path, capsys):
    cloud, mutate, command, pattern = SPLITS[name]
    shutil.copytree(sides / 'EDGE', tmp_path / 'EDGE')
    shutil.copytree(sides / cloud, tmp_path / 'CLOUD')
    if mutate:
        mutate(tmp_path / 'EDGE')
    refused(command, tmp_path, capsys, pattern)


@pytest.mark.parametrize(
    'flags',
    [
        '--load-dir-edge CLOUD --load-dir-cloud EDGE',
        '--load-dir-edge SRC --load-dir-cloud SRC --split-cloud-rank 1',
        '--load-dir SRC --split-rank 1',
    ],
)
def test_split_refuses_stages_out_of_model_order(flags, sides, pp4, tmp_path, capsys):
    shutil.copytree(sides / 'EDGE', tmp_path / 'EDGE')
    shutil.copytree(sides / 'CHUNKS', tmp_path / 'CLOUD')
    plain = f'merge --load-dir {pp4} --save-dir {tmp_path}/SRC --pipeline-size 2'
    assert main(plain.split()) == 0
    capsys.readouterr()
    command = f'split {flags} --save-dir OUT --num-cloud-vpp-chunks 2'
    refused(command, tmp_path, capsys, 'the stages are not in model order')
