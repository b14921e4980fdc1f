"""The inspector's verdict on two checkpoints, against what the merge does with them."""

import json

import pytest
import torch

from tests.unit_tests.tools.checkpoint.handmade import (
    model_tensors,
    write_checkpoint,
)
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.inspect_checkpoint import compare_checkpoints, main
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge

QKV = 'decoder.layers.self_attention.linear_qkv.weight'


def pair(tmp_path, change=lambda model: None, dtype=torch.bfloat16, **options):
    first = write_checkpoint(tmp_path / 'iter_0000001', model_tensors(1))
    model = model_tensors(2, dtype)
    change(model)
    return first, write_checkpoint(tmp_path / 'iter_0000002', model, **options)


PAIRS = {
    'same': ({}, True, []),
    'layout': ({'layout': {}}, True, ['--allow-reshard']),
    'dtype': ({'dtype': torch.float32}, False, []),
    'layout and dtype': ({'layout': {}, 'dtype': torch.float32}, False, []),
    'keys': ({'change': lambda m: m.update({'decoder.a': m.pop(QKV)})}, False, []),
    'shape': ({'change': lambda m: m.update({QKV: m[QKV][:, :36]})}, False, []),
    'shape and layout': (
        {'change': lambda m: m.update({QKV: m[QKV][:, :36]}), 'layout': {}},
        False,
        [],
    ),
    '_extra_state': ({'extra_states': {'decoder.x._extra_state': b'1'}}, False, []),
    'integers': ({'change': lambda m: m.update({QKV: m[QKV].int()})}, False, []),
    'not of the model': ({'change': lambda m: m.update({'vision.a': torch.ones(2)})}, False, []),
}
FLAGS = {
    '--model-only': {'model_only': True},
    '--allow-reshard': {'allow_reshard': True},
}


def merges(checkpoints, options, tmp_path):
    """What the merge does: None, or its error."""
    flags = {key: value for option in options for key, value in FLAGS[option].items()}
    try:
        merge(checkpoints, [0.5, 0.5], tmp_path / 'out', dry_run=True, **flags)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize('name', PAIRS)
def test_the_verdict_is_what_the_merge_does(name, tmp_path, capsys):
    arguments, mergeable, options = PAIRS[name]
    checkpoints = pair(tmp_path, **arguments)
    found = compare_checkpoints(*checkpoints)
    assert (found.mergeable, sorted(found.options)) == (mergeable, options)
    error = merges(checkpoints, found.options if mergeable else FLAGS, tmp_path)
    assert (error is None) == mergeable
    for option in options:  # none of them is asked for in vain
        assert merges(checkpoints, set(options) - {option}, tmp_path) is not None
    if found.faults:
        assert merges(checkpoints, [], tmp_path) == found.faults[0]
    elif found.differences:
        refusal = merges(checkpoints, [], tmp_path)
        assert refusal.endswith(f'against {checkpoints[0]}: {found.differences[0]}')
    assert main(['--diff', *map(str, checkpoints)]) == int(not mergeable)
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith('mergeable' if mergeable else 'not mergeable')
    assert main(['--json', '--diff', *map(str, checkpoints)]) == int(not mergeable)
    assert json.loads(capsys.readouterr().out)['options'] == found.options


def test_every_difference_is_listed_in_few_lines(tmp_path, capsys):
    def change(model):
        model[QKV] = model[QKV][:, :36]
        for i in range(300):
            model[f'decoder.b{i}'] = torch.ones(2, dtype=torch.float32 if i % 2 else torch.float16)

    first, other = pair(tmp_path, change, torch.float32, layout={})
    model = model_tensors(3)
    change(model)
    third = write_checkpoint(
        tmp_path / 'third',
        {key: value.double() for key, value in model.items()},
        layout={'decoder.b5': (0, 2)},
    )
    groups = compare_checkpoints(first, other).groups()
    assert sorted(group[0].kind for group in groups) == [
        'chunk layout',
        'dtype',
        'global shape',
        'tensors differ:',
    ]
    assert main(['--diff', str(other), str(third)]) == 1
    out = capsys.readouterr().out
    assert 'dtype of 306 tensors, B against A' in out
    assert 'and 302 more' in out and out.count('\n') < 20


def test_checkpoints_of_a_run_and_of_different_models(real, tmp_path):
    checkpoints = real / 'gpt/iter_0000001', real / 'gpt/iter_0000002'
    found = compare_checkpoints(*checkpoints)
    assert found.mergeable and found.options == ['--model-only'] and not found.differences
    assert merges(checkpoints, [], tmp_path) and not merges(checkpoints, found.options, tmp_path)
    found = compare_checkpoints(real / 'moe', real / 'hybrid')
    assert not found.mergeable and merges([real / 'moe', real / 'hybrid'], FLAGS, tmp_path)
    (tmp_path / 'link').symlink_to(real / 'gpt')
    for same in (real / 'gpt', real / 'gpt/iter_0000002', tmp_path / 'link'):
        with pytest.raises(CheckpointError, match='the same checkpoint as .*gpt; name two'):
            compare_checkpoints(real / 'gpt', same)
