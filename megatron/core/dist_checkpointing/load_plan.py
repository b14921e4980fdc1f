"""What loading a checkpoint does, decided before anything of it is read but its metadata.

``megatron.training`` carries a plan out, the dry run and the inspector print it: one decision, and
pure data.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import megatron_overlay
from megatron_overlay._guard import Upstream

from . import gpt_checkpoint_interop as interop
from .checkpoint_layout import CheckpointLayout
from .format_names import FSDP_DTENSOR, GPT, HYBRID, OTHER, PLAIN, TORCH_DIST
from .fsdp_mixers import mixer_refusal
from .gpt_checkpoint_interop import GPTCompatLayerMaps
from .hybrid_checkpoint_interop import hybrid_checkpoint_layer_maps, hybrid_checkpoint_pattern
from .key_arguments import LEGACY_WAY_OUT
from .mamba_from_attention import WARM_START, with_warm_start
from .optimizer_load import (
    conversion_command,
    conversion_refusal,
    is_convertible,
    optimizer_verdict,
)
from .saved_arguments import contradiction, effective, other_functions, other_weights, saved_pattern
from .stored_checkpoint import (
    StoredCheckpoint,
    needs_undistributed_optimizer,
    stored_optimizer_format,
)

LEGACY_REFUSAL = (
    f'legacy torch checkpoints are not translated between GPT and hybrid; {LEGACY_WAY_OUT}'
)

NORMS_IN_ATTENTION = (
    'the attention of the checkpoint has norms of queries and keys (--qk-layernorm), that of '
    "core's own hybrid layers has none: the run needs a --spec whose attention has them"
)

_FSDP_TRANSLATES = Upstream(megatron_overlay.finder.upstream_spec).exists(
    'megatron.core.dist_checkpointing.gpt_checkpoint_interop'
)  # megatron-core from 0.19 on


@dataclass(frozen=True)
class LoadPlan:
    """What the load does; with neither maps nor a refusal, what megatron-core does by itself.

    Attributes:
        source: ``'gpt'`` or ``'hybrid'``, whose checkpoint is translated; empty where none is.
        layer_maps: pairs the layers then.
        load_optim: the optimizer's state is translated too.
        refusal: why the run can't take the checkpoint; empty when it can.
        optimizer_refusal: why it can't take the optimizer state, which it asks for.
        notes: what to tell those who start the run.
    """

    source: str = ''
    layer_maps: GPTCompatLayerMaps | None = None
    load_optim: bool = False
    refusal: str = ''
    optimizer_refusal: str = ''
    notes: tuple[str, ...] = ()


class _RefusedError(Exception):
    pass


def plan_load(stored: StoredCheckpoint, args: Any, run: str) -> LoadPlan:
    """What a run does with a checkpoint.

    The checkpoint's keys decide what it is where they are known, the saved arguments elsewhere.

    Args:
        stored: the checkpoint.
        args: of the run.
        run: the model that it builds: ``'gpt'``, ``'hybrid'`` or ``'other'``.
    """
    try:
        source = _family(stored, run)
        if (run == HYBRID) == (source == HYBRID):
            return LoadPlan(
                refusal=mixer_refusal(stored, args),
                optimizer_refusal=conversion_refusal(stored, args),
            )
        if torch_refusal():
            raise _RefusedError(torch_refusal())
        if source == GPT:
            layer_maps, notes = _gpt_into_hybrid(stored, args)
        else:
            layer_maps, notes = _hybrid_into_gpt(stored, args, run)
            _refuse_other_weights(stored, args)
    except _RefusedError as reason:
        return LoadPlan(refusal=str(reason))
    load_optim, optimizer_refusal = optimizer_verdict(stored, args)
    whether = 'is loaded' if load_optim else 'starts fresh'
    return LoadPlan(
        source=source,
        layer_maps=layer_maps,
        load_optim=load_optim,
        optimizer_refusal=optimizer_refusal,
        notes=(
            f'{notes[0]}; optimizer state {whether}.',
            *notes[1:],
            *_other_functions(args, stored.args),
        ),
    )


def _refuse_other_weights(stored: StoredCheckpoint, args: Any) -> None:
    refusal = other_weights(args, stored.args)
    if refusal:
        raise _RefusedError(refusal)


def torch_refusal() -> str:
    """Why megatron-core loads no ``torch_dist`` checkpoint with the torch there is, if it doesn't.

    Its strategy calls DCP's ``load`` with ``no_dist``, which torch has from 2.7 on.
    """
    if 'no_dist' in inspect.signature(dcp.load).parameters:
        return ''
    return (
        f'torch {torch.__version__}: megatron-core can load no torch_dist checkpoint with it '
        "(DCP's load has no no_dist); use torch 2.7 or newer"
    )


def any_run(stored: StoredCheckpoint, **arguments: Any) -> SimpleNamespace:
    """Arguments of a run that is otherwise as the one that saved the checkpoint.

    Its optimizer is one that takes the stored state.
    """
    saved = getattr(stored.args, '__dict__', {})
    own = dict.fromkeys(
        (
            'hybrid_layer_pattern',
            'num_layers',
            'no_load_optim',
            'finetune',
            'replace_gpt_attention',
            'init_mamba_from_attention',
        )
    )
    kind = stored_optimizer_format(stored)
    return SimpleNamespace(**saved | own | {'use_distributed_optimizer': kind != PLAIN} | arguments)


def _family(stored: StoredCheckpoint, run: str) -> str:
    layout = stored.layout
    if layout is None or layout.family == OTHER:
        return HYBRID if saved_pattern(stored.args) else GPT
    reason = contradiction(stored.args, layout)
    # A number of layers alone is upstream's to compare where nothing is translated.
    of_this_kind = layout.family == run and not saved_pattern(stored.args)
    if reason and not of_this_kind:
        raise _RefusedError(reason)
    return layout.family


def _gpt_into_hybrid(stored: StoredCheckpoint, args: Any) -> tuple[GPTCompatLayerMaps, list[str]]:
    pattern, layout = args.hybrid_layer_pattern, stored.layout
    if stored.format == FSDP_DTENSOR and not _FSDP_TRANSLATES:
        raise _RefusedError(
            'A GPT checkpoint in fsdp_dtensor format goes into a hybrid run from megatron-core '
            f'0.19 on; upgrade, or convert it: {conversion_command(stored.directory)}'
        )
    if stored.format not in (TORCH_DIST, FSDP_DTENSOR):
        raise _RefusedError(
            f'{stored.format} checkpoints are not translated; save it as torch_dist.'
        )
    if not pattern:
        raise _RefusedError(
            'The checkpoint is of a GPT model, the run builds a hybrid one: '
            '--hybrid-layer-pattern must say which of its layers take the GPT layers.'
        )
    # Programs that make their arguments by hand don't have these two.
    replacing = getattr(args, 'replace_gpt_attention', None) is True
    warm = getattr(args, 'init_mamba_from_attention', None) is True
    try:
        layer_maps = interop.gpt_compatible_layer_maps(pattern, layout, replacing)
        _refuse_other_weights(stored, args)
        if warm and (layout is None or stored.format != TORCH_DIST):
            raise ValueError(f'{WARM_START} takes torch_dist checkpoints only; leave it out.')
        if warm and layout is not None:
            groups = effective(args, 'num_query_groups')
            layer_maps = with_warm_start(layer_maps, layout, args, groups)
    except ValueError as error:
        raise _RefusedError(str(error)) from error
    saved_layers = getattr(stored.args, 'num_layers', None)
    if layout is None and saved_layers not in (None, layer_maps.num_gpt_layers):
        raise _RefusedError(
            f'Hybrid layer pattern {pattern!r} takes a GPT checkpoint of '
            f'{layer_maps.num_gpt_layers} layers, and this one has {saved_layers}: give the '
            f'pattern as many attention and as many MLP layers.'
        )
    notes = [
        f'GPT checkpoint into a hybrid model: {layer_maps.num_gpt_layers} GPT layers feed '
        f'{len(layer_maps.attention_to_gpt)} attention and {len(layer_maps.mlp_to_gpt)} MLP layers'
    ]
    notes += _replaced_and_fresh(layer_maps)
    if layout is not None and layer_maps.attention_to_gpt and has_norms_in_attention(layout):
        notes.append(f'WARNING: {NORMS_IN_ATTENTION}.')
    if layout is not None and layout.mtp_depths and not layer_maps.mtp_pattern:
        notes.append(
            f'WARNING: the {layout.mtp_depths} MTP layer(s) of the GPT checkpoint are not read: '
            f"the pattern has no MTP part, such as '/*-'."
        )
    return layer_maps, [*notes, *_another_order(layer_maps, pattern)]


def _replaced_and_fresh(layer_maps: GPTCompatLayerMaps) -> Iterator[str]:
    if layer_maps.replaced:
        by_layer = (
            f'of GPT layer {gpt} by {in_place_of_attention(layer_maps, gpt)}'
            for gpt in layer_maps.replaced
        )
        yield f'attention is replaced: {"; ".join(by_layer)}'
    cold = layer_maps.fresh_init - layer_maps.warm_start.keys()
    if cold:
        yield (
            f'WARNING: {len(cold)} hybrid layer(s) have no source in the GPT checkpoint and start '
            f'from their fresh initialisation.'
        )
    if layer_maps.warm_start:
        yield (
            f'WARNING: {len(layer_maps.warm_start)} Mamba layer(s) begin with the attention they '
            f'replace; their z, dt, A, D, convolution and gated norm, and their optimizer state, '
            f'start fresh.'
        )
    sparse = [i for i in layer_maps.attention_to_gpt if layer_maps.symbols[i] == 'D']
    if sparse and layer_maps.fresh_indexers:
        yield (
            f'WARNING: the indexers of {len(sparse)} sparse attention layer(s) have no source in '
            f'the GPT checkpoint and start from their fresh initialisation.'
        )


def words_on_optimizer(stored: StoredCheckpoint, plan: LoadPlan) -> tuple[str, str]:
    """What becomes of the stored optimizer state, as a sentence on the load and as a phrase."""
    will_load = 'Will load'
    if any(NORMS_IN_ATTENTION in note for note in plan.notes):
        will_load += ' in a run with such a --spec'
    if stored.release:
        fresh = 'the optimizer starts fresh, as from any release'
        return f'{will_load}; {fresh}.', fresh
    if plan.optimizer_refusal:
        how = 'with --no-load-optim'
        if plan.load_optim and is_convertible(stored):
            how = f'after a conversion, or {how}'
        return f'{will_load} {how}. {plan.optimizer_refusal}', f'{how}: {plan.optimizer_refusal}'
    if needs_undistributed_optimizer(stored):
        run = 'without --use-distributed-optimizer'
        return (
            f'{will_load}, with its optimizer state in a run {run}.',
            f'optimizer state too, {run}',
        )
    return f'{will_load}, with its optimizer state.', 'optimizer state too'


def has_norms_in_attention(layout: CheckpointLayout) -> bool:
    """Whether the checkpoint's attention has what `NORMS_IN_ATTENTION` is about."""
    return any('.self_attention.q_layernorm.' in key for key in layout.keys)


def in_place_of_attention(layer_maps: GPTCompatLayerMaps, gpt_layer: int) -> str:
    """Words on the hybrid layers that stand in the place of a GPT layer's attention."""
    layers = [f'layer {i} ({layer_maps.symbols[i]})' for i in layer_maps.replaced[gpt_layer]]
    return ', '.join(layers) or 'nothing'


def _hybrid_into_gpt(
    stored: StoredCheckpoint, args: Any, run: str
) -> tuple[GPTCompatLayerMaps, list[str]]:
    layout, saved = stored.layout, f'(pattern {saved_pattern(stored.args)!r})'

    def refuse(reason: str) -> _RefusedError:
        return _RefusedError(
            f'{reason} The hybrid entry point, pretrain_hybrid.py, loads the checkpoint as it is.'
        )

    if run != GPT:
        raise refuse(
            f'The checkpoint is of a hybrid model {saved}, the run builds neither that nor a GPT '
            f'model.'
        )
    if layout is None or stored.format != TORCH_DIST:
        raise refuse(
            f'The checkpoint is of a hybrid model {saved}, and goes into a GPT run in torch_dist '
            f'format only; save it so.'
        )
    try:
        layer_maps = hybrid_checkpoint_layer_maps(layout)
    except ValueError as error:
        raise refuse(str(error)) from error
    pattern, layers = args.hybrid_layer_pattern, layer_maps.num_gpt_layers
    if args.num_layers not in (None, layers) or pattern:
        raise refuse(
            f'The hybrid checkpoint makes a GPT model of {layers} layers, the '
            f'run has {args.num_layers}{f" and the pattern {pattern!r}" if pattern else ""}: '
            f'pass --num-layers {layers}, and no --hybrid-layer-pattern.'
        )
    announced = (
        f'hybrid checkpoint into a GPT model: its attention and MLP layers feed {layers} GPT layers'
    )
    return layer_maps, [announced, *_another_order(layer_maps, hybrid_checkpoint_pattern(layout))]


def _another_order(layer_maps: GPTCompatLayerMaps, pattern: str) -> Iterator[str]:
    if not layer_maps.keeps_gpt_order:
        yield (
            f'WARNING: the hybrid model computes its layers in the order {pattern!r}, a GPT '
            f'model each MLP after its attention: the same weights will compute something else.'
        )


def _other_functions(args: Any, saved: Any) -> Iterator[str]:
    for name, own, found in other_functions(args, saved):
        yield (
            f'WARNING: {name} is {own!r} in this run and was {found!r} in the one that saved the '
            f'checkpoint: the same weights will compute something else.'
        )
