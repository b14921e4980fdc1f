"""The common state of the output: the input's, with the optimizer's settings in it."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_overlay.standalone.dist_checkpointing.format_names import FULLY_RESHARDABLE

from ..merge.common_state import CommonState


def converted_common_state(
    common: CommonState, settings: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What a run that had saved ``fully_reshardable`` would have stored."""
    optimizers = [
        {**setting, 'param_state_sharding_type': FULLY_RESHARDABLE} for setting in settings
    ]
    content = {
        'distrib_optim_sharding_type': FULLY_RESHARDABLE,
        'distrib_optim_fully_reshardable_mem_efficient': False,
        'chained_optim_avoid_prefix': True,
    }
    stored = common.state.get('content_metadata')
    if isinstance(stored, Mapping):
        content = {**stored, **content}
    state = {**common.state, 'content_metadata': content}
    if optimizers:
        state['optimizer'] = optimizers[0] if len(optimizers) == 1 else dict(enumerate(optimizers))
    return state
