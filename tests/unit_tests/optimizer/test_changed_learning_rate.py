"""Resuming with another --lr: the options say whose learning rate counts."""

import math

import pytest

from tests.cpu_megatron.recorder import read_log
from tests.unit_tests.dist_checkpointing.load_runs import launch, schedules
from tests.unit_tests.optimizer import resume_runs

DISTRIBUTED = ['--bf16', '--use-distributed-optimizer', '--dist-ckpt-optim-fully-reshardable']
SAVED = {
    'distributed': DISTRIBUTED,
    'plain': ['--bf16'],
    'fp32': [],
    'hybrid': [*DISTRIBUTED, '--hybrid-layer-pattern=*-*-'],
    'two rates': [*DISTRIBUTED, '--decoupled-lr=5e-3', '--untie-embeddings-and-output-weights'],
}
OVERRIDE, CHECKPOINT = '--override-opt-param-scheduler', '--use-checkpoint-opt-param-scheduler'
HYBRID = ['--hybrid-layer-pattern=*-*-']
RUNS = [  # hybrid into GPT among them
    *((name, 'gpt', option) for name in SAVED for option in (OVERRIDE, CHECKPOINT)),
    ('distributed', 'hybrid', OVERRIDE),
    ('distributed', 'hybrid', CHECKPOINT),
]


def task(work, name, kind, option, *more):
    """A run that goes on from the third iteration with twice the learning rate."""
    arguments = [*SAVED['distributed' if name == 'hybrid' else name], '--lr=2e-3', *more]
    arguments += HYBRID if kind == 'hybrid' else []
    if option == CHECKPOINT:
        arguments += ['--weight-decay=0.1']
    where = f'{name}{kind}{option}'
    arguments += [option, f'--load={work / name}', f'--save={work / where}']
    return {'kind': kind, 'arguments': arguments, 'log': str(work / f'{where}.log')}


@pytest.fixture(scope='module')
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp('lr')
    saving = [
        {
            'kind': 'hybrid' if name == 'hybrid' else 'gpt',
            'arguments': [*options, f'--save={work / name}', '--save-interval=3'],
            'log': str(work / f'{name}.log'),
        }
        for name, options in SAVED.items()
    ]
    launch(1, [*saving, *(task(work, *run) for run in RUNS)], work / 'tasks')
    return work


def rate(max_lr: float, min_lr: float = 1e-4) -> float:
    """Cosine from iteration 2 of 6, after the warmup, at 3."""
    return min_lr + 0.5 * (math.cos(math.pi * 0.25) + 1) * (max_lr - min_lr)


@pytest.mark.parametrize('run', RUNS, ids=' '.join)
def test_the_option_says_whose_rate_counts(work, run):
    name, kind, option = run
    max_lr = 2e-3 if option == OVERRIDE else 1e-3
    decoupled = {5e-3} if name == 'two rates' else set()
    if name != 'fp32':  # its state is stored without a level
        found = schedules(work / f'{name}{kind}{option}' / 'iter_0000003')
        assert found['max_lr'] == {max_lr} | decoupled
        assert found['lr'] == {rate(each) for each in found['max_lr']}
    whole, rest = (read_log(work / f'{log}.log')[-3:] for log in (name, f'{name}{kind}{option}'))
    assert rest[0] == whole[0]
    assert [step['iteration'] for step in rest] == [4, 5, 6]
    if option == CHECKPOINT:
        assert rest == whole
    else:
        assert rest[2]['lm loss'] != whole[2]['lm loss']


@pytest.mark.parametrize('kind', ['gpt', 'hybrid'])
def test_without_an_option_another_rate_is_refused(work, kind, tmp_path):
    arguments = task(work, 'distributed', kind, '')['arguments']
    load = ['--load', str(work / 'distributed')]
    arguments = [
        each for each in arguments if each and '--load=' not in each and '--save=' not in each
    ]
    given = {'name': 'refused', 'kind': kind, 'arguments': [*arguments, *load]}
    resume_runs.launch(1, [given | {'result': str(tmp_path / 'refused')}], tmp_path / 'tasks')
    with pytest.raises(AssertionError) as refusal:
        resume_runs.read_records(tmp_path / 'refused')
    last = str(refusal.value).strip().splitlines()[-1]
    # 0.18 tells groups apart without their rates, and so comes to its scheduler
    assert OVERRIDE in last or 'for learning rate do not match' in last, last
