"""GPT checkpoints that real training wrote, loaded into real hybrid runs."""

from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from tests.cpu_megatron.recorder import read_log
from tests.cpu_megatron.torchrun import two_at_once
from tests.cpu_megatron.whole_checkpoint import gpt_source, read_tensors
from tests.unit_tests.dist_checkpointing.load_runs import LAST_SAVED, launch, schedules

DISTRIBUTED = ['--use-distributed-optimizer', '--dist-ckpt-optim-fully-reshardable']
GATED = ['--swiglu']
UNTIED = ['--untie-embeddings-and-output-weights']
LEARNED = ['--position-embedding-type', 'learned_absolute']
MOE = ['--disable-bias-linear', '--num-experts', '4', '--moe-router-topk', '2']
FOUR_CHUNKS = ['--num-layers=4', '--num-layers-per-virtual-pipeline-stage=1']
OTHER_SCHEDULE = ['--lr=5e-4', '--weight-decay=0.3']
COMMON = [
    *('--ckpt-format', 'torch_dist'),
    # the padded vocabulary must not depend on the TP size
    *('--make-vocab-size-divisible-by', '16', '--vocab-size', '63'),
]
LAST = 6


@dataclass
class Case:
    """One load: layouts are (TP, PP, EP, DP); ``save`` and ``load`` are for one of the runs."""

    pattern: str
    source: tuple[int, int, int, int] = (1, 1, 1, 1)
    target: tuple[int, int, int, int] = (1, 1, 1, 1)
    model: list[str] = field(default_factory=list)
    optimizer: str = 'torch_adam'
    training: list[str] = field(default_factory=lambda: DISTRIBUTED)
    save: list[str] = field(default_factory=list)
    load: list[str] = field(default_factory=list)
    pretrained: bool = False

    @property
    def keeps_reduction_order(self) -> bool:
        return self.source[0] == self.target[0] and self.source[2:] == self.target[2:]


def parallel(layout):
    tp, pp, ep, _ = layout
    sizes = [f'--tensor-model-parallel-size={tp}', f'--pipeline-model-parallel-size={pp}']
    if ep > 1:
        sizes.append(f'--expert-model-parallel-size={ep}')
    if tp > 1 and ep > 1:
        sizes.append('--sequence-parallel')
    return sizes


def world_size(layout):
    tp, pp, _, dp = layout
    return tp * pp * dp


CASES = {
    'same layout': Case('*-*-', model=GATED),
    'fresh layers': Case('M*-M*-', model=GATED),
    'fresh layers, fused adam': Case('M*-M*-', optimizer='fused_adam'),
    'tp to pp, tied': Case('M*-|M*-', (2, 1, 1, 1), (1, 2, 1, 1)),
    'pp to tp, untied': Case('*-*-', (1, 2, 1, 1), (2, 1, 1, 1), model=UNTIED + GATED),
    'four ranks': Case(
        'M*-M*-', (2, 2, 1, 1), (4, 1, 1, 1), model=UNTIED, load=['--mamba-num-groups=4']
    ),
    'bf16, dp 2, fused adam': Case(
        '*-*-',
        (1, 1, 1, 2),
        (1, 1, 1, 2),
        model=GATED,
        optimizer='fused_adam',
        training=[*DISTRIBUTED, '--bf16'],
        load=['--ckpt-fully-parallel-load'],
    ),
    'bf16, torch adam, dp 2 to 1': Case(
        'M*-M*-', (1, 1, 1, 2), (1, 1, 1, 1), training=[*DISTRIBUTED, '--bf16']
    ),
    'finetune, bf16': Case(
        'M*-*-', training=[*DISTRIBUTED, '--bf16'], load=['--finetune', *OTHER_SCHEDULE]
    ),
    'finetune, two rates': Case(
        'M*-*-', model=[*UNTIED, '--decoupled-lr=2e-3'], load=['--finetune']
    ),
    'pretrained, bf16': Case(
        'M*-*-', training=[*DISTRIBUTED, '--bf16'], load=OTHER_SCHEDULE, pretrained=True
    ),
    'not distributed': Case('M*-M*-', training=[], model=GATED),
    'not distributed, bf16': Case('M*-*-', training=['--bf16'], model=UNTIED),
    'not distributed, attention, bf16': Case('*-*-', training=['--bf16']),
    'not distributed, finetune, bf16': Case(
        'M*-*-', training=['--bf16'], load=['--finetune', *OTHER_SCHEDULE]
    ),
    'virtual pipeline': Case('*-|*-|*-|*-', (1, 2, 1, 1), (1, 2, 1, 1), save=FOUR_CHUNKS),
    'virtual pipeline to tp': Case('M*-*-*-*-', (1, 2, 1, 1), (2, 1, 1, 1), save=FOUR_CHUNKS),
    'experts 2 to 1': Case('*EM*E', (1, 1, 2, 2), (1, 1, 1, 1), model=MOE + GATED),
    'experts 1 to 2': Case('*E*E', (1, 1, 1, 1), (1, 1, 2, 2), model=MOE),
    'experts 2 to 4': Case(
        '*E*E', (1, 1, 2, 2), (1, 1, 4, 4), model=[*MOE, *GATED, '--global-batch-size=8']
    ),
    'eight ranks': Case(
        'M*-*-|M*-*-', (1, 2, 1, 2), (2, 2, 1, 2), model=GATED, save=['--num-layers=4']
    ),
    'mtp': Case('*-*-/*-', save=['--mtp-num-layers=1']),
    'model only': Case('M*-*-', model=LEARNED, load=['--no-load-optim', '--no-load-rng']),
}
BY_LAYERS = [*DISTRIBUTED, '--bf16', '--optimizer=muon']
if find_spec('emerging_optimizers'):
    CASES |= {
        'by layers': Case('M*-*-', training=BY_LAYERS, optimizer='fused_adam'),
        'by layers, in one buffer': Case(
            'M*-*-',
            training=[*BY_LAYERS, '--no-use-layer-wise-param-layout'],
            optimizer='fused_adam',
        ),
        'by layers, whatever the format': Case(
            'M*-*-',
            training=[
                *('--use-distributed-optimizer', '--bf16', '--optimizer=muon'),
                '--no-use-layer-wise-param-layout',
            ],
            optimizer='fused_adam',
        ),
    }


@pytest.fixture(scope='module')
def work(tmp_path_factory):
    """Every case's GPT run, then, in fresh processes, every case's hybrid run."""
    work = tmp_path_factory.mktemp('into_hybrid')
    for side in ('source', 'target'):
        launches = {}
        for name, case in CASES.items():
            processes = world_size(getattr(case, side)), case.optimizer
            run = source_run if side == 'source' else target_run
            (work / name).mkdir(exist_ok=True)
            launches.setdefault(processes, []).append(run(case, work / name))
        two_at_once(
            partial(
                launch,
                ranks,
                tasks,
                work / f'{side}.{ranks}.{optimizer}',
                CPU_MEGATRON_OPTIMIZER=optimizer,
            )
            for (ranks, optimizer), tasks in launches.items()
        )
    return work


def source_run(case, path):
    arguments = [
        *(*COMMON, *case.model, *case.training, *case.save, *parallel(case.source)),
        f'--save={path}/gpt',
        f'--save-interval={LAST_SAVED}',
    ]
    return {'kind': 'gpt', 'arguments': arguments, 'log': f'{path}/gpt.log'}


def target_run(case, path):
    arguments = [
        f'--hybrid-layer-pattern={case.pattern}',
        *(*COMMON, *case.model, *case.training, *case.load, *parallel(case.target)),
        f'--{"pretrained-checkpoint" if case.pretrained else "load"}={path}/gpt',
    ]
    files = {'log': f'{path}/hybrid.log', 'record': f'{path}/record'}
    return {'kind': 'hybrid', 'arguments': arguments, **files}


@pytest.mark.parametrize('name', CASES)
def test_weights_and_optimizer_state_arrive(work, name):
    case, path = CASES[name], work / name
    pattern = case.pattern.replace('|', '')
    gpt = read_tensors(path / f'gpt/iter_000000{LAST_SAVED}')
    fresh = read_tensors(path / 'record/fresh/iter_0000001')
    loaded = read_tensors(path / 'record/loaded/iter_0000001')
    model_only = '--no-load-optim' in case.load
    assert_sourced(loaded, gpt, fresh, pattern, with_optimizer=not model_only)

    continued = read_log(path / 'gpt.log')[LAST_SAVED:]
    steps = read_log(path / 'hybrid.log')
    if case.pretrained or '--finetune' in case.load:
        assert [step['iteration'] for step in steps] == list(range(1, LAST + 1))
        found = schedules(path / 'record/loaded/iter_0000001')
        if '--decoupled-lr=2e-3' in case.model:
            assert schedules(path / 'gpt/iter_0000003')['lr'] != {0.0} == found['lr']
            assert found['max_lr'] == {1e-3, 2e-3}
            return
        assert schedules(path / 'gpt/iter_0000003')['max_lr'] == {1e-3}
        # at the beginning of the warm-up; biases and norms have no weight decay
        assert found == {'lr': {0.0}, 'max_lr': {5e-4}, 'weight_decay': {0.3, 0.0}}
        return
    assert [step['iteration'] for step in steps] == list(range(LAST_SAVED + 1, LAST + 1))
    if case.keeps_reduction_order and 'M' not in pattern and not model_only:
        assert steps == continued
    else:
        assert all(step['lm loss'] > 0 for step in steps)


def assert_sourced(loaded, gpt, fresh, pattern, with_optimizer):
    """Every tensor of ``loaded`` equals its source in ``gpt``, or its fresh initialisation."""
    sources = 0
    for key, value in loaded.items():
        expected = gpt_source(gpt, key, pattern) if 'layers' in key or key in gpt else None
        if expected is None and 'final_norm' in key:
            expected = gpt_source(gpt, key, pattern)
        if expected is not None:
            sources += 1
            assert torch.equal(value, expected), key
            # A load that did nothing must not pass: training has moved every source.
            # (bf16 is too coarse for the first steps of norms.)
            if key in fresh and value.dim() > 1:
                assert not torch.equal(value, fresh[key]), key
        elif key in fresh:
            assert torch.equal(value, fresh[key]), key
        elif '.exp_avg' in key or '.momentum_buffer' in key:
            assert not value.any(), key
        else:
            weight = key.partition('fp32_param.')[2] or key.partition('.param.')[2]
            assert torch.equal(value, fresh[weight].float()), key
    assert sources == sum(gpt_has_layers(key, pattern) for key in loaded)
    assert with_optimizer == any('optimizer.' in key for key in loaded)


def gpt_has_layers(key, pattern):
    parts = key.split('decoder.layers.')
    return len(parts) == 1 or pattern[int(parts[1].split('.')[0])] != 'M'
