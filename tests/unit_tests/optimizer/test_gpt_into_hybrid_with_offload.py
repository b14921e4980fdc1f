"""A GPT checkpoint into a hybrid run whose optimizer is offloaded to host memory."""

import json
import re

import pytest
import torch

from tests.cpu_megatron.torchrun import torchrun

PATTERN = 'M*-M*-'
OFFLOAD = [
    *('--bf16', '--use-distributed-optimizer', '--dist-ckpt-optim-fully-reshardable'),
    *('--use-precision-aware-optimizer', '--optimizer-cpu-offload'),
]
# all in host memory: another split would step some parameters with the other Adam, which rounds
# differently
ALL = [*OFFLOAD, '--optimizer-offload-fraction', '1.0']
HALF = [*OFFLOAD, '--optimizer-offload-fraction', '0.5']
WEIGHTS = ['--no-load-optim', '--no-load-rng']


@pytest.fixture(scope='module', params=['torch_adam', 'fused_adam'])
def records(request, tmp_path_factory):
    work = tmp_path_factory.mktemp('hybrid')
    load = ['--load', str(work / 'gpt')]
    runs = {
        'gpt': ['gpt', *ALL, '--save', str(work / 'gpt'), '--save-interval', '3'],
        'attention': ['hybrid', *ALL, *load, '--hybrid-layer-pattern', '*-*-'],
        'mamba': ['hybrid', *HALF, *load, '--hybrid-layer-pattern', PATTERN],
        'gpt state': ['gpt', *HALF, *load],
        **{
            f'weights {seed}': [
                *('hybrid', *HALF, *load, *WEIGHTS),
                *('--hybrid-layer-pattern', '*-*-', '--seed', seed),
            ]
            for seed in ('1', '2')
        },
    }
    tasks = [
        {'name': name, 'kind': run[0], 'arguments': run[1:], 'result': str(work / name)}
        for name, run in runs.items()
    ]
    (work / 'tasks').write_text(json.dumps(tasks))
    torchrun(
        1,
        'tests.unit_tests.optimizer.resume_runs',
        str(work / 'tasks'),
        env={'CPU_MEGATRON_OPTIMIZER': request.param},
    )
    records = {name: torch.load(work / f'{name}.0') for name in runs}
    failed = [record for record in records.values() if isinstance(record, str)]
    assert not failed, failed[0]
    return records


def test_with_optimizer_state_it_goes_on_as_the_gpt_run(records):
    assert records['attention']['steps'] == records['gpt']['steps'][3:]


def test_without_optimizer_state_the_first_step_starts_from_the_loaded_weights(records):
    first, second = records['weights 1'], records['weights 2']
    assert len(first['steps']) == 3
    assert first['steps'] == second['steps']
    for key, value in first['model'].items():
        assert torch.equal(value, second['model'][key]), key


def _hybrid_name(key: str) -> str:
    match = re.match(r'(.*decoder\.layers\.)(\d+)\.(.*)', key)
    if not match:
        return key.replace('final_layernorm', 'final_norm')
    prefix, layer, rest = match.groups()
    symbol = '-' if 'mlp' in rest else '*'
    places = [place for place, found in enumerate(PATTERN) if found == symbol]
    return f'{prefix}{places[int(layer)]}.{rest}'


def test_loaded_and_fresh_layers(records):
    gpt, hybrid = records['gpt state']['loaded'], records['mamba']['loaded']
    sourced = {_hybrid_name(key): value for key, (_, value) in gpt.items()}
    compared = [key for key in sourced if not key.endswith('.step')]
    assert any(key.endswith('.inner') for key in compared)
    for key in compared:
        assert torch.equal(hybrid[key][1], sourced[key]), key

    fresh = {key: value for key, (_, value) in hybrid.items() if key not in sourced}
    fresh = {key: value for key, value in fresh.items() if '.mixer.' in key or '.norm.' in key}
    assert fresh
    for key, value in fresh.items():
        name, _, state = key.rpartition('.')
        if state in ('exp_avg', 'exp_avg_sq'):
            assert not value.any(), key
        elif state == 'inner':
            assert torch.equal(value, hybrid[f'{name}.param'][1].float()), key
            assert torch.equal(value, hybrid[f'{name}.master_param'][1]), key
    weights = [value for key, value in fresh.items() if key.endswith('in_proj.weight.inner')]
    assert len(weights) == 2 and all(value.any() for value in weights)
