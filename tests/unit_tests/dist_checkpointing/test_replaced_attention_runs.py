"""GPT checkpoints that real training wrote, loaded into real hybrid runs of fewer attention layers.

What the runs hold and compute is compared with a hybrid checkpoint that is put together here, from
the GPT's tensors and the hybrid model's initialisation.
"""

import re
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save

from tests.cpu_megatron.recorder import read_log
from tests.cpu_megatron.torchrun import two_at_once
from tests.cpu_megatron.whole_checkpoint import read_objects, read_tensors
from tests.unit_tests.dist_checkpointing.load_runs import LAST_SAVED, launch
from tests.unit_tests.dist_checkpointing.test_gpt_checkpoint_into_hybrid_run import (
    COMMON,
    DISTRIBUTED,
    GATED,
    MOE,
    UNTIED,
    parallel,
    world_size,
)

ITERATION = f'iter_000000{LAST_SAVED}'
REPLACE = '--replace-gpt-attention'
WARM = '--init-mamba-from-attention'
HEADS, CHANNELS = 4, 8
AS_ATTENTION = [f'--mamba-num-heads={HEADS}', f'--mamba-num-groups={HEADS}']
GROUPED = ['--group-query-attention', '--num-query-groups=2']
DELTA_NET = [
    *('--linear-num-key-heads=2', '--linear-num-value-heads=4'),
    *('--linear-key-head-dim=8', '--linear-value-head-dim=8'),
]
BF16 = [*DISTRIBUTED, '--bf16']


@dataclass
class Case:
    """One load: layouts are (TP, PP, EP, DP); ``save`` and ``load`` are for one of the runs."""

    pattern: str
    source: tuple[int, int, int, int] = (1, 1, 1, 1)
    target: tuple[int, int, int, int] = (1, 1, 1, 1)
    model: list[str] = field(default_factory=list)
    training: list[str] = field(default_factory=lambda: DISTRIBUTED)
    save: list[str] = field(default_factory=list)
    load: list[str] = field(default_factory=list)
    warm: bool = False

    @property
    def symbols(self) -> str:
        return self.pattern.replace('|', '')

    @property
    def gpt_layers(self) -> int:
        return sum(symbol in '-E' for symbol in self.pattern)


def warm(pattern: str, *layouts, **options) -> Case:
    options['load'] = [WARM, *AS_ATTENTION, *options.pop('load', [])]
    return Case(pattern, *layouts, warm=True, **options)


CASES = {
    'one of two': Case('M-*-M-*-', model=GATED),
    'tp 2 to 1': Case('M-M*-M-*-', (2, 1, 1, 1), (1, 1, 1, 1)),
    'tp 1 to 2': Case('M-*-M-*-', (1, 1, 1, 1), (2, 1, 1, 1), model=UNTIED),
    'pp 2 to 1': Case('M-*-M-*-', (1, 2, 1, 1), (1, 1, 1, 1)),
    'pp 1 to 2, the first stage without attention': Case(
        'M-M-|MM-*-', (1, 1, 1, 1), (1, 2, 1, 1), training=BF16
    ),
    'experts 2 to 1': Case('ME*E', (1, 1, 2, 2), (1, 1, 1, 1), model=MOE + GATED),
    'experts 1 to 2': Case('ME*E', (1, 1, 1, 1), (1, 1, 2, 2), model=MOE),
    'no attention left': Case('M-M-', training=[]),
    'nothing in its place': Case('*--', training=['--bf16']),
    'layers of their own': Case('M-*E', model=MOE, save=['--moe-layer-freq=[0,1]']),
    'delta nets': Case('G-*-M*G-', model=GATED, load=DELTA_NET),
    'delta nets, tp 2': Case('G-*-', (1, 1, 1, 1), (2, 1, 1, 1), model=GATED, load=DELTA_NET),
    'warm': warm('M-*-M-*-', model=GATED),
    'warm, tp 2 to 1, shared keys': warm('M-*-', (2, 1, 1, 1), (1, 1, 1, 1), model=GROUPED),
    'warm, tp 1 to 2, shared keys': warm(
        'M-*-', (1, 1, 1, 1), (2, 1, 1, 1), model=GROUPED, training=BF16
    ),
    'warm, pp 1 to 2': warm('M-*-|M-*-', (1, 1, 1, 1), (1, 2, 1, 1), training=BF16),
    'warm, all, not distributed': warm('M-M-', model=GROUPED, training=['--bf16']),
    'warm, dp 2': warm('M-M*-M-', (1, 1, 1, 2), (1, 1, 1, 2), training=BF16),
    'warm, RMS norms': warm('M-*-', model=['--normalization=RMSNorm', '--disable-bias-linear']),
    'warm, layers of their own': warm('M-ME', model=MOE, save=['--moe-layer-freq=[0,1]']),
    'warm, model only': warm('M-*-', load=['--no-load-optim'], training=BF16),
}


@pytest.fixture(scope='module')
def work(tmp_path_factory):
    """Every case's GPT run, the hybrid runs that load it, and those of checkpoints made by hand."""
    work = tmp_path_factory.mktemp('replaced')
    for run in (source_run, recorded_run, saved_run, run_of_checkpoint_by_hand):
        launches = {}
        for name, case in CASES.items():
            (work / name).mkdir(exist_ok=True)
            ranks = world_size(case.source if run is source_run else case.target)
            launches.setdefault(ranks, []).append(run(case, work / name))
        two_at_once(
            partial(launch, ranks, tasks, work / f'{run.__name__}.{ranks}')
            for ranks, tasks in launches.items()
        )
    return work


def source_run(case, path):
    arguments = [
        f'--num-layers={case.gpt_layers}',
        *(*COMMON, *case.model, *case.training, *case.save, *parallel(case.source)),
        f'--save={path}/gpt',
        f'--save-interval={LAST_SAVED}',
    ]
    return {'kind': 'gpt', 'arguments': arguments, 'log': f'{path}/gpt.log'}


def recorded_run(case, path):
    arguments = [*target_arguments(case), f'--load={path}/gpt', REPLACE]
    files = {'log': f'{path}/hybrid.log', 'record': f'{path}/record'}
    return {'kind': 'hybrid', 'arguments': arguments, **files}


def saved_run(case, path):
    task = recorded_run(case, path)
    del task['record']
    return task | {'arguments': [*task['arguments'], f'--save={path}/template']}


def run_of_checkpoint_by_hand(case, path):
    put_together(case, path)
    arguments = [*target_arguments(case), f'--load={path}/by_hand', f'--save={path}/again']
    return {'kind': 'hybrid', 'arguments': arguments, 'log': f'{path}/by_hand.log'}


def target_arguments(case):
    return [
        f'--hybrid-layer-pattern={case.pattern}',
        *(*COMMON, *case.model, *case.training, *case.load, *parallel(case.target)),
    ]


def put_together(case: Case, path: Path) -> None:
    """``path/by_hand``: of a hybrid checkpoint the other state, and tensors that are made here."""
    template, target = path / 'template' / ITERATION, path / 'by_hand' / ITERATION
    state = expected_tensors(case, path) | read_objects(template)
    target.mkdir(parents=True)
    as_it_is = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    save(state, storage_writer=FileSystemWriter(target), planner=as_it_is, no_dist=True)
    for file in template.iterdir():
        if file.suffix in ('.json', '.pt'):
            shutil.copy(file, target)


def expected_tensors(case: Case, path: Path) -> dict[str, torch.Tensor]:
    """Every tensor that the hybrid run has to hold after the load."""
    gpt = read_tensors(path / 'gpt' / ITERATION)
    fresh = read_tensors(path / 'record/fresh/iter_0000001')
    keys = read_tensors(path / 'template' / ITERATION)
    return {key: expected(key, value, gpt, fresh, case) for key, value in keys.items()}


def expected(key, value, gpt, fresh, case):
    match = re.fullmatch(r'((?:chained_\d+\.)?optimizer\.state\.(\w+)\.)?(.+)', key)
    prefix, state, name = match[1] or '', match[2], match[3]
    is_weight = state in (None, 'param', 'fp32_param')
    if '--no-load-optim' in case.load:
        if not is_weight:
            return torch.zeros_like(value)
        prefix = ''  # main parameters are made of the weights
    found = source(prefix, name, gpt, case, is_weight)
    if found is not None:
        return found.to(value.dtype)
    return fresh[name].to(value.dtype) if is_weight else torch.zeros_like(value)


def source(prefix, name, gpt, case, is_weight):
    """What ``name`` begins with, in the GPT checkpoint; None where it has no source there."""
    layer = re.fullmatch(r'decoder\.layers\.(\d+)\.(.+)', name)
    if layer is None:
        return gpt[prefix + name.replace('decoder.final_norm.', 'decoder.final_layernorm.')]
    index, part = int(layer[1]), layer[2]
    symbol, gpt_layer = case.symbols[index], len(re.findall('[-E]', case.symbols[:index]))

    def of_gpt(part):
        if f'{prefix}decoder.layers.{gpt_layer}.{part}' in gpt:
            return gpt[f'{prefix}decoder.layers.{gpt_layer}.{part}']
        return gpt[f'{prefix}decoder.layers.{part}'][gpt_layer]

    if symbol in '*-E':
        return of_gpt(part)
    block = re.split('[-E]', case.symbols)[gpt_layer]
    if not (case.warm and symbol == 'M' and is_weight) or '*' in block:
        return None
    if part.startswith('norm.'):
        return of_gpt(part.replace('norm.', 'self_attention.linear_qkv.layer_norm_'))
    if part == 'mixer.out_proj.weight':
        return of_gpt('self_attention.linear_proj.weight')
    if part[:-1] == 'mixer.in_proj.weight.' and part[-1] in 'xBC':
        return rows_of_attention(of_gpt('self_attention.linear_qkv.weight'), part[-1], case)
    return None


def rows_of_attention(qkv, which, case):
    """Rows that each head of the attention computes its queries, keys or values with."""
    heads_per_group = 2 if GROUPED[0] in case.model else 1
    rows = []
    for head in range(HEADS):
        group, member = divmod(head, heads_per_group)
        place = {'C': member, 'B': heads_per_group, 'x': heads_per_group + 1}[which]
        first = (group * (heads_per_group + 2) + place) * CHANNELS
        rows += [qkv[row] for row in range(first, first + CHANNELS)]
    return torch.stack(rows)


@pytest.mark.parametrize('name', CASES)
def test_weights_and_optimizer_state_arrive(work, name):
    case, path = CASES[name], work / name
    loaded, wanted = read_tensors(path / 'template' / ITERATION), expected_tensors(case, path)
    for key, value in loaded.items():
        assert torch.equal(value, wanted[key]), key
    fresh = read_tensors(path / 'record/fresh/iter_0000001')
    moved = [key for key in fresh if not torch.equal(fresh[key], wanted[key])]
    assert any('.mlp.' in key for key in moved)
    assert any('.mixer.' in key for key in moved) == case.warm
    assert any('.self_attention.' in key for key in moved) == ('*' in case.pattern)


@pytest.mark.parametrize('name', CASES)
def test_the_next_steps_are_those_of_a_checkpoint_made_by_hand(work, name):
    steps, by_hand = (read_log(work / name / f'{log}.log') for log in ('hybrid', 'by_hand'))
    assert len(steps) == 3 and steps == by_hand


@pytest.mark.parametrize('name', ['one of two', 'warm'])
def test_a_wrong_block_is_seen(work, name):
    """Every GPT layer has weights of its own, so that those of another one differ."""
    case, path = CASES[name], work / name
    loaded = read_tensors(path / 'template' / ITERATION)
    of_first = [key for key in loaded if key.startswith('decoder.layers.2.self_attention.linear')]
    gpt = read_tensors(path / 'gpt' / ITERATION)
    for key in of_first:
        stacked = gpt[key.replace('.2.', '.')]
        same = [torch.equal(loaded[key], layer) for layer in stacked]
        assert same == [False, True, False, False], key
    assert of_first and case.symbols[2] == '*'
