"""Which tools and loads take a checkpoint: asked of their own checks, so that they agree."""

from pathlib import Path

from megatron_overlay.standalone.dist_checkpointing.checkpoint_layout import MOE
from megatron_overlay.standalone.dist_checkpointing.format_names import FSDP_DTENSOR, GPT, HYBRID
from megatron_overlay.standalone.dist_checkpointing.gpt_layer_maps import REPLACE_ATTENTION
from megatron_overlay.standalone.dist_checkpointing.load_plan import (
    NORMS_IN_ATTENTION,
    LoadPlan,
    any_run,
    has_norms_in_attention,
    plan_load,
    torch_refusal,
    words_on_optimizer,
)
from megatron_overlay.standalone.dist_checkpointing.optimizer_load import conversion_command
from megatron_overlay.standalone.dist_checkpointing.stored_checkpoint import (
    StoredCheckpoint,
    stored_optimizer_format,
)
from megatron_overlay.standalone.dist_checkpointing.unstored_state import (
    OPTIMIZER,
    unstored_options,
    unstored_reason,
    unstored_state,
)

from ..common.directory import resolve_checkpoint
from ..common.errors import CheckpointError
from ..common.overlay import why_not_active
from ..merge.common_state import load_common_state
from ..merge.source import read_source
from .resume import ResumeReport, with_overlay
from .summary import Use

MERGE = 'weighted merge'
CONVERTER = 'PP/VPP converter'
INTEROP = 'GPT into hybrid'
REVERSE = 'hybrid into GPT'
RESUME = 'resume with optimizer'

_LOADS = 'megatron.training.checkpointing'
_OPTIMIZER = 'megatron.core.optimizer.distrib_optimizer'


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


def _unknown(name: str, *modules: str) -> Use | None:
    """What there is to say of a load where these modules of the overlay take no part in it."""
    reason = why_not_active(*modules)
    return None if reason is None else Use(name, None, reason)


def gpt_into_hybrid(stored: StoredCheckpoint) -> Use:
    """Whether a hybrid run loads the checkpoint as a GPT model's."""
    layout = stored.layout
    if layout is None or layout.family != GPT:
        return Use(INTEROP, False, 'it is not of a GPT model')
    if unknown := _unknown(INTEROP, _LOADS):
        return unknown
    attention = '+' if layout.latent_attention else '*'
    mlps = ''.join('E' if layout.mlp_kinds.get(i) == MOE else '-' for i in range(layout.num_layers))
    pattern = ''.join(attention + mlp for mlp in mlps)
    plan = plan_load(stored, any_run(stored, hybrid_layer_pattern=pattern), HYBRID)
    counts = [f"{layout.num_layers} '{attention}'"]
    counts += [f"{mlps.count(symbol)} '{symbol}'" for symbol in '-E' if symbol in mlps]
    reason = f'patterns with {", ".join(counts[:-1])} and {counts[-1]}'
    if len(set(mlps)) > 1:
        reason += f', the MLPs in the order {mlps}'
    without_attention = any_run(
        stored, hybrid_layer_pattern=''.join(f'M{mlp}' for mlp in mlps), replace_gpt_attention=True
    )
    if not plan_load(stored, without_attention, HYBRID).refusal:
        reason += f", or fewer '{attention}' with {REPLACE_ATTENTION}"
    if has_norms_in_attention(layout):
        reason += f'; {NORMS_IN_ATTENTION}'
    if layout.mtp_depths:
        reason += (
            f'; its {layout.mtp_depths} MTP layers go into an MTP part, else they are not read'
        )
    return _as_planned(INTEROP, plan, stored, reason)


def hybrid_into_gpt(stored: StoredCheckpoint) -> Use:
    """Whether a GPT run loads the checkpoint of a hybrid model."""
    if unknown := _unknown(REVERSE, _LOADS):
        return unknown
    plan, layout = plan_load(stored, any_run(stored), GPT), stored.layout
    if plan.layer_maps is None or layout is None:
        return Use(REVERSE, False, plan.refusal)
    reason = f'--num-layers {plan.layer_maps.num_gpt_layers}'
    is_moe = [int(layout.mlp_kinds.get(layer) == MOE) for layer in plan.layer_maps.mlp_to_gpt]
    if len(set(is_moe)) > 1:
        reason += f' --moe-layer-freq "{is_moe}"'
    if not plan.layer_maps.keeps_gpt_order:
        reason += '; a GPT model computes its layers in another order, and so something else'
    return _as_planned(REVERSE, plan, stored, reason)


def _as_planned(name: str, plan: LoadPlan, stored: StoredCheckpoint, reason: str) -> Use:
    if plan.refusal:
        return Use(name, False, plan.refusal)
    _, state = words_on_optimizer(stored, plan)
    unstored = unstored_reason(unstored_state(stored))
    if unstored not in state:
        state = f'{state}; {unstored}'
    return Use(name, True, f'{reason}; {state}')


def resume(stored: StoredCheckpoint, report: ResumeReport | None) -> Use:
    """Whether a run goes on from the checkpoint with its optimizer state."""
    if stored.release:
        return Use(RESUME, False, 'the optimizer starts fresh from a release')
    if torch_refusal():
        return Use(RESUME, False, torch_refusal())
    unstored = unstored_state(stored)
    if OPTIMIZER in unstored:
        options = ' '.join(unstored_options(unstored))
        return Use(RESUME, False, f'{unstored[OPTIMIZER]}; load with {options}')
    if report is None:
        kind = stored_optimizer_format(stored)
        reason = f'{kind} is left to megatron-core'
        if kind == FSDP_DTENSOR:
            reason += (
                ', in runs with --use-megatron-fsdp; for others convert it: '
                f'{conversion_command(stored.directory)}'
            )
        return Use(RESUME, True, reason)
    if unknown := _unknown(RESUME, _OPTIMIZER):
        return unknown
    return Use(RESUME, report.loads, '; '.join(with_overlay(report)))
