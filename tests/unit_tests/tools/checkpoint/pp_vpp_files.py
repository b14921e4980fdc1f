"""Looking into rank files for the converter's tests, without the converter's own code."""

import argparse
from pathlib import Path

import torch

ITERATION = 'iter_0000002'


def load(root, rank, iteration=ITERATION):
    """A rank file; ``rank`` is what follows ``mp_rank_``."""
    return torch.load(Path(root) / iteration / f'mp_rank_{rank}' / 'model_optim_rng.pt')


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
    return [] if one == other else [f'{path}: {one} {other}']
