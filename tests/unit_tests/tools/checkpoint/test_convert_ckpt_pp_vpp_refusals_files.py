"""Rank files that lack something, hold more, or are damaged."""

import pytest
import torch

from tests.unit_tests.tools.checkpoint.pp_vpp_damage import RESHAPE, check, edit, pop, put, remove
from tests.unit_tests.tools.checkpoint.pp_vpp_files import MERGE, path_of


def truncate(root):
    path = path_of(root, '00_002')
    path.write_bytes(path.read_bytes()[:-5000])


def garbage(root):
    path_of(root, '00_002').write_bytes(b'not a checkpoint')


def old_format(root):
    torch.save({'model': {}}, path_of(root, '00_002'), _use_new_zipfile_serialization=False)


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


ONE_STAGE = {
    'rank file missing': (
        remove('mp_rank_00_001/model_optim_rng.pt'),
        MERGE,
        'mp_rank_00_001: no model_optim_rng',
    ),
    'key model missing': (edit(pop('model'), '00_001'), MERGE, r'00_001.*key `model` is missing'),
    'iteration that is no whole number': (
        edit(put(2.5, 'iteration'), '00_001'),
        MERGE,
        r'key `iteration` is 2\.5, expected 2 as in',
    ),
    'checkpoint_version of another writer': (
        edit(put(2.0, 'checkpoint_version'), '00_002'),
        MERGE,
        'key `checkpoint_version` differs from',
    ),
    'size in args that is no number': (
        edit(put('six', 'args', 'num_layers'), '00_001'),
        MERGE,
        "args.num_layers is 'six', expected a number",
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
    'truncated': (truncate, MERGE, '00_002/model_optim_rng.pt: no zip-based'),
    'garbage': (garbage, MERGE, '00_002/model_optim_rng.pt: no zip-based'),
    'old file format': (old_format, MERGE, 'no zip-based torch.save file'),
    'not a dict': (
        lambda root: torch.save([1], path_of(root, '00_002')),
        MERGE,
        'holds list, expected a dict',
    ),
    'embedding missing': (
        edit(pop('model', 'embedding.word_embeddings.weight'), '00_000'),
        f'{RESHAPE} --pipeline-size 2 --virtual-size 1 --drop-optimizer',
        'no embedding',
    ),
    'layer number written in another way': (
        edit(lambda s: s['model'].update({'decoder.layers.00.x': torch.ones(1)}), '00_001'),
        f'{RESHAPE} --pipeline-size 2 --virtual-size 1 --drop-optimizer',
        r'decoder\.layers\.00\.x belongs to no layer',
    ),
    'stray key in a middle stage': (
        edit(lambda s: s['model'].update({'extra.weight': torch.ones(1)}), '00_001'),
        f'{RESHAPE} --pipeline-size 2 --virtual-size 1 --drop-optimizer',
        'extra.weight belongs to no layer',
    ),
}


@pytest.mark.parametrize('name', ONE_STAGE)
def test_refused(name, pp4, tmp_path, capsys):
    check(ONE_STAGE[name], pp4, tmp_path, capsys)
