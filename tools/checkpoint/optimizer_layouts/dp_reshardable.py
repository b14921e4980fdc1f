"""``dp_reshardable``, megatron-core's default since 0.15: buckets of each model-parallel rank."""

from ..common.errors import CheckpointError
from .checkpoint import Checkpoint
from .plan import OptimizerPlan


def plan_optimizer(checkpoint: Checkpoint) -> OptimizerPlan:
    """The plan, derived from the metadata.

    Raises:
        CheckpointError: the place of a parameter can't be derived
    """
    raise CheckpointError(f'{checkpoint.directory}: dp_reshardable: not yet')
