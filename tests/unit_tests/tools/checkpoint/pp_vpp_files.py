"""Looking into rank files for the converter's tests, without the converter's own code."""

import argparse
import re
from pathlib import Path

import torch

from tools.checkpoint.convert_ckpt_pp_vpp import main

ITERATION = 'iter_0000002'
TRACKER = 'latest_checkpointed_iteration.txt'
MERGE = 'merge --load-dir SRC --save-dir OUT --pipeline-size 2'


def load(root, rank, iteration=ITERATION):
    """A rank file; ``rank`` is what follows ``mp_rank_``."""
    path = Path(root) / iteration / f'mp_rank_{rank}' / 'model_optim_rng.pt'
    return torch.load(path, weights_only=False)


def save(state, root, rank, iteration=ITERATION):
    """Replace a rank file."""
    path = Path(root) / iteration / f'mp_rank_{rank}' / 'model_optim_rng.pt'
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


def tree(root):
    """Every path below a directory."""
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob('*'))


def same(one, other, path='') -> list[str]:
    """Paths at which two nested values differ; tensors are compared bit by bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        equal = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        return [] if equal else [path]
    if isinstance(one, argparse.Namespace) and isinstance(other, argparse.Namespace):
        return same(vars(one), vars(other), f'{path}.args')
    if isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other) and set(one) != set(other):
            return [f'{path}: keys {set(one) ^ set(other)}']
        return [d for key in one for d in same(one[key], other[key], f'{path}.{key}')]
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        if len(one) != len(other):
            return [f'{path}: length']
        return [
            d
            for i, (a, b) in enumerate(zip(one, other, strict=True))
            for d in same(a, b, f'{path}[{i}]')
        ]
    if type(one) is not type(other):
        return [f'{path}: {type(one)} {type(other)}']
    if type(one).__module__.startswith('numpy'):
        return [] if (one == other).all() else [path]
    alike = one == other or (one != one and other != other)  # NaN
    return [] if alike else [f'{path}: {one} {other}']


def joined_optimizer(stages):
    """What torch would save for one optimizer over the parameters of several stages."""
    inner = [stage['optimizer']['optimizer'] for stage in stages]
    state, groups, masters = {}, [], []
    for g, header in enumerate(inner[0]['param_groups']):
        ids = []
        for part in inner:
            for old in part['param_groups'][g]['params']:
                ids.append(len(state))
                state[len(state)] = part['state'][old]
        groups.append({**header, 'params': ids})
        masters.append(
            [m for stage in stages for m in stage['optimizer']['fp32_from_fp16_params'][g]]
        )
    return {
        'optimizer': {'state': state, 'param_groups': groups},
        'fp32_from_fp16_params': masters,
    }


def path_of(root, rank):
    return root / ITERATION / f'mp_rank_{rank}' / 'model_optim_rng.pt'


def refused(command, root, capsys, pattern):
    """Run a command that must fail, with one line and without a trace in the file system."""
    before = tree(root)
    for word in ('SRC', 'OUT2', 'OUT', 'EDGE', 'CLOUD', 'LINK'):
        command = re.sub(rf'(?<= ){word}(?=[ /]|$)', str(root / word), command)
    assert main(command.split()) == 1
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith('note:')]
    assert len(lines) == 1 and lines[0].startswith('error: '), captured.err
    assert re.search(pattern, lines[0]), lines[0]
    assert captured.out == ''
    assert tree(root) == before
