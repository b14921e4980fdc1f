"""Checkpoints as forks of megatron wrote them: with steps of parameters in the common state."""

from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from tests.cpu_megatron.session import Training


def leak_steps(state: dict) -> dict:
    """Turn the wrapped steps into plain tensors, as forks' checkpoints have them."""
    for index in (key for key in state['optimizer']['param_state'] if isinstance(key, int)):
        for buckets in state['optimizer']['param_state'][index].values():
            for bucket in buckets:
                for tensors in bucket:
                    if isinstance(tensors.get('step'), LocalNonpersistentObject):
                        tensors['step'] = tensors['step'].unwrap()
    return state


def save_with_leaked_steps(run: Training, path: Path) -> None:
    """A checkpoint in the dp_reshardable format whose common state holds the steps."""
    metadata = {'distrib_optim_sharding_type': 'dp_reshardable'}
    if torch.distributed.get_rank() == 0:
        path.mkdir(parents=True)
    torch.distributed.barrier()
    state = leak_steps(run.state_dict(metadata))
    dist_checkpointing.save(state, str(path), content_metadata=metadata)
