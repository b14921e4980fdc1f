"""From GPT to hybrid and back in real runs: nothing changes, and training goes on as if unmoved."""

import argparse
import io
from dataclasses import dataclass

import numpy
import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict

from tests.cpu_megatron.recorder import read_log
from tests.cpu_megatron.whole_checkpoint import gpt_source, read_objects, read_tensors
from tests.unit_tests.dist_checkpointing.load_runs import LAST_SAVED, launch, schedules

COMMON = [
    *('--ckpt-format=torch_dist', f'--save-interval={LAST_SAVED}'),
    # the padded vocabulary must not depend on the TP size
    *('--make-vocab-size-divisible-by=16', '--vocab-size=63'),
]
DISTRIBUTED = ('--use-distributed-optimizer', '--dist-ckpt-optim-fully-reshardable')
MOE = ['--disable-bias-linear', '--num-experts=4', '--moe-router-topk=2']
UNTIED = '--untie-embeddings-and-output-weights'


@dataclass
class Case:
    """One way there and back; the GPT runs and the hybrid run each have their parallel sizes."""

    ranks: int
    pattern: str
    model: list[str]
    gpt: tuple[str, ...] = ()
    hybrid: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = DISTRIBUTED

    @property
    def same_layout(self) -> bool:
        return self.ranks == 1


TP, PP, EP = (f'--{kind}-model-parallel-size=2' for kind in ('tensor', 'pipeline', 'expert'))
CASES = {
    # the arguments of the hybrid run, its pattern and spec among them, must not reach the GPT run
    'gated': Case(
        1,
        '*-*-',
        ['--swiglu'],
        hybrid=('--spec', 'tests.cpu_megatron.hybrid_spec', 'hybrid_stack_spec'),
        back=('--use-checkpoint-args',),
    ),
    'experts, untied, bf16': Case(1, '*E*E', [*MOE, UNTIED, '--swiglu', '--bf16']),
    'not distributed, bf16': Case(1, '*-*-', ['--bf16'], optimizer=()),
    'tp to pp, tied': Case(2, '*-|*-', [], gpt=(TP,), hybrid=(PP,)),
    'pp to tp, untied, gated': Case(2, '*-*-', [UNTIED, '--swiglu'], gpt=(PP,), hybrid=(TP,)),
    'ep to pp': Case(2, '*E*E', MOE, gpt=(EP,), hybrid=(PP,)),
}

OTHER_SCHEDULE = ('--lr=5e-4', '--weight-decay=0.3')
FINETUNED = ('gated', 'experts, untied, bf16')


@pytest.fixture(scope='module')
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp('round_trip')
    for ranks in (1, 2):
        tasks = []
        for name, case in CASES.items():
            if case.ranks != ranks:
                continue
            there = f'--hybrid-layer-pattern={case.pattern}'
            runs = [
                ('gpt', 'gpt', case.gpt),
                ('hybrid', 'hybrid', [*case.hybrid, there, f'--load={work}/{name}/gpt']),
                ('gpt', 'back', [*case.gpt, *case.back, f'--load={work}/{name}/hybrid']),
            ]
            if name in FINETUNED:
                hybrid = f'{work}/{name}/hybrid'
                runs += [
                    ('gpt', 'finetuned', [*OTHER_SCHEDULE, '--finetune', f'--load={hybrid}']),
                    ('gpt', 'pretrained', [*OTHER_SCHEDULE, f'--pretrained-checkpoint={hybrid}']),
                ]
            (work / name).mkdir()
            for seed, (kind, run, arguments) in enumerate(runs, 1):
                own = [f'--save={work}/{name}/{run}', f'--seed={seed}']
                tasks.append(
                    {
                        'kind': kind,
                        'arguments': [*COMMON, *case.optimizer, *case.model, *arguments, *own],
                        'log': f'{work}/{name}/{run}.log',
                    }
                )
        launch(ranks, tasks, work / f'tasks.{ranks}')
    return work


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('iteration', [3, 6])
def test_the_way_there_and_back_changes_nothing(work, name, iteration):
    gpt, back = (work / name / run / f'iter_000000{iteration}' for run in ('gpt', 'back'))
    source, returned = read_tensors(gpt), read_tensors(back)
    assert source.keys() == returned.keys()
    for key, value in source.items():
        assert torch.equal(value, returned[key]), key
        assert value.dtype == returned[key].dtype, key
    assert sum(key.startswith('optimizer.state.exp_avg_sq.') for key in source) > 10
    objects, returned_objects = read_objects(gpt), read_objects(back)
    assert objects.keys() == returned_objects.keys()
    common, returned_common = load_common_state_dict(gpt), load_common_state_dict(back)
    arguments = common.pop('args'), returned_common.pop('args')
    assert not arguments[1].hybrid_layer_pattern and not arguments[1].spec
    # Megatron loads random state into the same layout only, and sets the rerun state anew. A data
    # loader draws from the random state when it starts, as in any resume.
    with_random_state = CASES[name].same_layout and iteration == LAST_SAVED
    compared = ('decoder', 'rng_state') if with_random_state else ('decoder',)
    del common['rerun_state_machine'], returned_common['rerun_state_machine']
    for key, value in objects.items():
        if key.startswith(compared):
            assert plain(value) == plain(returned_objects[key]), key
    assert plain(returned_common) == plain(common)


@pytest.mark.parametrize('name', CASES)
def test_training_goes_on_as_if_it_had_not_moved(work, name):
    continued = read_log(work / name / 'gpt.log')[LAST_SAVED:]
    assert len(continued) == 3
    assert read_log(work / name / 'back.log') == continued


@pytest.mark.parametrize('name', CASES)
def test_the_hybrid_run_s_own_steps_come_back(work, name):
    # What the way back reads, compared with the way there's independent lookup.
    pattern = CASES[name].pattern.replace('|', '')
    back = read_tensors(work / name / 'back' / 'iter_0000003')
    hybrid = read_tensors(work / name / 'hybrid' / 'iter_0000003')
    for key, value in hybrid.items():
        assert torch.equal(value, gpt_source(back, key, pattern)), key


@pytest.mark.parametrize('name', FINETUNED)
@pytest.mark.parametrize('run', ['finetuned', 'pretrained'])
def test_finetuning_keeps_the_optimizer_state_and_starts_the_schedule(work, name, run):
    hybrid = read_tensors(work / name / 'hybrid' / 'iter_0000003')
    finetuned = read_tensors(work / name / run / 'iter_0000000')
    assert len(hybrid) > len(finetuned)
    for key, value in hybrid.items():
        assert torch.equal(value, gpt_source(finetuned, key, CASES[name].pattern)), key
    # at the beginning of the warm-up; biases and norms have no weight decay
    assert schedules(work / name / 'hybrid' / 'iter_0000003')['max_lr'] == {1e-3}
    assert schedules(work / name / run / 'iter_0000000') == {
        'lr': {0.0},
        'max_lr': {5e-4},
        'weight_decay': {0.3, 0.0},
    }


def plain(value):
    """``value`` in a form whose ``==`` compares everything in it."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    if isinstance(value, argparse.Namespace):
        return plain(vars(value))
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(child) for child in value]
    return value
