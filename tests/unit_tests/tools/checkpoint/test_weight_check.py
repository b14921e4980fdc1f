"""The main parameters of checkpoints against their weights: real ones, right and shifted."""

import pickle
import re
import shutil
from functools import partial

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.optimizer_load import conversion_command

from tests.cpu_megatron.torchrun import two_at_once
from tests.cpu_megatron.whole_checkpoint import read_tensors
from tests.unit_tests.optimizer.resume_runs import launch, read_records
from tests.unit_tests.tools.checkpoint.handmade import model_tensors, write_checkpoint
from tools.checkpoint.inspection.resume import find_distributed
from tools.checkpoint.inspection.weights import check_weights
from tools.checkpoint.resume_report import main

BF16 = ['--bf16', '--use-distributed-optimizer', '--train-iters', '3']
SAVED = [*BF16, '--dist-ckpt-optim-fully-reshardable']
# sizes that aren't multiples of the padding's 128 elements, in several buckets
BUCKETS = [*SAVED, '--overlap-grad-reduce', '--ddp-bucket-size', '3000', '--ffn-hidden-size', '68']
OFFLOAD = ['--use-precision-aware-optimizer', '--optimizer-cpu-offload']
ONE_RANK = {
    'buckets': BUCKETS,
    'fp32': [argument for argument in SAVED if argument != '--bf16'],
    'offload': [*SAVED, *OFFLOAD, '--optimizer-offload-fraction', '0.5'],
    'experts': [
        *(*SAVED, '--num-experts', '4', '--swiglu', '--moe-router-score-function', 'sigmoid'),
        '--moe-router-enable-expert-bias',
    ],
    'dp_reshardable': BF16,
    'not distributed': ['--bf16', '--train-iters', '3'],
}
TWO_RANKS = {
    'tensor parallel': [*SAVED, '--tensor-model-parallel-size', '2', '--swiglu'],
    'tied, pipeline': [*SAVED, '--pipeline-model-parallel-size', '2'],
    'data parallel': [*BUCKETS, '--untie-embeddings-and-output-weights'],
}


def _tasks(runs, work) -> list[dict]:
    return [
        {
            'name': name,
            'kind': 'gpt',
            'arguments': [*arguments, '--save', str(work / name / 'ckpt')],
            'result': str(work / name / 'record'),
        }
        for name, arguments in runs.items()
    ]


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """Directory with a checkpoint a run, and 'stock' with those that stock megatron saved."""
    work = tmp_path_factory.mktemp('saved')
    names = [*ONE_RANK, *TWO_RANKS]
    stock = {'stock buckets': BUCKETS, 'stock': SAVED}
    for name in [*names, *stock]:
        (work / name).mkdir()
    fused = {'CPU_MEGATRON_OPTIMIZER': 'fused_adam'}
    two_at_once(
        [
            partial(launch, 1, _tasks(ONE_RANK, work), work / 'one'),
            partial(launch, 1, _tasks(stock, work), work / 's', MEGATRON_OVERLAY='0', **fused),
            partial(launch, 2, _tasks(TWO_RANKS, work), work / 'two'),
        ]
    )
    for name in [*names, *stock]:
        read_records(work / name / 'record')
    return work


def _expected(directory) -> dict[str, int]:
    """Weight to the number of differing elements, computed from whole tensors."""
    tensors = read_tensors(directory)
    prefix = 'optimizer.state.param.'
    found = {}
    for key, main_param in tensors.items():
        if key.startswith(prefix):
            weight = tensors[key.removeprefix(prefix)]
            found[key.removeprefix(prefix)] = int((main_param.to(weight.dtype) != weight).sum())
    return found


@pytest.mark.parametrize('name', ['buckets', 'fp32', 'offload', 'experts', *TWO_RANKS, 'stock'])
def test_right_checkpoints_raise_no_alarm(saved, name):
    directory = find_distributed(saved / name / 'ckpt').directory
    check = check_weights(directory)
    assert not check.different and not check.not_compared
    assert check.compared == len(_expected(directory)) > 10
    expert_bias = [key for key in read_tensors(directory) if key.endswith('router.expert_bias')]
    assert check.without_main_param == expert_bias
    assert bool(expert_bias) == (name == 'experts')


def test_state_of_an_optimizer_that_is_not_distributed(saved):
    check = check_weights(find_distributed(saved / 'not distributed' / 'ckpt').directory)
    assert check.compared > 10 and not check.different


def test_what_stock_megatron_shifts_is_named(saved, capsys):
    directory = find_distributed(saved / 'stock buckets' / 'ckpt').directory
    check = check_weights(directory)
    expected = {weight: found for weight, found in _expected(directory).items() if found}
    assert expected and check.different == expected
    assert main([str(saved / 'stock buckets' / 'ckpt'), '--check-weights']) == 1
    out = capsys.readouterr().out
    for weight, found in expected.items():
        assert f'  {weight}: {found} of ' in out
    assert '--no-load-optim' in out


def test_a_right_checkpoint_on_the_command_line(saved, capsys):
    assert main([str(saved / 'buckets' / 'ckpt'), '--check-weights']) == 0
    assert 'none differ' in capsys.readouterr().out


def test_one_wrong_element_is_found(saved, tmp_path):
    source = find_distributed(saved / 'tensor parallel' / 'ckpt').directory
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    key = 'optimizer.state.param.decoder.layers.self_attention.linear_qkv.weight'
    value = read_tensors(tmp_path)[key][1, 5, 3]
    changed = _replace_once(tmp_path, value, value + 1)
    assert changed
    assert check_weights(tmp_path).different == {key.removeprefix('optimizer.state.param.'): 1}


def _replace_once(directory, old: torch.Tensor, new: torch.Tensor) -> bool:
    for file in directory.glob('*.distcp'):
        content = file.read_bytes()
        if content.count(old.numpy().tobytes()) == 1:
            file.write_bytes(content.replace(old.numpy().tobytes(), new.numpy().tobytes()))
            return True
    return False


def test_state_by_bucket_has_nothing_to_compare(saved, capsys):
    directory = find_distributed(saved / 'dp_reshardable' / 'ckpt').directory
    assert main([str(directory), '--check-weights']) == 1
    assert capsys.readouterr().err == (
        f'error: {directory}: the main parameters are stored as dp_reshardable; '
        f'{conversion_command(str(directory))} puts them together and compares each with its '
        f'weight\n'
    )


def test_a_checkpoint_without_optimizer_state_has_nothing_to_compare(tmp_path):
    write_checkpoint(tmp_path / 'iter_0000003', model_tensors(3))
    with pytest.raises(CheckpointingException, match=': no optimizer state, and so no main param'):
        check_weights(tmp_path / 'iter_0000003')


def test_a_file_that_is_missing(saved, tmp_path):
    source = find_distributed(saved / 'buckets' / 'ckpt').directory
    for file in source.iterdir():
        if file.suffix != '.distcp':
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointingException, match='distcp: No such file'):
        check_weights(tmp_path)


def test_a_main_parameter_that_is_not_all_there(saved, tmp_path):
    source = find_distributed(saved / 'tensor parallel' / 'ckpt').directory
    directory = shutil.copytree(source, tmp_path / 'incomplete')
    metadata = pickle.loads((directory / '.metadata').read_bytes())
    key, entry = next(
        (key, entry)
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith('optimizer.state.param.') and len(entry.chunks) > 1
    )
    entry.chunks.pop()
    (directory / '.metadata').write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointingException, match=f'{re.escape(key)}: .*chunks'):
        check_weights(directory)
