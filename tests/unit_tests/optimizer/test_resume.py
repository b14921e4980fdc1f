"""A run that stops and resumes against one that doesn't, through real save_ and load_checkpoint."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.cpu_megatron import ON_GPU
from tests.cpu_megatron.torchrun import two_at_once
from tests.unit_tests.optimizer.resume_runs import launch, read_records, whole_tensors

ADAMS = ('torch_adam', 'fused_adam')
FORMATS = {
    'dp_reshardable': [],
    'fully_reshardable': ['--dist-ckpt-optim-fully-reshardable'],
}
LEGACY = {'legacy': ['--ckpt-format', 'torch']}
PLAIN = ['--bf16', '--use-distributed-optimizer']
# buckets of experts and of the other parameters
MOE = ['--num-experts', '4', '--overlap-grad-reduce', '--ddp-bucket-size', '4000']
# megatron-core can't save buckets that end in less than the 64 elements it aligns parameters to
VIRTUAL = [
    *('--hidden-size', '64', '--ffn-hidden-size', '128'),
    *('--num-layers', '4', '--num-layers-per-virtual-pipeline-stage', '1'),
    *('--pipeline-model-parallel-size', '2'),
]


def offload(fraction: float) -> list[str]:
    return [
        '--use-precision-aware-optimizer',
        '--optimizer-cpu-offload',
        *('--optimizer-offload-fraction', str(fraction)),
    ]


OPTIONS = {
    'plain': PLAIN,
    'offload 0.5': PLAIN + offload(0.5),
    'offload 1.0': PLAIN + offload(1.0),
    'moe buckets': PLAIN + MOE,
    'moe buckets offload 0.5': PLAIN + MOE + offload(0.5),
}
OF_TWO_RANKS = {'virtual pipeline offload 0.5': PLAIN + VIRTUAL + offload(0.5)}
CASES = [
    *((1, sharding_type, name) for sharding_type in FORMATS for name in OPTIONS),
    *((2, sharding_type, name) for sharding_type in FORMATS for name in ('plain', 'offload 0.5')),
    (2, 'dp_reshardable', 'moe buckets offload 0.5'),
    *((2, sharding_type, name) for sharding_type in FORMATS for name in OF_TWO_RANKS),
]
RESHARDED = ('plain', 'offload 0.5')
CASES += [(nproc, 'legacy', name) for nproc in (1, 2) for name in RESHARDED]
SWITCHED = [(1, sharding_type, 'plain') for sharding_type in FORMATS]
FRESH = [(1, sharding_type, 'offload 0.5') for sharding_type in FORMATS]


def arguments(nproc: int, sharding_type: str, name: str) -> list[str]:
    experts = ['--expert-model-parallel-size', str(nproc)] if 'moe' in name else []
    return (OPTIONS | OF_TWO_RANKS)[name] + (FORMATS | LEGACY)[sharding_type] + experts


class Runs:
    """The runs of all cases, and what became of them; ``work`` is kept until the end."""

    def __init__(self, work: Path, adam: str):
        self.work = work
        self.adam = adam

    def path(self, kind: str, *case) -> Path:
        return self.work / '-'.join([kind, *map(str, case)]).replace(' ', '_')

    def launch(self, nproc: int, tasks: list[dict], **env: str) -> None:
        file = self.work / f'tasks-{tasks[0]["name"]}-{nproc}.json'
        launch(nproc, tasks, file, CPU_MEGATRON_OPTIMIZER=self.adam, **env)

    def result(self, kind: str, *case) -> list[dict]:
        """The record of each rank."""
        return read_records(self.path(kind, *case))

    def start(self, *case) -> list[dict]:
        """Six iterations with a save after three, and the last three again from there."""
        given, checkpoints = arguments(*case), self.path('checkpoints', *case)
        return [
            {
                'name': 'whole',
                'kind': 'gpt',
                'arguments': [*given, '--save', str(checkpoints), '--save-interval', '3'],
                'result': str(self.path('whole', *case)),
            },
            self.resume('rest', *case),
        ]

    def resume(self, kind: str, *case, saved_in: Path | None = None) -> dict:
        checkpoints = (saved_in or self.work) / self.path('checkpoints', *case).name
        return {
            'name': kind,
            'kind': 'gpt',
            'arguments': [*arguments(*case), '--load', str(checkpoints)],
            'result': str(self.path(kind, *case)),
        }


STOCK = [(1, sharding_type, 'offload 0.5') for sharding_type in FORMATS]


@pytest.fixture(scope='module')
def all_runs(tmp_path_factory) -> dict[str, Runs]:
    """The runs with each Adam, and 'stock': those that stock megatron saved."""
    adams = [Runs(tmp_path_factory.mktemp(adam), adam) for adam in ADAMS]
    stock = Runs(tmp_path_factory.mktemp('stock'), 'fused_adam')
    whole, rest = zip(*(stock.start(*case) for case in STOCK), strict=True)
    two_at_once(
        [
            *(partial(runs.launch, 1, _started(runs, 1)) for runs in adams),
            partial(stock.launch, 1, list(whole), MEGATRON_OVERLAY='0'),
            *(partial(runs.launch, 2, _started(runs, 2) + _resharded(runs, 1)) for runs in adams),
        ]
    )
    # in fresh processes, which have nothing in common with those that saved but the files
    fresh = [
        partial(runs.launch, 1, _fresh(runs) + _resharded(runs, 2) + _switched(runs, other))
        for runs, other in zip(adams, reversed(adams), strict=True)
    ]
    two_at_once([*fresh, partial(stock.launch, 1, list(rest))])
    return {runs.adam: runs for runs in adams} | {'stock': stock}


@pytest.fixture(params=ADAMS)
def runs(request, all_runs) -> Runs:
    return all_runs[request.param]


def _started(runs: Runs, nproc: int) -> list[dict]:
    return [task for case in CASES if case[0] == nproc for task in runs.start(*case)]


def _fresh(runs: Runs) -> list[dict]:
    return [runs.resume('fresh', *case) for case in FRESH]


def _switched(runs: Runs, other: Runs) -> list[dict]:
    return [runs.resume('switched', *case, saved_in=other.work) for case in SWITCHED]


def _resharded(runs: Runs, saved_by: int) -> list[dict]:
    return [
        runs.resume('resharded', saved_by, sharding_type, name)
        for sharding_type in FORMATS
        for name in RESHARDED
    ]


def equal(expected: dict, found: dict) -> None:
    assert expected.keys() == found.keys()
    wrong = [key for key, value in expected.items() if not torch.equal(value, found[key])]
    assert not wrong


def case_id(case: tuple) -> str:
    return '-'.join(map(str, case))


def goes_on(runs: Runs, kind: str, *case) -> None:
    """Compare the run that went on from the third iteration with the one that didn't stop."""
    for whole, rest in zip(runs.result('whole', *case), runs.result(kind, *case), strict=True):
        assert [step['iteration'] for step in rest['steps']] == [4, 5, 6]
        assert rest['steps'] == whole['steps'][3:]
        equal(whole['optimizer'], rest['optimizer'])
        equal(whole['model'], rest['model'])


@pytest.mark.parametrize('case', CASES, ids=case_id)
def test_the_next_steps_are_those_of_the_run_that_did_not_stop(runs, case):
    goes_on(runs, 'rest', *case)


@pytest.mark.parametrize('case', FRESH, ids=case_id)
def test_in_a_fresh_process(runs, case):
    goes_on(runs, 'fresh', *case)


@pytest.mark.parametrize('case', STOCK, ids=case_id)
def test_a_checkpoint_of_stock_megatron(all_runs, case):
    goes_on(all_runs['stock'], 'rest', *case)


@pytest.mark.parametrize('case', SWITCHED, ids=case_id)
def test_the_other_adam_goes_on(runs, all_runs, case):
    (adam,) = set(ADAMS) - {runs.adam}
    (saved,), (loaded,) = all_runs[adam].result('rest', *case), runs.result('switched', *case)
    assert [step['iteration'] for step in loaded['steps']] == [4, 5, 6]
    assert loaded['steps'][0] == saved['steps'][0]
    of_both = ('.param', '.exp_avg', '.exp_avg_sq')
    expected, found = (
        {k: shard for k, (_, shard) in record['loaded'].items() if k.endswith(of_both)}
        for record in (saved, loaded)
    )
    equal(expected, found)


@pytest.fixture(scope='module')
def gpu_runs(tmp_path_factory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp('gpu'), 'fused_adam')
    runs.launch(1, _started(runs, 1), **ON_GPU)
    return runs


@pytest.mark.gpu
@pytest.mark.parametrize('case', [case for case in CASES if case[0] == 1], ids=case_id)
def test_on_a_gpu(gpu_runs, case):
    goes_on(gpu_runs, 'rest', *case)


@pytest.mark.parametrize('name', RESHARDED)
@pytest.mark.parametrize('sharding_type', FORMATS)
@pytest.mark.parametrize('saved_by', [1, 2])
def test_another_data_parallel_size_loads_the_same_state(runs, saved_by, sharding_type, name):
    case = (saved_by, sharding_type, name)
    expected = whole_tensors(runs.result('rest', *case))
    found = whole_tensors(runs.result('resharded', *case))
    if 'offload' in name and runs.adam == 'fused_adam':
        # another part of the parameters is in host memory, and only there a parameter has steps
        expected, found = (
            {k: v for k, v in state.items() if not k.endswith('.step')}
            for state in (expected, found)
        )
    equal(expected, found)
    states = {key.rpartition('.')[2] for key in expected}
    assert {'param', 'exp_avg', 'exp_avg_sq'} <= states
    if 'offload' in name:
        assert {'inner', 'master_param'} <= states
