"""What ``fsdp_dtensor`` stores of an optimizer besides moments: settings of groups, and steps.

Each parameter has its group's settings, under its own name; groups are those that agree.
Experts on ranks of their own are in the groups of all others: Megatron-FSDP's parameters lack the
mark (``allreduce``) by which megatron-core gives experts groups, and an optimizer, of their own.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from ..common.errors import CheckpointError
from ..common.stored import read_object
from ..merge.common_state import without_optimizer_classes
from ..merge.payload import OpenFiles, load_chunk, read_bytes
from ..merge.plan import MadeBytes, StoredChunk
from ..merge.source import Slice, TensorEntry
from .archived import archived
from .fsdp_checkpoint import STEP, FsdpCheckpoint
from .fsdp_names import is_expert
from .plan import stored_chunk
from .settings import OF_EXPERTS

_RANDOM = re.compile(
    r'rng_state\.\((\d+), (\d+)\)\.(\d+)\.'
    r'(?:(rng_tracker_states)\.(.+)|((?:random|np|torch|cuda)_rng_state))'
)

_KINDS = {
    *('random_rng_state', 'np_rng_state', 'torch_rng_state', 'cuda_rng_state'),
    'rng_tracker_states',
}


def read_settings(checkpoint: FsdpCheckpoint) -> list[dict[str, Any]]:
    """For each optimizer of the chain what the common state keeps of it; none without state.

    Experts on ranks of their own have an optimizer of their own, as with DDP.

    Raises:
        CheckpointError: parameters disagree on the step
    """
    if not checkpoint.settings:
        return []
    groups = _groups(checkpoint)
    step = _step(checkpoint)
    for group in groups:
        if step is not None:
            group.setdefault(STEP, step)
    steps = {float(group[STEP]) for group in groups if STEP in group}
    if len(steps) > 1:
        raise CheckpointError(
            f'{checkpoint.directory}: steps {sorted(steps)} of parameters and their groups, '
            'expected one; the parts are of different saves'
        )
    chain: dict[bool, list[dict[str, Any]]] = defaultdict(list)
    for group in groups:
        chain[group.get(OF_EXPERTS) is True].append(group)
    return [{'optimizer': {'param_groups': chain[of_experts]}} for of_experts in sorted(chain)]


def _groups(checkpoint: FsdpCheckpoint) -> list[dict[str, Any]]:
    """Settings that differ, the ones with weight decay first, as megatron-core has them."""
    apart = getattr(checkpoint.args, 'expert_model_parallel_size', 1) != 1
    distinct: dict[tuple[bool, tuple[tuple[str, bytes], ...]], Mapping[str, Slice]] = {}
    files = OpenFiles(64)
    try:
        for parameter, settings in checkpoint.settings.items():
            content = {
                name: read_bytes(checkpoint.directory / piece.file, piece, files)
                for name, piece in settings.items()
            }
            of_experts = apart and is_expert(parameter)
            distinct.setdefault((of_experts, tuple(sorted(content.items()))), settings)
    finally:
        files.close()
    groups = []
    for (of_experts, _), places in distinct.items():
        group = {
            name: without_optimizer_classes(
                read_object(checkpoint.directory, piece, f'{name} of a parameter group')
            )
            for name, piece in places.items()
        }
        groups.append({**group, OF_EXPERTS: True} if of_experts else group)
    return sorted(groups, key=lambda group: -float(group.get('wd_mult', 1.0)))


def _step(checkpoint: FsdpCheckpoint) -> float | None:
    """The step that is stored with parameters, as torch's Adam has it."""
    found: dict[float, str] = {}
    for name, states in checkpoint.states.items():
        if STEP in states:
            (box,) = states[STEP].chunks
            value = _loaded(stored_chunk(checkpoint, states[STEP], box), f'{name}.{STEP}')
            found.setdefault(float(value), name)
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise CheckpointError(
            f'{checkpoint.directory}: the step of {first} is {one}, that of {second} {other}, '
            'expected one; fully_reshardable keeps one for each group'
        )
    return next(iter(found), None)


def scales_loss(args: Any) -> bool:
    """Whether the run had a loss scale that changes, which Megatron-FSDP doesn't store."""
    return bool(getattr(args, 'fp16', False)) and not getattr(args, 'loss_scale', None)


def random_objects(checkpoint: FsdpCheckpoint) -> list[MadeBytes]:
    """Random state as the objects of ``torch_dist``, one for each pipeline and tensor rank.

    Raises:
        CheckpointError: a part of it isn't known, or is missing
    """
    found: dict[tuple[int, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    for key, entry in checkpoint.random.items():
        match = _RANDOM.fullmatch(key)
        if match is None:
            raise CheckpointError(f'{checkpoint.directory}: {key}: not known as random state')
        state = found[int(match[1]), int(match[2])].setdefault(int(match[3]), {})
        value = _value(checkpoint, entry, key)
        if match[4]:
            state.setdefault(match[4], {})[match[5]] = value
        else:
            state[match[6]] = value
    sizes = [1 + max((rank[axis] for rank in found), default=-1) for axis in (0, 1)]
    if len(found) != sizes[0] * sizes[1] or any(
        sorted(states) != list(range(len(states))) for states in found.values()
    ):
        raise CheckpointError(
            f'{checkpoint.directory}: random state of the pipeline and tensor ranks '
            f'{sorted(found)}, expected that of all'
        )
    for states in found.values():
        for state in states.values():
            if missing := sorted(_KINDS - state.keys()):
                raise CheckpointError(
                    f'{checkpoint.directory}: no {missing[0]} in rng_state; take another checkpoint'
                )
    return [
        MadeBytes(
            f'rng_state/shard_{pipeline}.{tensor}_{sizes[0]}.{sizes[1]}',
            archived([[states[i] for i in range(len(states))]]),
        )
        for (pipeline, tensor), states in sorted(found.items())
    ]


def _value(checkpoint: FsdpCheckpoint, entry: TensorEntry | Slice, key: str) -> Any:
    if isinstance(entry, Slice):
        return read_object(checkpoint.directory, entry, key)
    if len(entry.chunks) != 1:
        raise CheckpointError(f'{checkpoint.directory}: {key}: in several chunks, expected one')
    (box,) = entry.chunks
    return _loaded(stored_chunk(checkpoint, entry, box), key)


def _loaded(stored: StoredChunk, key: str) -> torch.Tensor:
    return load_chunk(stored, key)
