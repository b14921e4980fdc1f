"""Which tools and loads take a checkpoint: asked of their own checks, so that they agree."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.checkpoint_layout import MOE, CheckpointLayout
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    MODEL_SPACE_FORMATS,
    gpt_compatible_layer_maps,
    stored_optimizer_format,
)
from megatron.core.dist_checkpointing.saved_arguments import contradiction
from megatron.core.optimizer.resume_report import ResumeReport, with_overlay

from ..common.errors import CheckpointError
from ..common.paths import resolve_checkpoint
from ..merge.common_state import load_common_state
from ..merge.source import read_source
from .locate import DISTRIBUTED, FSDP
from .summary import Use

MERGE = 'weighted merge'
CONVERTER = 'PP/VPP converter'
INTEROP = 'GPT into hybrid'
RESUME = 'resume with optimizer'


def weighted_merge(directory: Path) -> Use:
    """Whether the merge takes the checkpoint as an input."""
    try:
        source = read_source(resolve_checkpoint(directory), model_only=True)
        load_common_state(source)
    except CheckpointError as error:
        return Use(MERGE, False, str(error).removeprefix(f'{directory}: '))
    if source.left_out:
        reason = f'with --model-only: {len(source.left_out)} entries are training state'
        return Use(MERGE, True, reason)
    return Use(MERGE, True, '')


def converter_of_distributed(format_: str) -> Use:
    """The converter of pipeline layouts takes legacy checkpoints only."""
    return Use(CONVERTER, False, f'not needed: {format_} loads into any pipeline layout as it is')


def gpt_into_hybrid(
    format_: str,
    layout: CheckpointLayout,
    common: Mapping[str, Any],
) -> Use:
    """Whether a hybrid run loads the checkpoint, whose common state is given, as a GPT model's."""
    if layout.family != 'gpt':
        kind = 'a hybrid model already' if layout.family == 'hybrid' else 'not a GPT model'
        return Use(INTEROP, False, f'it is of {kind}')
    if format_ not in (DISTRIBUTED, FSDP):
        return Use(INTEROP, False, f'{format_} checkpoints are not translated')
    damage = contradiction(common.get('args'), layout)
    if damage:
        return Use(INTEROP, False, damage)
    attention = '+' if layout.latent_attention else '*'
    mlps = ''.join('E' if layout.mlp_kinds.get(i) == MOE else '-' for i in range(layout.num_layers))
    try:
        gpt_compatible_layer_maps(''.join(attention + mlp for mlp in mlps), layout)
    except ValueError as error:
        return Use(INTEROP, False, str(error))
    counts = [f"{layout.num_layers} '{attention}'"]
    counts += [f"{mlps.count(symbol)} '{symbol}'" for symbol in '-E' if symbol in mlps]
    reason = f'patterns with {", ".join(counts[:-1])} and {counts[-1]}'
    if len(set(mlps)) > 1:
        reason += f', the MLPs in the order {mlps}'
    if layout.mtp_depths:
        reason += (
            f'; its {layout.mtp_depths} MTP layers go into an MTP part, else they are not read'
        )
    stored = stored_optimizer_format(common.get('content_metadata'), common.get('args'))
    if format_ == FSDP:
        reason += '; from megatron-core 0.19 on'
    elif not layout.has_optimizer:
        reason += '; with --no-load-optim, as there is no optimizer state'
    elif stored in MODEL_SPACE_FORMATS:
        reason += '; optimizer state too'
    else:
        reason += f'; with --no-load-optim, as its optimizer state ({stored or "plain"}) is not '
        reason += 'stored by parameter'
    return Use(INTEROP, True, reason)


def resume(format_: str, layout: CheckpointLayout, report: ResumeReport | None) -> Use:
    """Whether a run goes on from the checkpoint with its optimizer state."""
    if report is None:
        if layout.has_optimizer:
            return Use(RESUME, True, f'{format_} is left to megatron-core')
        return Use(RESUME, False, 'no optimizer state; load with --no-load-optim')
    if report.sharding_type == 'none':
        return Use(RESUME, False, 'no optimizer state; load with --no-load-optim')
    return Use(RESUME, report.loads, '; '.join(with_overlay(report)))
