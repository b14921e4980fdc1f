"""Checkpoints that real runs wrote of one step, in ``dp_reshardable`` and ``fully_reshardable``."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.unit_tests.optimizer.resume_runs import launch, read_records
from tools.checkpoint.common.dcp_metadata import load_dcp_metadata
from tools.checkpoint.common.directory import resolve_checkpoint
from tools.checkpoint.common.stored import common_state_slice, read_common_state

STEPS = 3


@dataclass(frozen=True)
class Twins:
    """Roots of two checkpoints of the same step of the same run."""

    in_buckets: Path
    by_parameter: Path


def make_twins(
    directory: Path, nproc: int, *arguments: str, kind: str = 'gpt', **env: str
) -> Twins:
    """Train twice alike, and save in one format and the other."""
    twins = Twins(directory / 'in_buckets', directory / 'by_parameter')
    common = [*arguments, '--use-distributed-optimizer', '--train-iters', str(STEPS)]
    tasks = [
        {
            'name': root.name,
            'kind': kind,
            'arguments': [*common, '--save', str(root), *options],
            'result': str(directory / root.name) + '.record',
        }
        for root, options in (
            (twins.in_buckets, []),
            (twins.by_parameter, ['--dist-ckpt-optim-fully-reshardable']),
        )
    ]
    launch(nproc, tasks, directory / 'tasks.json', **env)
    for task in tasks:
        read_records(Path(task['result']))
    return twins


def read_all(root: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Every tensor of a checkpoint, and its common state."""
    directory = resolve_checkpoint(root)
    metadata = load_dcp_metadata(directory)
    tensors: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=directory, no_dist=True)
    return tensors, read_common_state(directory, common_state_slice(metadata)) or {}


def differences(one: Path, other: Path) -> list[str]:
    """What two checkpoints store differently, tensors by their bits."""
    (tensors, common), (others, other_common) = read_all(one), read_all(other)
    found = [f'only one has {key}' for key in sorted(tensors.keys() ^ others.keys())]
    for key in tensors.keys() & others.keys():
        a, b = tensors[key], others[key]
        if a.dtype != b.dtype or a.shape != b.shape or not _same_bits(a, b):
            found.append(key)
    return found + [
        f'common state: {key}'
        for key in sorted(common.keys() | other_common.keys(), key=str)
        if key != 'args' and not same(common.get(key), other_common.get(key))
    ]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors by their bits."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and _same_bits(a, b)
    if isinstance(a, Namespace) and isinstance(b, Namespace):
        return same(vars(a), vars(b))
    return bool(a == b) or type(a).__name__ == type(b).__name__ == 'function'
