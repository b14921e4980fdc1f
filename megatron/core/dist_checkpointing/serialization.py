"""Amends upstream's reading of the common state, where optimizers left what doesn't belong there.

Forks of megatron have written checkpoints in the ``dp_reshardable`` format whose common state holds
a part of the optimizer's ``param_state``: each parameter's ``step``, which isn't sharded. It can't
be used: it repeats what the parameter groups say, and its lists have rank 0's lengths.

Megatron itself stores the classes of the optimizers that ``HybridDeviceOptimizer`` is made of, and
then refuses to read them back.

And amends ``save``: what is written while training goes on is what was there when it was saved.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

import megatron_overlay
from megatron_overlay.optimizer_classes import imported_optimizer_classes

upstream = megatron_overlay.upstream(__name__)

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.leaked_state import leaked_param_states  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402

logger = logging.getLogger(__name__)


def save(sharded_state_dict, *args, **kwargs):
    """Upstream's; saved asynchronously, tensors in host memory are copied first.

    Upstream stages those of the GPU, and clones views. The others, as the state of an offloaded
    optimizer, go to the writer in shared memory, and the next steps would change what it writes.
    """
    given = inspect.signature(upstream.save).bind(sharded_state_dict, *args, **kwargs).arguments
    if given.get('async_sharded_save'):
        for entry in nested_values(sharded_state_dict):
            if isinstance(entry, ShardedTensor) and _is_whole_host_tensor(entry.data):
                entry.data = entry.data.detach().clone()
    return upstream.save(sharded_state_dict, *args, **kwargs)


def _is_whole_host_tensor(data: Any) -> bool:
    if not isinstance(data, torch.Tensor) or data.device.type != 'cpu':
        return False
    return data.untyped_storage().size() == data.numel() * data.itemsize


def load_common(checkpoint_dir: str) -> dict[str, Any]:
    """Upstream's, without leaked optimizer state."""
    return _without_leaked_state(upstream.load_common, checkpoint_dir)


def load_common_state_dict(checkpoint_dir) -> dict[str, Any]:
    """Upstream's, without leaked optimizer state."""
    return _without_leaked_state(upstream.load_common_state_dict, checkpoint_dir)


def _without_leaked_state(load: Callable, checkpoint_dir: str) -> dict[str, Any]:
    with torch.serialization.safe_globals(imported_optimizer_classes()):
        common_state_dict = load(checkpoint_dir)
    for state in leaked_param_states(common_state_dict):
        del state['param_state']
        logger.info('ignoring optimizer state per parameter in the common state')
    return common_state_dict
