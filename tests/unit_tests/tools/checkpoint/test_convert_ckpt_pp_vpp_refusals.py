"""Wrong inputs end in one line before anything is written."""

import argparse
import shutil

import pytest
import torch

from tests.unit_tests.tools.checkpoint.pp_vpp_files import (
    ITERATION,
    MERGE,
    TRACKER,
    load,
    path_of,
    refused,
    same,
    save,
)
from tests.unit_tests.tools.checkpoint.pp_vpp_runs import run
from tools.checkpoint.convert_ckpt_pp_vpp import main

SIDES = 'merge --load-dir SRC --save-dir-edge OUT --save-dir-cloud OUT2'
SPLIT = 'split --load-dir-edge EDGE --load-dir-cloud CLOUD --save-dir OUT'
RESHAPE = 'reshape --load-dir SRC --save-dir OUT'


def edit(change, *ranks):
    """A mutation that changes the loaded state of some rank files."""

    def mutate(root):
        for rank in ranks:
            state = load(root, rank)
            state = change(state) or state
            save(state, root, rank)

    return mutate


def pop(*keys):
    def change(state):
        inner = state
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]

    return change


def put(value, *keys):
    def change(state):
        inner = state
        for key in keys[:-1]:
            inner = inner[key] if not isinstance(inner, argparse.Namespace) else vars(inner)[key]
        if isinstance(inner, argparse.Namespace):
            setattr(inner, keys[-1], value)
        else:
            inner[keys[-1]] = value

    return change


def remove(*names):
    def mutate(root):
        for name in names:
            target = root / ITERATION / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()

    return mutate


def add_file(name, text=''):
    def mutate(root):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    return mutate


def truncate(root):
    path = path_of(root, '00_002')
    path.write_bytes(path.read_bytes()[:-5000])


def garbage(root):
    path_of(root, '00_002').write_bytes(b'not a checkpoint')


def old_format(root):
    torch.save({'model': {}}, path_of(root, '00_002'), _use_new_zipfile_serialization=False)


def narrow(*names):
    """Half as large in the first dimension, as in another model."""

    def change(state):
        for key, value in state['model'].items():
            if key.endswith(names):
                state['model'][key] = value[: len(value) // 2].clone()

    return change


def exchange(one, other):
    """Rank directories renamed by hand."""

    def mutate(root):
        first, second = (root / ITERATION / f'mp_rank_{rank}' for rank in (one, other))
        first.rename(root / 'aside')
        second.rename(first)
        (root / 'aside').rename(second)

    return mutate


def exchange_shapes(state):
    moments = state['optimizer']['optimizer']['state']
    moments[0], moments[1] = moments[1], moments[0]


def frozen(state):
    """As if one of two layers of the same shapes had been frozen: which one can't be told."""
    inner, masters = state['optimizer']['optimizer'], state['optimizer']['fp32_from_fp16_params']
    for group, copies in zip(inner['param_groups'], masters, strict=True):
        keep = len(group['params']) // 2
        del copies[keep:]
        for gone in group['params'][keep:]:
            del inner['state'][gone]
        group['params'] = group['params'][:keep]


def reshaped_to_six(root):
    new = root.parent / 'new'
    sizes = '--pipeline-size 6 --virtual-size 1'
    assert main(f'reshape --load-dir {root} --save-dir {new} {sizes}'.split()) == 0
    shutil.rmtree(root)
    new.rename(root)


ONE_STAGE = {
    'stage missing at the end': (remove('mp_rank_00_003'), MERGE, 'stage 3 is missing'),
    'stage missing in between': (remove('mp_rank_00_001'), MERGE, 'stage 1 is missing'),
    'rank file missing': (
        remove('mp_rank_00_001/model_optim_rng.pt'),
        MERGE,
        'mp_rank_00_001: no model_optim_rng',
    ),
    'key model missing': (edit(pop('model'), '00_001'), MERGE, r'00_001.*key `model` is missing'),
    'key iteration missing': (edit(pop('iteration'), '00_001'), MERGE, 'key `iteration` is miss'),
    'key checkpoint_version missing': (
        edit(pop('checkpoint_version'), '00_003'),
        MERGE,
        'key `checkpoint_version` is missing',
    ),
    'key rng_state missing in one': (
        edit(pop('rng_state'), '00_002'),
        MERGE,
        'key `rng_state` is missing, but',
    ),
    'optimizer missing in one': (
        edit(pop('optimizer'), '00_002'),
        MERGE,
        'key `optimizer` is missing, but',
    ),
    'layer missing': (
        edit(
            lambda s: [s['model'].pop(k) for k in list(s['model']) if 'layers.0.' in k] and None,
            '00_001',
        ),
        MERGE,
        r'decoder\.layers\.0 is missing',
    ),
    'last layer missing': (
        edit(
            lambda s: [s['model'].pop(k) for k in list(s['model']) if 'layers.1.' in k] and None,
            '00_001',
        ),
        f'{MERGE} --drop-optimizer',
        '5 layers, but args say num_layers 6',
    ),
    'empty stage without num_layers': (
        lambda root: (
            edit(put({}, 'model'), '00_001')(root),
            edit(put(None, 'args', 'num_layers'), *(f'00_00{i}' for i in range(4)))(root),
        ),
        MERGE,
        'a chunk is empty',
    ),
    'model of another type': (
        edit(put(7, 'model'), '00_001'),
        MERGE,
        'holds int, expected a state',
    ),
    'pre-core model': (
        edit(put({'language_model': {}}, 'model'), '00_001'),
        MERGE,
        'before megatron-core',
    ),
    'both forms in a file': (edit(put({}, 'model0'), '00_001'), MERGE, 'both `model` and `model0`'),
    'iteration differs': (
        edit(put(3, 'iteration'), '00_001'),
        MERGE,
        'key `iteration` is 3, expected 2',
    ),
    'scheduler differs': (
        edit(put(5, 'opt_param_scheduler', 'num_steps'), '00_002'),
        MERGE,
        'key `opt_param_scheduler` differs',
    ),
    'unknown key differs': (
        lambda root: [edit(put(stage, 'custom'), f'00_00{stage}')(root) for stage in range(4)],
        MERGE,
        'key `custom` differs',
    ),
    'learning rate differs': (
        edit(put(1.5, 'optimizer', 'optimizer', 'param_groups', 0, 'lr'), '00_002'),
        MERGE,
        'optimizer group 0 has lr 1.5',
    ),
    'unknown optimizer layout': (
        edit(put({'momentum': 1}, 'optimizer'), '00_001'),
        MERGE,
        r'optimizer layout not known \(keys momentum\).*--drop-optimizer',
    ),
    'unknown key in the optimizer': (
        edit(put(1, 'optimizer', 'extra'), '00_001'),
        MERGE,
        'layout not known .key extra',
    ),
    'distributed optimizer by its state': (
        edit(lambda s: s['optimizer'].pop('fp32_from_fp16_params') and None, '00_001'),
        MERGE,
        'distributed optimizer.*--drop-optimizer',
    ),
    'masters missing': (
        edit(lambda s: s['optimizer']['fp32_from_fp16_params'][1].pop() is None, '00_001'),
        MERGE,
        r'fp32 masters don.t fit',
    ),
    'too many masters': (
        edit(lambda s: s['optimizer']['fp32_from_fp16_params'][1].append(torch.ones(3)), '00_001'),
        MERGE,
        'more fp32 masters',
    ),
    'state without a group': (
        edit(put({}, 'optimizer', 'optimizer', 'state', 99), '00_001'),
        MERGE,
        'state of 99',
    ),
    'state of one parameter missing': (
        edit(pop('optimizer', 'optimizer', 'state', 3), '00_001'),
        MERGE,
        r'00_001/.*no state of parameter 3 \(model decoder\.layers\.\d\.\S+\), but of \d+ others',
    ),
    'state of one file missing': (
        edit(put({}, 'optimizer', 'optimizer', 'state'), '00_002'),
        MERGE,
        r'00_002/\S+, optimizer: no state of any parameter, but .*00_000.* has it',
    ),
    'side of a killed conversion': (
        add_file(f'{ITERATION}/.unpublished'),
        MERGE,
        'marked .unpublished: one side of a conversion that was killed',
    ),
    'shapes exchanged': (edit(exchange_shapes, '00_001'), MERGE, 'shapes don.t follow the model'),
    'frozen layer, not to be proven': (
        edit(frozen, '00_001'),
        MERGE,
        'can.t be proven by their shapes',
    ),
    'more state than parameters': (
        edit(lambda s: s['model'].pop('decoder.final_layernorm.bias') is None, '00_003'),
        MERGE,
        'state of 15 parameters, but the model has 14',
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
    'two directories for one rank': (
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
        'args say tensor_model_parallel_size 1',
    ),
    'one stage too many': (
        lambda root: shutil.copytree(
            root / ITERATION / 'mp_rank_00_003', root / ITERATION / 'mp_rank_00_004'
        ),
        f'{MERGE[:-1]}5',
        'has 5 pipeline stages, but args say',
    ),
    'truncated': (truncate, MERGE, '00_002/model_optim_rng.pt: no zip-based'),
    'garbage': (garbage, MERGE, '00_002/model_optim_rng.pt: no zip-based'),
    'old file format': (old_format, MERGE, 'no zip-based torch.save file'),
    'not a dict': (
        lambda root: torch.save([1], path_of(root, '00_002')),
        MERGE,
        'holds list, expected a dict',
    ),
    'tracker missing': (lambda root: (root / TRACKER).unlink(), MERGE, f'{TRACKER}: no such file'),
    'tracker garbage': (add_file(TRACKER, 'soon'), MERGE, "holds 'soon', expected one integer"),
    'tracker names nothing': (add_file(TRACKER, '9'), MERGE, 'names 9'),
    'iteration not there': (None, f'{MERGE} --iteration 5', 'iterations in .*: 2$'),
    'source missing': (lambda root: shutil.rmtree(root), MERGE, 'no such directory'),
    'torch_dist': (
        add_file(f'{ITERATION}/metadata.json', '{}'),
        MERGE,
        'torch_dist checkpoint.*weighted_merge.py',
    ),
    'torch_dcp': (
        lambda root: (shutil.rmtree(root / ITERATION), add_file(f'{ITERATION}/.metadata')(root)),
        MERGE,
        'torch_dcp',
    ),
    'Hugging Face': (
        lambda root: (shutil.rmtree(root), add_file('config.json')(root)),
        MERGE,
        'Hugging Face',
    ),
    'output exists': (
        lambda root: (root.parent / 'OUT' / ITERATION).mkdir(parents=True),
        MERGE,
        'exists',
    ),
    'source is output': (None, MERGE.replace('OUT', 'SRC'), 'both source and output'),
    'source is output by another name': (
        lambda root: (root.parent / 'LINK').symlink_to(root),
        MERGE.replace('OUT', 'LINK'),
        'both source and output',
    ),
    'output inside the source': (
        None,
        MERGE.replace('OUT', f'SRC/{ITERATION}/new'),
        'lies inside the source',
    ),
    'one output for both sides': (
        None,
        f'{SIDES} --merge-stages 0,3 --merge-cloud-stages 1,2'.replace('OUT2', 'OUT'),
        'both --save-dir-edge and --save-dir-cloud',
    ),
    'cloud output in the iteration of the edge output': (
        None,
        f'{SIDES}/{ITERATION} --merge-stages 0,3 --merge-cloud-stages 1,2'.replace('OUT2', 'OUT'),
        f'OUT/{ITERATION}: lies inside the other output',
    ),
    'edge output in the iteration of the cloud output': (
        None,
        'merge --load-dir SRC --save-dir-edge OUT/iter_0000002 --save-dir-cloud OUT '
        '--merge-stages 0,3 --merge-cloud-stages 1,2',
        f'OUT/{ITERATION}: lies inside the other output',
    ),
    'output in a loop of links': (
        lambda root: (root.parent / 'LINK').symlink_to('LINK'),
        MERGE.replace('OUT', 'LINK/z'),
        "LINK/z: can't be used: .*loop",
    ),
    'output with a name that is too long': (
        None,
        MERGE.replace('OUT', f'OUT{"x" * 300}') + ' --dry-run',
        "x: can't be used: File name too long",
    ),
    'iteration with a name that is too long': (
        None,
        f'{MERGE} --iteration {"1" * 300} --dry-run',
        '1: no such directory; iterations in',
    ),
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
    'stage of another model': (
        edit(narrow('linear_fc1.weight'), '00_002'),
        f'{MERGE} --drop-optimizer',
        r'linear_fc1\.weight has shape \(16, 16\), expected \(32, 16\) as in',
    ),
    'vocabulary of another model': (
        edit(put(128, 'args', 'padded_vocab_size'), '00_003'),
        MERGE,
        r'args\.padded_vocab_size is 128, expected 64 as in',
    ),
    'embedding missing': (
        edit(pop('model', 'embedding.word_embeddings.weight'), '00_000'),
        f'{RESHAPE} --pipeline-size 2 --virtual-size 1 --drop-optimizer',
        'no embedding',
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
    'stray key in a middle stage': (
        edit(lambda s: s['model'].update({'extra.weight': torch.ones(1)}), '00_001'),
        f'{RESHAPE} --pipeline-size 2 --virtual-size 1 --drop-optimizer',
        'extra.weight belongs to no layer',
    ),
    'head that is no copy': (
        edit(lambda s: s['model']['output_layer.weight'].add_(1) is None, '00_003'),
        f'{RESHAPE} --pipeline-size 1 --virtual-size 1 --drop-optimizer',
        'is no copy of',
    ),
    'moments of the head that are no copy': (
        edit(
            lambda s: s['optimizer']['optimizer']['state'][4]['exp_avg'].add_(1) is None, '00_003'
        ),
        f'{RESHAPE} --pipeline-size 1 --virtual-size 1',
        'is no copy of',
    ),
    'tied or not unknown': (
        edit(pop('args'), *(f'00_00{i}' for i in range(4))),
        f'{RESHAPE} --pipeline-size 1 --virtual-size 1',
        'untie_embeddings_and_output_weights',
    ),
}


@pytest.mark.parametrize('name', ONE_STAGE)
def test_refused(name, pp4, tmp_path, capsys):
    mutate, command, pattern = ONE_STAGE[name]
    shutil.copytree(pp4, tmp_path / 'SRC')
    if mutate:
        mutate(tmp_path / 'SRC')
        capsys.readouterr()
    refused(command, tmp_path, capsys, pattern)


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
        edit(put({}, 'model1'), '00'),
        f'{SPLIT} --num-cloud-vpp-chunks 2',
        'model1` is empty',
    ),
    'edge chunk missing': (
        'CHUNKS',
        edit(pop('model1'), '00'),
        f'{SPLIT} --num-cloud-vpp-chunks 2',
        'has 1 chunks, expected 2',
    ),
    'chunk missing in between': (
        'CHUNKS',
        edit(pop('model0'), '00'),
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
        edit(put([], 'pipeline_stage_states'), '00'),
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


TWO = (
    'merge --load-dir-edge EDGE --load-dir-cloud CLOUD --save-dir-edge OUT --save-dir-cloud OUT2 '
    '--merge-stages 0,3 --merge-cloud-stages 1,2'
)


@pytest.mark.parametrize(
    'change, command, pattern',
    [
        (
            put(8, 'args', 'hidden_size'),
            f'{TWO} --drop-optimizer',
            r'CLOUD/\S+: args\.hidden_size is 8, expected 16 as in \S+EDGE/',
        ),
        (
            narrow('linear_fc1.layer_norm_weight', 'input_layernorm.weight'),
            f'{TWO} --drop-optimizer',
            r'CLOUD/\S+: decoder\.layers\.0\.\S+ has shape \(8,\), expected \(16,\) as in \S+EDGE/',
        ),
        (pop('optimizer'), TWO, r'CLOUD/\S+: key `optimizer` is missing, but \S+EDGE/'),
    ],
)
def test_sides_of_two_models_are_refused(change, command, pattern, pp4, pp4_tp2, tmp_path, capsys):
    shutil.copytree(pp4, tmp_path / 'EDGE')
    shutil.copytree(pp4_tp2, tmp_path / 'CLOUD')
    edit(change, *(f'{tp}_{stage}' for tp in ('00', '01') for stage in ('001', '002')))(
        tmp_path / 'CLOUD'
    )
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
