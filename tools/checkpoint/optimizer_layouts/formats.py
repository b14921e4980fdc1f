"""The formats of optimizer state that can be converted, each a module that yields a plan."""

from collections.abc import Callable

from megatron_overlay.standalone.dist_checkpointing.format_names import (
    FLATTENED,
    FSDP_DTENSOR,
    IN_BUCKETS,
)

from ..common.errors import CheckpointError
from . import dp_reshardable, fsdp_dtensor, model_space
from .checkpoint import Checkpoint
from .plan import OptimizerPlan

FORMATS: dict[str, Callable[[Checkpoint], OptimizerPlan]] = {
    IN_BUCKETS: dp_reshardable.plan_optimizer,
    FLATTENED: model_space.plan_optimizer,
    FSDP_DTENSOR: fsdp_dtensor.plan_optimizer,
}


def plan_optimizer(checkpoint: Checkpoint) -> OptimizerPlan:
    """The plan for a checkpoint's optimizer state."""
    if checkpoint.format == 'none':
        raise CheckpointError(
            f'{checkpoint.directory}: no optimizer state; there is nothing to convert'
        )
    if checkpoint.format not in FORMATS:
        raise CheckpointError(
            f'{checkpoint.directory}: the optimizer state is {checkpoint.format!r}, expected '
            f'{" or ".join(FORMATS)}'
        )
    for option in ('fp8_param_gather', 'fp4_param_gather'):
        if getattr(checkpoint.args, option, None) is True:
            raise CheckpointError(
                f'{checkpoint.directory}: args say {option}: the weights are quantised, so that '
                'main parameters rounded are not the weights, which would be the proof; load it '
                'in the layout that saved it, and save it again with '
                '--dist-ckpt-optim-fully-reshardable'
            )
    return FORMATS[checkpoint.format](checkpoint)
