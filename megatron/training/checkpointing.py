"""Amends upstream's ``load_checkpoint`` for GPT checkpoints in HybridModel runs, and the reverse.

The steps are added around the functions that ``load_checkpoint`` is made of. From 0.19 on upstream
has steps of its own for a GPT checkpoint in a hybrid run; it is left those for ``fsdp_dtensor``.
"""

import copy
import functools
import types
from collections.abc import Set
from contextlib import ExitStack
from functools import partial

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.checkpoint_keys import (
    OPTIMIZER,
    is_model_part,
    is_of_fsdp,
    is_optimizer_state,
)
from megatron.core.dist_checkpointing.checkpoint_layout import (
    check_sources,
    layout_from_keys,
    read_checkpoint_layout,
)
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.format_names import (
    FSDP_DTENSOR,
    GPT,
    HYBRID,
    OTHER,
    TORCH_DIST,
)
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    GPTCompatLayerMaps,
    is_partly_read,
    retarget_sharded_state_dict_to_gpt_checkpoint,
)
from megatron.core.dist_checkpointing.hybrid_checkpoint_interop import (
    is_pattern_of_gpt_layers,
    retarget_sharded_state_dict_to_hybrid_checkpoint,
)
from megatron.core.dist_checkpointing.load_plan import LEGACY_REFUSAL, plan_load
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.optimizer_load import other_format_refusal
from megatron.core.dist_checkpointing.read_record import DTensorLoadPlanner, Shard, recording_reads
from megatron.core.dist_checkpointing.saved_arguments import arguments_in, saved_pattern
from megatron.core.dist_checkpointing.stored_checkpoint import StoredCheckpoint
from megatron.core.dist_checkpointing.unstored_state import (
    saved_without_optimizer,
    unstored_reason,
    unstored_state,
)
from megatron.core.dist_checkpointing.validation import reading_parts
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid import hybrid_model
from megatron.training.gpt_hybrid_load import (
    Load,
    amend_model_and_optimizer,
    load_optimizer_when_finetuning,
    make_dicts_of_mixed_lists,
    make_lists_again,
    zero_moments_of_fresh_layers,
)
from megatron.training.group_schedules import settle_schedules, settled_groups

import megatron_overlay
from megatron_overlay._finder import core_version

upstream = megatron_overlay.upstream(__name__)
CheckpointType = upstream.CheckpointType
# Looked up here, where upstream looks them up and others replace them.
get_args, print_rank_0 = upstream.get_args, upstream.print_rank_0
unwrap_model = upstream.unwrap_model
# Upstream asks this module of torch's for the planner of `fsdp_dtensor`.
default_planner = types.SimpleNamespace(DefaultLoadPlanner=DTensorLoadPlanner)

_DEFAULT_STRICTNESS = 'assume_ok_unexpected'

_current_load: Load | None = None


@functools.cache
def _tell_that_this_is_active() -> None:
    """One line a process, in rank 0's log."""
    left_out = len(megatron_overlay.finder.left_out())
    but_for = f', but for {left_out} of its modules' if left_out else ''
    print_rank_0(
        f'> megatron_overlay {megatron_overlay.__version__} is active over megatron-core '
        f'{core_version()[0]}{but_for}.'
    )


def load_checkpoint(
    ddp_model, optimizer, opt_param_scheduler, load_arg='load', strict=True, *args, **kwargs
):
    """Upstream's, which also takes a GPT checkpoint into a HybridModel run, and the reverse.

    Raises:
        RuntimeError: the checkpoint and the run don't go together.
        CheckpointingException: the checkpoint and the model don't have the same weights.
    """
    global _current_load
    _tell_that_this_is_active()
    outer = _current_load
    with ExitStack() as changes:
        _current_load = Load(
            ddp_model, optimizer, get_args(), strict, changes, scheduler=opt_param_scheduler
        )
        try:
            with settled_groups(optimizer, opt_param_scheduler, get_args()):
                result = upstream.load_checkpoint(
                    ddp_model, optimizer, opt_param_scheduler, load_arg, strict, *args, **kwargs
                )
                if not kwargs.get('skip_load_to_model_and_opt'):
                    load_optimizer_when_finetuning(_current_load)
            return result
        finally:
            _current_load = outer


def _load_base_checkpoint(load_dir, args, rank0=False, sharded_state_dict=None, **kwargs):
    """Upstream's, between the steps that a checkpoint of the other kind adds."""
    load = _current_load
    layer_maps = None if load is None or rank0 else load.plan.layer_maps
    to_read, mixed, partly_read = {}, [], None
    if load is not None and layer_maps is not None:
        to_read = _point_at_checkpoint(load, layer_maps, sharded_state_dict)
        mixed = make_dicts_of_mixed_lists(sharded_state_dict)
        partly_read = partial(is_partly_read, layer_maps=layer_maps)
        amend_model_and_optimizer(load)
    if load is not None and not rank0:
        _refuse_what_is_not_stored(load, sharded_state_dict, args)
    with recording_reads(to_read) as record, reading_parts(partly_read):
        result = upstream._load_base_checkpoint(
            load_dir, args, rank0=rank0, sharded_state_dict=sharded_state_dict, **kwargs
        )
    result = _without_mismatches(result[0]), *result[1:]
    if layer_maps is not None:
        record.check()
    if result[0] is not None and isinstance(result[0].get('args'), dict):
        result[0]['args'] = arguments_in(result[0])  # upstream asks for attributes
    if load is None or result[0] is None:
        return result
    if rank0:
        _look_at_checkpoint(load, args, *result)
    else:
        if result[3] is CheckpointType.LEGACY:  # with --ckpt-format torch nobody looked before
            _refuse_other_legacy(result[0], result[1], _kind(unwrap_model(load.model)))
        make_lists_again(result[0], mixed)
        load.loaded = result[0]
        settle_schedules(result[0], load.optimizer, args)
    return result


def _without_mismatches(loaded):
    """What was loaded, also where ``--dist-ckpt-strictness return_…`` adds keys that didn't match.

    Upstream takes all of it for the state dict.
    """
    if not isinstance(loaded, tuple):
        return loaded
    state_dict, missing, unexpected = loaded
    for where, keys in (('the checkpoint', missing), ('the run', unexpected)):
        if keys:
            print_rank_0(
                f'> WARNING: {len(keys)} keys are only in {where} and not loaded, such as '
                f'{min(keys)}.'
            )
    return state_dict


def _look_at_checkpoint(load: Load, args, state_dict, checkpoint_name, release, ckpt_type) -> None:
    model = unwrap_model(load.model)
    if ckpt_type is CheckpointType.LEGACY:
        _refuse_other_legacy(state_dict, checkpoint_name, _kind(model))
        return
    formats = {CheckpointType.GLOBAL: TORCH_DIST, CheckpointType.FSDP_DTENSOR: FSDP_DTENSOR}
    _refuse_other_format(args, checkpoint_name, ckpt_type)
    if ckpt_type not in formats:
        return
    common = {'args': arguments_in(state_dict)}
    if ckpt_type is CheckpointType.GLOBAL:
        common['content_metadata'] = dist_checkpointing.load_content_metadata(
            preloaded_state_dict=state_dict
        )
    layout = None
    if _kind(model) != OTHER:
        layout = _on_first_rank(lambda: read_checkpoint_layout(checkpoint_name))
    load.stored = StoredCheckpoint(layout, common, formats[ckpt_type], release, checkpoint_name)
    _decide(load, load.stored, args, model)


def _refuse_other_format(args, checkpoint_name: str, ckpt_type) -> None:
    """Upstream would read nothing of them, and train on from random weights or end with a key."""
    if ckpt_type is CheckpointType.GLOBAL and getattr(args, 'use_megatron_fsdp', False):
        raise RuntimeError(other_format_refusal(TORCH_DIST, FSDP_DTENSOR, checkpoint_name))
    if ckpt_type is CheckpointType.TORCH_DCP and args.ckpt_format == TORCH_DIST:
        layout = _on_first_rank(lambda: read_checkpoint_layout(checkpoint_name))
        if is_of_fsdp(layout.keys):
            raise RuntimeError(other_format_refusal(FSDP_DTENSOR, TORCH_DIST, checkpoint_name))


def _refuse_what_is_not_stored(load: Load, sharded_state_dict: dict | None, args) -> None:
    """End before a weight has changed, where upstream and DCP end with keys alone."""
    unstored = {} if load.stored is None else unstored_state(load.stored)
    if load.stored is None or not unstored:
        return
    asked = [[name for name in unstored if _is_asked_for(name, load, sharded_state_dict, args)]]
    if torch.distributed.is_initialized():  # a rank whose parameters are frozen has no optimizer
        asked *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(asked, asked[0])
    wanted = set().union(*asked)
    if wanted:
        reason = unstored_reason({name: unstored[name] for name in unstored if name in wanted})
        raise CheckpointingException(f'{load.stored.directory}: {reason}')


def _is_asked_for(name: str, load: Load, sharded_state_dict: dict | None, args) -> bool:
    """Whether this rank can't do without ``name``, which the checkpoint doesn't have."""
    stored = load.stored
    assert stored is not None
    if name == OPTIMIZER and stored.format == TORCH_DIST and saved_without_optimizer(stored):
        # Upstream doesn't ask for it, and looks for it when the weights have been loaded.
        has_state = load.scheduler is not None or not getattr(
            load.optimizer, 'is_stub_optimizer', load.optimizer is None
        )
        return has_state and not args.no_load_optim and not args.finetune
    missing_keys_are_errors = getattr(args, 'dist_ckpt_strictness', '') == _DEFAULT_STRICTNESS
    if stored.layout is None or not missing_keys_are_errors:
        return False
    return _asks_for_others(sharded_state_dict, name, stored.layout.keys)


def _asks_for_others(sharded_state_dict: dict | None, name: str, keys: Set[str]) -> bool:
    """Whether a part of the request has keys that aren't there; optimizers may have their own."""
    values = nested_values({name: (sharded_state_dict or {}).get(name)})
    return any(isinstance(x, (ShardedTensor, ShardedObject)) and x.key not in keys for x in values)


def _refuse_other_legacy(state_dict: dict, checkpoint_name: str, run: str) -> None:
    """Layers of the other kind of model have the same names, and other weights."""
    keys = {key for name, chunk in state_dict.items() if is_model_part(name) for key in chunk}
    source = layout_from_keys(dict.fromkeys(keys, ())).family
    if source == OTHER and saved_pattern(arguments_in(state_dict)):
        source = HYBRID  # of which this rank has no telling layer
    if {run, source} == {GPT, HYBRID}:
        directory = checkpoint_name.partition('/mp_rank_')[0]
        raise RuntimeError(f'{directory}: {LEGACY_REFUSAL}.')


def _decide(load: Load, stored: StoredCheckpoint, args, model) -> None:
    """Make the plan, and tell those who start the run what it is.

    Raises:
        RuntimeError: the checkpoint can't go into the run; keys and arguments contradict.
    """
    if _current_load is not None and load.optimizer is None:  # to generate, to export
        args = copy.copy(args)
        args.no_load_optim = True
    load.plan = plan = plan_load(stored, args, _kind(model))
    if plan.refusal or plan.optimizer_refusal:
        raise RuntimeError(plan.refusal or plan.optimizer_refusal)
    for note in plan.notes:
        print_rank_0(f'> {note}')
    if plan.source == HYBRID:
        load.retarget = retarget_sharded_state_dict_to_hybrid_checkpoint
    elif plan.source == GPT and stored.format == TORCH_DIST:
        load.retarget = retarget_sharded_state_dict_to_gpt_checkpoint


def _maybe_setup_gpt_to_hybrid_load(args, ckpt_args, model):
    """What upstream, from 0.19 on, is to do itself with a checkpoint of the other kind.

    In a load that is to rename what is in ``fsdp_dtensor``, and nothing else.

    Returns:
        For a GPT checkpoint the layer maps, and whether optimizer state is loaded;
        ``(None, False)`` where upstream has nothing to do.

    Raises:
        RuntimeError: as ``_decide``.
    """
    load = _current_load or Load(model, None, args)
    if load.stored is None:  # nobody has looked at its keys
        _decide(load, StoredCheckpoint(None, {'args': ckpt_args}), args, model)
    if load.plan.source == HYBRID or (_current_load is not None and load.retarget is not None):
        return None, False
    return load.plan.layer_maps, load.plan.load_optim


def _point_at_checkpoint(
    load: Load, layer_maps: GPTCompatLayerMaps, sharded_state_dict
) -> dict[Shard, int]:
    """Make ``sharded_state_dict`` read the checkpoint; returns what has to be read then."""
    parts = {
        key: part
        for key, part in sharded_state_dict.items()
        if is_model_part(key) or (load.plan.load_optim and is_optimizer_state(key))
    }
    if load.retarget is not None:
        for part in parts.values():
            load.retarget(part, layer_maps)
    zero_moments_of_fresh_layers([part for key, part in parts.items() if is_optimizer_state(key)])
    if load.stored is None or load.stored.layout is None:
        return {}
    return check_sources(
        parts, load.stored.layout, bool(layer_maps.mtp_pattern), layer_maps.may_be_unread
    )


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


def _kind(chunks: list) -> str:
    """Of the model, which wrappers keep as ``module``."""
    for kind, model in ((HYBRID, hybrid_model.HybridModel), (GPT, GPTModel)):
        for module in chunks:
            while module is not None and not isinstance(module, model):
                module = getattr(module, 'module', None)
            if module is not None:
                return kind
    return OTHER


def generate_state_dict(args, model, optimizer, *rest, **kwargs):
    """Upstream's, with the optimizer also under ``--finetune`` from the other kind of model."""
    _tell_that_this_is_active()  # a run that loads nothing saves
    load = _current_load
    if load is not None and load.retarget and load.plan.load_optim and optimizer is None:
        optimizer = load.optimizer
    return upstream.generate_state_dict(args, model, optimizer, *rest, **kwargs)


def check_checkpoint_args(checkpoint_args, *args, **kwargs):
    """Upstream's, but for the number of layers, which GPT and hybrid models count differently."""
    if _current_load is not None and _current_load.plan.layer_maps is not None:
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
