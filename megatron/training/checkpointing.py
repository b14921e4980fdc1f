"""Amends upstream's ``load_checkpoint`` for GPT checkpoints in HybridModel runs, and the reverse.

On 0.19 upstream itself points a hybrid run at a GPT checkpoint; what is amended there is how such a
checkpoint is recognised, and that nothing which should have been read stays random. On 0.18, and
for hybrid checkpoints in GPT runs, the steps are added around the functions that
``load_checkpoint`` is made of.
"""

import copy
import re
import types
from contextlib import nullcontext

import torch
from megatron.core.dist_checkpointing import load_content_metadata
from megatron.core.dist_checkpointing.checkpoint_layout import (
    CheckpointLayout,
    check_sources,
    read_checkpoint_layout,
)
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    MODEL_SPACE_FORMATS,
    GPTCompatLayerMaps,
    gpt_compatible_layer_maps,
    retarget_sharded_state_dict_to_gpt_checkpoint,
    stored_optimizer_format,
)
from megatron.core.dist_checkpointing.hybrid_checkpoint_interop import (
    hybrid_checkpoint_layer_maps,
    hybrid_checkpoint_pattern,
    is_pattern_of_gpt_layers,
    retarget_sharded_state_dict_to_hybrid_checkpoint,
)
from megatron.core.dist_checkpointing.read_record import (
    DTensorLoadPlanner,
    Shard,
    recording_reads,
)
from megatron.core.dist_checkpointing.saved_arguments import (
    contradiction,
    other_functions,
    other_weights,
    saved_pattern,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.training.global_vars import get_args
from megatron.training.gpt_hybrid_load import (
    Load,
    finetuning_keeps_the_optimizer,
    load_optimizer_when_finetuning,
    strict_but_for_extra_state,
)
from megatron.training.group_schedules import settle_schedules
from megatron.training.utils import print_rank_0

import megatron_overlay

upstream = megatron_overlay.upstream(__name__)
CheckpointType = upstream.CheckpointType
# Upstream asks this module of torch's for the planner of `fsdp_dtensor`.
default_planner = types.SimpleNamespace(DefaultLoadPlanner=DTensorLoadPlanner)

_UPSTREAM_RETARGETS = hasattr(upstream, '_maybe_setup_gpt_to_hybrid_load')
_MODEL_RE, _OPTIMIZER_RE = re.compile(r'model\d*'), re.compile(r'optimizer\d*')

_current_load: Load | None = None


def load_checkpoint(
    ddp_model, optimizer, opt_param_scheduler, load_arg='load', strict=True, *args, **kwargs
):
    """Upstream's, which also takes a GPT checkpoint into a HybridModel run, and the reverse.

    Raises:
        RuntimeError: the checkpoint and the run don't go together.
        CheckpointingException: the checkpoint and the model don't have the same weights.
    """
    global _current_load
    outer, _current_load = _current_load, Load(list(ddp_model), optimizer)
    try:
        guard = strict_but_for_extra_state(_current_load) if strict else nullcontext()
        with guard, finetuning_keeps_the_optimizer(_current_load):
            result = upstream.load_checkpoint(
                ddp_model, optimizer, opt_param_scheduler, load_arg, strict, *args, **kwargs
            )
        if _current_load.retarget is not None:
            load_optimizer_when_finetuning(_current_load)
        return result
    finally:
        _current_load = outer


def _load_base_checkpoint(load_dir, args, rank0=False, sharded_state_dict=None, **kwargs):
    """Upstream's, between the steps that a checkpoint of the other kind adds."""
    load = _current_load
    to_read = {}
    if load is not None and not rank0 and load.layer_maps is not None:
        to_read = _point_at_checkpoint(load, load.layer_maps, sharded_state_dict)
    with recording_reads(to_read) as record:
        result = upstream._load_base_checkpoint(
            load_dir, args, rank0=rank0, sharded_state_dict=sharded_state_dict, **kwargs
        )
    if load is not None and not rank0 and load.layer_maps is not None:
        record.check()
    if load is None or result[0] is None:
        return result
    if rank0:
        _look_at_checkpoint(load, args, *result)
    else:
        load.loaded = result[0]
        settle_schedules(result[0], load.optimizer, args)
    return result


def _look_at_checkpoint(load: Load, args, state_dict, checkpoint_name, release, ckpt_type) -> None:
    if ckpt_type is CheckpointType.LEGACY:
        _refuse_legacy_gpt(load, state_dict, checkpoint_name)
    if ckpt_type not in (CheckpointType.GLOBAL, CheckpointType.FSDP_DTENSOR):
        return
    if _find_module(load.model, (GPTModel, HybridModel)) is not None:
        load.layout = _on_first_rank(lambda: read_checkpoint_layout(checkpoint_name))
    load.release = release
    if ckpt_type is CheckpointType.GLOBAL:
        load.content_metadata = load_content_metadata(preloaded_state_dict=state_dict) or {}
    if _UPSTREAM_RETARGETS:
        return
    ckpt_args = state_dict.get('args') or types.SimpleNamespace()
    _maybe_setup_gpt_to_hybrid_load(args, ckpt_args, load.model)
    if load.layer_maps is not None and ckpt_type is CheckpointType.FSDP_DTENSOR:
        raise RuntimeError(
            f'{checkpoint_name}: a GPT checkpoint in fsdp_dtensor format goes into a hybrid run '
            f'from megatron-core 0.19 on; save it as torch_dist, or upgrade.'
        )


def _refuse_legacy_gpt(load: Load, state_dict, checkpoint_name) -> None:
    keys = {
        '.'.join(key.split('.')[3:4])
        for name, chunk in state_dict.items()
        if _MODEL_RE.fullmatch(name)
        for key in chunk
        if key.startswith('decoder.layers.0.')
    }
    # a layer of a hybrid model has one of them
    if {'self_attention', 'mlp'} <= keys and _find_module(load.model, HybridModel) is not None:
        raise RuntimeError(
            f'{checkpoint_name}: a GPT checkpoint in the legacy torch format; a hybrid run takes '
            f'torch_dist ones. Save it again with pretrain_gpt.py … --ckpt-convert-format '
            f'torch_dist --ckpt-convert-save DIR.'
        )


def _refuse_optimizer_formats(load: Load, args, ckpt_args) -> None:
    """Only state by parameter can be translated, not state by buffer or by position."""
    sharding_type = stored_optimizer_format(load.content_metadata, ckpt_args)
    if sharding_type not in MODEL_SPACE_FORMATS:
        raise RuntimeError(
            f'The optimizer state of the checkpoint is '
            f'{sharding_type or "that of an optimizer which is not distributed"!r}; between GPT '
            f'and hybrid only {" or ".join(MODEL_SPACE_FORMATS)} can be read. Save it again with '
            f'--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable, or pass '
            f'--no-load-optim.'
        )
    if not args.use_distributed_optimizer:
        raise RuntimeError(
            f'The optimizer state of the checkpoint is {sharding_type!r}: pass '
            f'--use-distributed-optimizer to load it, or --no-load-optim.'
        )


def _maybe_setup_gpt_to_hybrid_load(args, ckpt_args, model):
    """Find out whether a GPT checkpoint goes into a hybrid run, or the reverse.

    The keys of the checkpoint decide where they are known, the saved arguments elsewhere.

    Returns:
        For a GPT checkpoint the layer maps, and whether optimizer state is loaded;
        ``(None, False)`` where upstream has nothing to do.

    Raises:
        RuntimeError: the checkpoint can't go into the run; keys and arguments contradict.
    """
    load = _current_load or Load(list(model), None)
    run_is_hybrid = _find_module(model, HybridModel) is not None
    checkpoint_is_hybrid = _checkpoint_is_hybrid(ckpt_args, load.layout)
    if run_is_hybrid == checkpoint_is_hybrid:
        return None, False
    if not run_is_hybrid:
        _set_up_hybrid_to_gpt_load(load, args, ckpt_args)
        return None, False
    if not args.hybrid_layer_pattern:
        raise RuntimeError(
            'The checkpoint is of a GPT model, the run builds a hybrid one: '
            '--hybrid-layer-pattern must say which of its layers take the GPT layers.'
        )
    try:
        load.layer_maps = gpt_compatible_layer_maps(args.hybrid_layer_pattern, load.layout)
    except ValueError as error:
        raise RuntimeError(str(error)) from error
    saved_layers = getattr(ckpt_args, 'num_layers', None)
    if saved_layers not in (None, load.layer_maps.num_gpt_layers):
        raise RuntimeError(
            f'Hybrid layer pattern {args.hybrid_layer_pattern!r} takes a GPT checkpoint of '
            f'{load.layer_maps.num_gpt_layers} layers, and this one has {saved_layers}: give the '
            f'pattern as many attention and as many MLP positions.'
        )
    if not _UPSTREAM_RETARGETS:
        load.retarget = retarget_sharded_state_dict_to_gpt_checkpoint
    _set_up_optimizer(load, args, ckpt_args)
    _refuse_other_weights(args, ckpt_args)
    _announce(load.layer_maps, load.load_optim)
    _warn_of_another_order(load.layer_maps, args.hybrid_layer_pattern)
    if load.layout is not None and load.layout.mtp_depths and not load.layer_maps.mtp_pattern:
        print_rank_0(
            f'> WARNING: the {load.layout.mtp_depths} MTP layer(s) of the GPT checkpoint are not '
            f"read: the pattern has no MTP part, such as '/*-'."
        )
    _warn_of_other_functions(args, ckpt_args)
    return load.layer_maps, load.load_optim


def _set_up_hybrid_to_gpt_load(load: Load, args, ckpt_args) -> None:
    def refuse(reason: str) -> RuntimeError:
        return RuntimeError(
            f'{reason} The hybrid entry point, pretrain_hybrid.py, loads the checkpoint as it is.'
        )

    if _find_module(load.model, GPTModel) is None:
        raise refuse(
            f'The checkpoint is of a hybrid model (pattern {saved_pattern(ckpt_args)!r}), the run '
            f'builds neither that nor a GPT model.'
        )
    if load.layout is None or load.content_metadata is None:
        raise refuse(
            f'The checkpoint is of a hybrid model (pattern {saved_pattern(ckpt_args)!r}), and '
            f'goes into a GPT run in torch_dist format only; save it so.'
        )
    try:
        layer_maps = hybrid_checkpoint_layer_maps(load.layout)
    except ValueError as error:
        raise refuse(str(error)) from error
    pattern = args.hybrid_layer_pattern
    if args.num_layers != layer_maps.num_gpt_layers or pattern:
        raise refuse(
            f'The hybrid checkpoint makes a GPT model of {layer_maps.num_gpt_layers} layers, the '
            f'run has {args.num_layers}{f" and the pattern {pattern!r}" if pattern else ""}: '
            f'pass --num-layers {layer_maps.num_gpt_layers}, and no --hybrid-layer-pattern.'
        )
    load.layer_maps, load.retarget = layer_maps, retarget_sharded_state_dict_to_hybrid_checkpoint
    _set_up_optimizer(load, args, ckpt_args)
    _refuse_other_weights(args, ckpt_args)
    print_rank_0(
        f'> hybrid checkpoint into a GPT model: its attention and MLP layers feed '
        f'{layer_maps.num_gpt_layers} GPT layers; optimizer state '
        f'{"is loaded" if load.load_optim else "starts fresh"}.'
    )
    _warn_of_another_order(layer_maps, hybrid_checkpoint_pattern(load.layout))
    _warn_of_other_functions(args, ckpt_args)


def _set_up_optimizer(load: Load, args, ckpt_args) -> None:
    has_optimizer = not getattr(ckpt_args, 'no_save_optim', False)
    if load.layout is not None:
        has_optimizer = has_optimizer and load.layout.has_optimizer
    wanted = not args.no_load_optim and not load.release
    if wanted and not args.finetune and not has_optimizer:
        raise RuntimeError(
            'The checkpoint has no optimizer state; pass --no-load-optim to start it fresh.'
        )
    load.load_optim = wanted and has_optimizer
    if load.load_optim and load.content_metadata is not None:
        _refuse_optimizer_formats(load, args, ckpt_args)


def _announce(layer_maps: GPTCompatLayerMaps, load_optim: bool) -> None:
    print_rank_0(
        f'> GPT checkpoint into a hybrid model: {layer_maps.num_gpt_layers} GPT layers feed '
        f'{len(layer_maps.attention_to_gpt)} attention and {len(layer_maps.mlp_to_gpt)} MLP '
        f'layers; optimizer state {"is loaded" if load_optim else "starts fresh"}.'
    )
    if layer_maps.fresh_init:
        print_rank_0(
            f'> WARNING: {len(layer_maps.fresh_init)} hybrid layer(s) have no source in the GPT '
            f'checkpoint and start from their fresh initialisation.'
        )


def _warn_of_another_order(layer_maps: GPTCompatLayerMaps, pattern: str) -> None:
    if not layer_maps.keeps_gpt_order:
        print_rank_0(
            f'> WARNING: the hybrid model computes its layers in the order {pattern!r}, a GPT '
            f'model each MLP after its attention: the same weights will compute something else.'
        )


def _refuse_other_weights(args, ckpt_args) -> None:
    reason = other_weights(args, ckpt_args)
    if reason:
        raise RuntimeError(reason)


def _warn_of_other_functions(args, ckpt_args) -> None:
    for name, own, saved in other_functions(args, ckpt_args):
        print_rank_0(
            f'> WARNING: {name} is {own!r} in this run and was {saved!r} in the one that saved the '
            f'checkpoint: the same weights will compute something else.'
        )


def _checkpoint_is_hybrid(ckpt_args, layout: CheckpointLayout | None) -> bool:
    if layout is None or layout.family == 'other':
        return bool(saved_pattern(ckpt_args))
    reason = contradiction(ckpt_args, layout)
    if reason:
        raise RuntimeError(reason)
    return layout.family == 'hybrid'


def _point_at_checkpoint(
    load: Load, layer_maps: GPTCompatLayerMaps, sharded_state_dict
) -> dict[Shard, int]:
    """Make ``sharded_state_dict`` read the checkpoint; returns what has to be read then."""
    parts = {
        key: part
        for key, part in sharded_state_dict.items()
        if _MODEL_RE.fullmatch(key) or (load.load_optim and _OPTIMIZER_RE.fullmatch(key))
    }
    if load.retarget is not None:
        for part in parts.values():
            load.retarget(part, layer_maps)
    if load.layout is None:
        return {}
    return check_sources(parts, load.layout, bool(layer_maps.mtp_pattern))


def _on_first_rank(read):
    """What ``read()`` gives on rank 0, on every rank; what it raises there, on every rank."""
    if not torch.distributed.is_initialized():
        return read()
    outcome = [None]
    if torch.distributed.get_rank() == 0:
        try:
            outcome = [read()]
        except CheckpointingException as error:
            outcome = [error]
    torch.distributed.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], CheckpointingException):
        raise outcome[0]
    return outcome[0]


def _find_module(chunks: list, kind) -> torch.nn.Module | None:
    """The first chunk's module of type ``kind`` below wrappers that keep it as ``module``."""
    for module in chunks:
        while module is not None and not isinstance(module, kind):
            module = getattr(module, 'module', None)
        if module is not None:
            return module
    return None


def generate_state_dict(args, model, optimizer, *rest, **kwargs):
    """Upstream's, with the optimizer also under ``--finetune`` from the other kind of model."""
    load = _current_load
    if load is not None and load.retarget is not None and load.load_optim and optimizer is None:
        optimizer = load.optimizer
    return upstream.generate_state_dict(args, model, optimizer, *rest, **kwargs)


def check_checkpoint_args(checkpoint_args, *args, **kwargs):
    """Upstream's, but for the number of layers, which GPT and hybrid models count differently."""
    if _current_load is not None and _current_load.layer_maps is not None:
        checkpoint_args = copy.copy(checkpoint_args)
        checkpoint_args.num_layers = get_args().num_layers
    return upstream.check_checkpoint_args(checkpoint_args, *args, **kwargs)


def load_args_from_checkpoint(args, *rest, **kwargs):
    """Upstream's; a run stays what it is when it takes the arguments of the other kind.

    What shows a GPT run, where no model is built yet: it gives as many layers as the checkpoint's
    pattern has attention layers, and gives no pattern. A hybrid run has a pattern; it keeps its own
    layers and Mamba sizes, of which the arguments of a GPT run are others or mere defaults.
    """
    own = {name: getattr(args, name, None) for name in ('num_layers', 'spec', 'moe_layer_freq')}
    mamba = {name: value for name, value in vars(args).items() if name.startswith('mamba_')}
    has_pattern = bool(saved_pattern(args))
    result = upstream.load_args_from_checkpoint(args, *rest, **kwargs)
    if not has_pattern and is_pattern_of_gpt_layers(saved_pattern(args), own['num_layers']):
        args.hybrid_layer_pattern, args.spec = None, own['spec']
        args.moe_layer_freq = own['moe_layer_freq']
    if has_pattern and isinstance(result, tuple) and not saved_pattern(result[1]):
        vars(args).update(mamba, spec=own['spec'], moe_layer_freq=own['moe_layer_freq'])
    return result
