"""A GPT checkpoint into a hybrid run whose optimizer is offloaded to host memory."""

import re
from functools import partial

import pytest
import torch

from tests.cpu_megatron import ON_GPU
from tests.cpu_megatron.torchrun import two_at_once
from tests.unit_tests.optimizer.resume_runs import launch, read_records

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


ADAMS = ('torch_adam', 'fused_adam')


@pytest.fixture(scope='module')
def on_cpu(tmp_path_factory) -> dict[str, dict]:
    """The records with each Adam."""
    work = {adam: tmp_path_factory.mktemp(adam) for adam in ADAMS}
    two_at_once(partial(_launch, path, CPU_MEGATRON_OPTIMIZER=adam) for adam, path in work.items())
    return {adam: _records(path) for adam, path in work.items()}


@pytest.fixture(scope='module')
def on_gpu(tmp_path_factory) -> dict[str, dict]:
    work = tmp_path_factory.mktemp('gpu')
    _launch(work, CPU_MEGATRON_OPTIMIZER='fused_adam', **ON_GPU)
    return {'gpu': _records(work)}


@pytest.fixture(params=[*ADAMS, pytest.param('gpu', marks=pytest.mark.gpu)])
def records(request) -> dict[str, dict]:
    where = 'on_gpu' if request.param == 'gpu' else 'on_cpu'
    return request.getfixturevalue(where)[request.param]


def _runs(work) -> dict[str, list[str]]:
    load = ['--load', str(work / 'gpt')]
    return {
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


def _launch(work, **env: str) -> None:
    tasks = [
        {'name': name, 'kind': run[0], 'arguments': run[1:], 'result': str(work / name)}
        for name, run in _runs(work).items()
    ]
    launch(1, tasks, work / 'tasks', **env)


def _records(work) -> dict[str, dict]:
    return {name: read_records(work / name)[0] for name in _runs(work)}


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
