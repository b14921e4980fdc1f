"""Checkpoints that real runs wrote of one step: one with Megatron-FSDP, its twin with DDP."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.unit_tests.optimizer.resume_runs import launch, read_records
from tests.unit_tests.tools.checkpoint.optimizer_twins import same
from tools.checkpoint.common.paths import tracker_target

STEPS = 3
# Megatron-FSDP sums the gradients' norm in another order; without clipping nothing depends on it,
# and the two runs are equal bit for bit.
DISTRIBUTED = [
    *('--use-distributed-optimizer', '--no-gradient-accumulation-fusion'),
    *('--clip-grad', '0'),
]
# Gradients are reduced as DDP reduces them, so that both runs compute the same.
FSDP = [
    *DISTRIBUTED,
    *('--use-megatron-fsdp', '--ckpt-format', 'fsdp_dtensor'),
    *('--data-parallel-sharding-strategy', 'optim_grads_params'),
    *('--megatron-fsdp-main-grads-dtype', 'fp32', '--no-gradient-reduce-div-fusion'),
]
DDP = [*DISTRIBUTED, '--dist-ckpt-optim-fully-reshardable']
# What a converted checkpoint lacks: Megatron-FSDP doesn't store it.
LEFT_OUT = ['common state: rerun_state_machine']
# Megatron-FSDP asks for several, tensor parallelism without it for one.
SEVERAL_CONNECTIONS = {'CUDA_DEVICE_MAX_CONNECTIONS': '8'}
ONE_CONNECTION = {'CUDA_DEVICE_MAX_CONNECTIONS': '1'}


@dataclass(frozen=True)
class FsdpTwins:
    """Roots of two checkpoints of the same step, in ``fsdp_dtensor`` and ``torch_dist``."""

    fsdp: Path
    torch_dist: Path
    arguments: tuple[str, ...]
    kind: str


def make_fsdp_twins(
    directory: Path, nproc: int, *arguments: str, kind: str = 'gpt', **env: str
) -> FsdpTwins:
    """Train twice alike, and save in one format and the other."""
    twins = FsdpTwins(directory / 'fsdp', directory / 'torch_dist', arguments, kind)
    for root, options, connections in (
        (twins.fsdp, FSDP, SEVERAL_CONNECTIONS),
        (twins.torch_dist, DDP, ONE_CONNECTION),
    ):
        task = {
            'name': root.name,
            'kind': kind,
            'arguments': [*arguments, *options, '--train-iters', str(STEPS), '--save', str(root)],
            'result': str(directory / root.name) + '.record',
        }
        launch(nproc, [task], directory / 'tasks.json', **connections, **env)
        read_records(Path(task['result']))
    return twins


def read_fsdp(root: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Every tensor and every object of an ``fsdp_dtensor`` checkpoint, through DCP."""
    directory = tracker_target(root)
    metadata = dcp.FileSystemReader(directory).read_metadata()
    entries = metadata.state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in entries.items()
    }
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors, {key: state[key] for key in state.keys() - tensors.keys()}


def fsdp_differences(one: Path, other: Path) -> list[str]:
    """What two ``fsdp_dtensor`` checkpoints store differently, tensors by their bits."""
    found = []
    for mine, others in zip(read_fsdp(one), read_fsdp(other), strict=True):
        found += [f'only one has {key}' for key in sorted(mine.keys() ^ others.keys())]
        found += [key for key in mine.keys() & others.keys() if not same(mine[key], others[key])]
    return found
