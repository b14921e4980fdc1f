"""Files of two models."""

import shutil

import pytest

from tests.unit_tests.tools.checkpoint.pp_vpp_damage import (
    RESHAPE,
    SIDES,
    check,
    edit,
    narrow,
    pop,
    put,
)
from tests.unit_tests.tools.checkpoint.pp_vpp_files import MERGE, refused

ONE_STAGE = {
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
    'stage of another run': (
        edit(put(5, 'args', 'seed'), '00_002'),
        f'{SIDES} --merge-stages 0,3 --middle-stages 1,2',
        r'00_002/\S+: args\.seed is 5, expected 1234 as in \S+; the files are of different runs',
    ),
    'first stage of another run': (
        edit(put(5, 'args', 'seed'), '00_000'),
        MERGE,
        r'00_001/\S+: args\.seed is 1234, expected 5 as in \S+; the files are of different runs',
    ),
    'stage of another point in training': (
        edit(put(5, 'args', 'consumed_train_samples'), '00_002'),
        MERGE,
        r'args\.consumed_train_samples is 5, expected \d+ as in',
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
    check(ONE_STAGE[name], pp4, tmp_path, capsys)


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
