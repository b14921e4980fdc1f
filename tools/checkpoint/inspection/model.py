"""The model behind a checkpoint's keys."""

from megatron_overlay.standalone.dist_checkpointing.checkpoint_layout import MOE, CheckpointLayout
from megatron_overlay.standalone.dist_checkpointing.hybrid_checkpoint_interop import (
    hybrid_checkpoint_pattern,
)

from .summary import ModelSummary


def describe_model(layout: CheckpointLayout) -> ModelSummary:
    """What the keys tell."""
    kinds = list(layout.mlp_kinds.values())
    return ModelSummary(
        family=layout.family,
        evidence=layout.evidence,
        layers=layout.num_layers,
        stored_by='index' if layout.indexed else 'axis',
        pattern=hybrid_checkpoint_pattern(layout) if layout.family == 'hybrid' else None,
        dense=len(kinds) - kinds.count(MOE),
        moe=kinds.count(MOE),
        latent_attention=layout.latent_attention,
        mtp_layers=layout.mtp_depths,
    )
