"""Conversion of what real runs saved, against the same step saved ``fully_reshardable``."""

from pathlib import Path

import pytest
import torch

from tests.unit_tests.optimizer.resume_runs import launch, read_records
from tests.unit_tests.tools.checkpoint.optimizer_twins import STEPS, differences, make_twins
from tools.checkpoint.convert_ckpt_optimizer import convert_optimizer

TP2 = ['--tensor-model-parallel-size', '2']
PP2 = ['--pipeline-model-parallel-size', '2']
EP2 = ['--num-experts', '4', '--expert-model-parallel-size', '2']
BUCKETS = ['--overlap-grad-reduce', '--ddp-bucket-size', '4000']
UNTIED = ['--untie-embeddings-and-output-weights']
VIRTUAL = [
    *('--hidden-size', '64', '--ffn-hidden-size', '128', '--num-layers', '4'),
    *('--num-layers-per-virtual-pipeline-stage', '1'),
]
OFFLOAD = [
    *('--use-precision-aware-optimizer', '--optimizer-cpu-offload'),
    *('--optimizer-offload-fraction', '0.5'),
]
CASES = {
    'fp32, plain MLP': (1, []),
    'fp16': (1, ['--fp16', '--initial-loss-scale', '128']),
    'learned positions, no biases': (
        1,
        ['--bf16', '--position-embedding-type', 'learned_absolute', '--disable-bias-linear'],
    ),
    'offload': (1, ['--bf16', *OFFLOAD]),
    'MTP': (1, ['--bf16', '--mtp-num-layers', '1']),
    'experts among the others': (1, ['--bf16', '--swiglu', '--num-experts', '4']),
    'TP 2, untied': (2, [*TP2, *UNTIED]),
    'TP 2, grouped queries': (
        2,
        ['--bf16', *TP2, '--group-query-attention', '--num-query-groups', '2', '--qk-layernorm'],
    ),
    'TP 4': (4, ['--bf16', '--swiglu', '--tensor-model-parallel-size', '4']),
    'PP 2, tied': (2, ['--bf16', '--swiglu', *PP2]),
    'PP 2, untied': (2, ['--bf16', *PP2, *UNTIED]),
    'PP 2, VPP 2': (2, ['--bf16', *PP2, *VIRTUAL]),
    'TP 2, PP 2': (4, ['--bf16', '--swiglu', *TP2, *PP2]),
    'EP 2': (2, ['--bf16', '--swiglu', *EP2]),
    'EP 2, buckets, experts in two possible orders': (2, ['--bf16', *EP2, *BUCKETS]),
    'DP 2, buckets': (2, ['--bf16', *BUCKETS]),
    'DP 4': (4, ['--bf16', '--swiglu', '--global-batch-size', '8']),
    'hybrid': (1, ['--bf16']),
    'hybrid, TP 2': (2, ['--bf16', *TP2, '--normalization', 'RMSNorm']),
}


@pytest.mark.parametrize('name', CASES)
def test_equals_the_twin(tmp_path, name):
    nproc, arguments = CASES[name]
    kind = 'hybrid' if 'hybrid' in name else 'gpt'
    twins = make_twins(tmp_path, nproc, *arguments, kind=kind)
    result = convert_optimizer(twins.in_buckets, tmp_path / 'out', verify=True)
    assert differences(tmp_path / 'out', twins.by_parameter) == []
    assert result.proven == result.elements + result.copies
    assert result.different_copies == {}


LAYOUTS = {
    'PP 2': (2, 'gpt', PP2),
    'DP 2': (2, 'gpt', []),
    'one rank': (1, 'gpt', []),
    'hybrid': (1, 'hybrid', []),
}


def resume(work, nproc, kind, roots, arguments, **env):
    """The records of three more steps from each of the checkpoints."""
    tasks = [
        {
            'name': str(root),
            'kind': kind,
            'arguments': [
                *(*arguments, '--no-load-rng', '--override-opt-param-scheduler'),
                *('--load', str(root), '--train-iters', str(2 * STEPS)),
            ],
            'result': str(work / f'{number}.record'),
        }
        for number, root in enumerate(roots)
    ]
    launch(nproc, tasks, work / 'tasks.json', **env)
    return [read_records(Path(task['result'])) for task in tasks]


@pytest.fixture(scope='module')
def resumed(tmp_path_factory):
    """The records of three more steps in other layouts, from the converted and from the twin."""
    work = tmp_path_factory.mktemp('resumed')
    common = ['--bf16', '--swiglu', '--use-distributed-optimizer']
    twins = make_twins(work, 2, *common, *TP2)
    convert_optimizer(twins.in_buckets, work / 'out')
    records = {}
    for name, (nproc, kind, arguments) in LAYOUTS.items():
        roots = (work / 'out', twins.by_parameter)
        records[name] = resume(work, nproc, kind, roots, [*common, *arguments])
    return records


@pytest.mark.parametrize('name', LAYOUTS)
def test_next_steps_in_another_layout(resumed, name):
    assert_same_steps(*resumed[name])


def assert_same_steps(records, others):
    for ours, twin in zip(records, others, strict=True):
        assert [step['iteration'] for step in ours['steps']] == [4, 5, 6]
        assert ours['steps'] == twin['steps']
        for part in ('model', 'optimizer', 'loaded'):
            assert ours[part].keys() == twin[part].keys()
            assert ours[part]
            assert all(_equal(ours[part][key], twin[part][key]) for key in ours[part])


def _equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one[0] == other[0] and torch.equal(one[1], other[1])


FUSED = {'CPU_MEGATRON_OPTIMIZER': 'fused_adam'}


def test_convention_of_fused_adam_and_stock_core(tmp_path):
    """Stock can't load into torch AdamW in a new process."""
    common = ['--bf16', '--swiglu', '--use-distributed-optimizer', *UNTIED]
    twins = make_twins(tmp_path, 2, *common, *TP2, **FUSED)
    convert_optimizer(twins.in_buckets, tmp_path / 'out')
    roots = (tmp_path / 'out', twins.by_parameter)
    assert differences(*roots) == []
    assert_same_steps(*resume(tmp_path, 1, 'gpt', roots, common, MEGATRON_OVERLAY='0', **FUSED))
