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
from megatron.core.dist_checkpointing.hybrid_checkpoint_interop import hybrid_checkpoint_layer_maps
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
REVERSE = 'hybrid into GPT'
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
    release: bool,
) -> Use:
    """Whether a hybrid run loads the checkpoint, whose common state is given, as a GPT model's."""
    if layout.family != 'gpt':
        return Use(INTEROP, False, 'it is not of a GPT model')
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
    if format_ == FSDP:
        return Use(INTEROP, True, f'{reason}; from megatron-core 0.19 on')
    return Use(INTEROP, True, f'{reason}; {_optimizer_state(layout, common, release)}')


def hybrid_into_gpt(
    format_: str, layout: CheckpointLayout, common: Mapping[str, Any], release: bool
) -> Use:
    """Whether a GPT run loads the checkpoint of a hybrid model, whose common state is given."""
    if format_ != DISTRIBUTED:
        return Use(REVERSE, False, f'{format_} checkpoints are not translated')
    try:
        layer_maps = hybrid_checkpoint_layer_maps(layout)
    except ValueError as error:
        return Use(REVERSE, False, str(error))
    reason = f'--num-layers {layer_maps.num_gpt_layers}'
    is_moe = [int(layout.mlp_kinds.get(layer) == MOE) for layer in layer_maps.mlp_to_gpt]
    if len(set(is_moe)) > 1:
        reason += f' --moe-layer-freq "{is_moe}"'
    if not layer_maps.keeps_gpt_order:
        reason += '; a GPT model computes its layers in another order, and so something else'
    return Use(REVERSE, True, f'{reason}; {_optimizer_state(layout, common, release)}')


def _optimizer_state(layout: CheckpointLayout, common: Mapping[str, Any], release: bool) -> str:
    if release:
        return 'the optimizer starts fresh, as from any release'
    stored = stored_optimizer_format(common.get('content_metadata'), common.get('args'))
    if not layout.has_optimizer:
        return 'with --no-load-optim, as there is no optimizer state'
    if stored in MODEL_SPACE_FORMATS:
        return 'optimizer state too'
    kind = stored or 'plain'
    return f'with --no-load-optim, as its optimizer state ({kind}) is not stored by parameter'


def resume(
    format_: str, layout: CheckpointLayout, report: ResumeReport | None, release: bool
) -> Use:
    """Whether a run goes on from the checkpoint with its optimizer state."""
    if release:
        return Use(RESUME, False, 'the optimizer starts fresh from a release')
    if report is None:
        if layout.has_optimizer:
            return Use(RESUME, True, f'{format_} is left to megatron-core')
        return Use(RESUME, False, 'no optimizer state; load with --no-load-optim')
    if report.sharding_type == 'none':
        return Use(RESUME, False, 'no optimizer state; load with --no-load-optim')
    return Use(RESUME, report.loads, '; '.join(with_overlay(report)))
