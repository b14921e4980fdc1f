"""Amends upstream's ``load_checkpoint`` for GPT checkpoints that go into HybridModel runs.

On 0.19 upstream retargets by itself; what is amended there is how a GPT checkpoint is recognised,
and that nothing which should have been read stays random. On 0.18 the steps are added around the
functions that ``load_checkpoint`` is made of.
"""

import copy
import re
import types
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
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
from megatron.core.dist_checkpointing.read_record import (
    DTensorLoadPlanner,
    Shard,
    recording_reads,
)
from megatron.core.dist_checkpointing.serialization import load_content_metadata
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.training.global_vars import get_args
from megatron.training.utils import print_rank_0

import megatron_overlay

upstream = megatron_overlay.upstream(__name__)
CheckpointType = upstream.CheckpointType
# Upstream asks this module of torch's for the planner of `fsdp_dtensor`.
default_planner = types.SimpleNamespace(DefaultLoadPlanner=DTensorLoadPlanner)

_UPSTREAM_RETARGETS = hasattr(upstream, '_maybe_setup_gpt_to_hybrid_load')
_WEIGHTLESS = (
    'position_embedding_type',
    'rotary_base',
    'rotary_percent',
    'normalization',
    'norm_epsilon',
    'swiglu',
    'squared_relu',
    'openai_gelu',
    'num_query_groups',
)
_MODEL_RE, _OPTIMIZER_RE = re.compile(r'model\d*'), re.compile(r'optimizer\d*')


@dataclass
class _Load:
    """What the functions inside one ``load_checkpoint`` call know of it."""

    model: list
    optimizer: object
    layout: CheckpointLayout | None = None
    content_metadata: dict | None = None
    release: bool = False
    layer_maps: GPTCompatLayerMaps | None = None
    load_optim: bool = False
    loaded: dict | None = field(default=None, repr=False)


_current_load: _Load | None = None


def load_checkpoint(
    ddp_model, optimizer, opt_param_scheduler, load_arg='load', strict=True, *args, **kwargs
):
    """Upstream's ``load_checkpoint``, which also takes a GPT checkpoint into a HybridModel run.

    Raises:
        RuntimeError: the checkpoint and the run don't go together.
        CheckpointingException: the checkpoint and the model don't have the same weights.
    """
    global _current_load
    outer, _current_load = _current_load, _Load(list(ddp_model), optimizer)
    try:
        guard = _strict_but_for_extra_state(_current_load) if strict else nullcontext()
        with guard:
            result = upstream.load_checkpoint(
                ddp_model, optimizer, opt_param_scheduler, load_arg, strict, *args, **kwargs
            )
        if not _UPSTREAM_RETARGETS:
            _load_optimizer_when_finetuning(_current_load)
        return result
    finally:
        _current_load = outer


def _load_base_checkpoint(load_dir, args, rank0=False, sharded_state_dict=None, **kwargs):
    """Upstream's, between the steps that a GPT checkpoint adds."""
    load = _current_load
    to_read = {}
    if load is not None and not rank0 and load.layer_maps is not None:
        to_read = _point_at_gpt_checkpoint(load, args, sharded_state_dict)
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
    return result


def _look_at_checkpoint(load: _Load, args, state_dict, checkpoint_name, release, ckpt_type) -> None:
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
    load.load_optim = load.load_optim and not release
    if load.layer_maps is not None and ckpt_type is CheckpointType.FSDP_DTENSOR:
        raise RuntimeError(
            f'{checkpoint_name}: a GPT checkpoint in fsdp_dtensor format goes into a hybrid run '
            f'from megatron-core 0.19 on; save it as torch_dist, or upgrade.'
        )


def _refuse_optimizer_formats(load: _Load, args, ckpt_args) -> None:
    """Only state by parameter can be translated, not state by buffer or by position."""
    sharding_type = stored_optimizer_format(load.content_metadata, ckpt_args)
    if sharding_type not in MODEL_SPACE_FORMATS:
        raise RuntimeError(
            f'The optimizer state of the GPT checkpoint is '
            f'{sharding_type or "that of an optimizer which is not distributed"!r}; a hybrid run '
            f'can read {" or ".join(MODEL_SPACE_FORMATS)}. Save it again with '
            f'--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable, or pass '
            f'--no-load-optim.'
        )
    if not args.use_distributed_optimizer:
        raise RuntimeError(
            f'The optimizer state of the GPT checkpoint is {sharding_type!r}: pass '
            f'--use-distributed-optimizer to load it, or --no-load-optim.'
        )


def _maybe_setup_gpt_to_hybrid_load(args, ckpt_args, model):
    """Find out whether a GPT checkpoint goes into a hybrid run.

    The keys of the checkpoint decide where they are known, the saved arguments elsewhere.

    Returns:
        The layer maps, and whether optimizer state is loaded; ``(None, False)`` where the
        checkpoint is of the run's own kind.

    Raises:
        RuntimeError: the checkpoint can't go into the run; keys and arguments contradict.
    """
    load = _current_load or _Load(list(model), None)
    run_is_hybrid = _find_module(model, HybridModel) is not None
    checkpoint_is_hybrid = _checkpoint_is_hybrid(ckpt_args, load.layout)
    if run_is_hybrid == checkpoint_is_hybrid:
        return None, False
    if not run_is_hybrid:
        raise RuntimeError(
            f'The checkpoint is of a hybrid model (pattern {_saved_pattern(ckpt_args)!r}), the run '
            f'builds another one. Load it with the hybrid entry point, pretrain_hybrid.py.'
        )
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
    has_optimizer = not getattr(ckpt_args, 'no_save_optim', False)
    load.load_optim = has_optimizer and not args.no_load_optim
    if load.load_optim and not load.release and load.content_metadata is not None:
        _refuse_optimizer_formats(load, args, ckpt_args)
    _announce(load.layer_maps, load.load_optim)
    if load.layout is not None and load.layout.mtp_depths and not load.layer_maps.mtp_pattern:
        print_rank_0(
            f'> WARNING: the {load.layout.mtp_depths} MTP layer(s) of the GPT checkpoint are not '
            f"read: the pattern has no MTP part, such as '/*-'."
        )
    _warn_of_other_functions(args, ckpt_args)
    return load.layer_maps, load.load_optim


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


def _warn_of_other_functions(args, ckpt_args) -> None:
    # These have no weights: a difference changes what the same weights compute.
    for name in _WEIGHTLESS:
        if not hasattr(args, name) or not hasattr(ckpt_args, name):
            continue
        own, saved = getattr(args, name), getattr(ckpt_args, name)
        if own != saved:
            print_rank_0(
                f'> WARNING: {name} is {own!r} in this run and was {saved!r} in the GPT run: the '
                f'same weights will compute something else.'
            )


def _checkpoint_is_hybrid(ckpt_args, layout: CheckpointLayout | None) -> bool:
    pattern = _saved_pattern(ckpt_args)
    if layout is None or layout.family == 'other':
        return bool(pattern)
    if pattern and layout.family != 'hybrid':
        raise RuntimeError(
            f'The checkpoint contradicts itself: its arguments have the hybrid layer pattern '
            f'{pattern!r}, its key {layout.evidence!r} is of a GPT model. Load a checkpoint whose '
            f'files belong together.'
        )
    return layout.family == 'hybrid'


def _saved_pattern(ckpt_args) -> str | None:
    # The second name is the one before 0.16.
    return getattr(ckpt_args, 'hybrid_layer_pattern', None) or getattr(
        ckpt_args, 'hybrid_override_pattern', None
    )


def _point_at_gpt_checkpoint(load: _Load, args, sharded_state_dict) -> dict[Shard, int]:
    """Make ``sharded_state_dict`` read the GPT checkpoint; returns what has to be read then."""
    parts = {
        key: part
        for key, part in sharded_state_dict.items()
        if _MODEL_RE.fullmatch(key) or (load.load_optim and _OPTIMIZER_RE.fullmatch(key))
    }
    if not _UPSTREAM_RETARGETS:
        for part in parts.values():
            retarget_sharded_state_dict_to_gpt_checkpoint(part, load.layer_maps)
    to_read = {}
    if load.layout is not None:
        to_read = check_sources(parts, load.layout, bool(load.layer_maps.mtp_pattern))
    wants_optimizer = not args.no_load_optim and not args.finetune
    if wants_optimizer and load.layout is not None and not load.layout.has_optimizer:
        raise RuntimeError(
            'The GPT checkpoint has no optimizer state; pass --no-load-optim to start it fresh.'
        )
    return to_read


@contextmanager
def _strict_but_for_extra_state(load: _Load):
    """Keep upstream from falling back to a non-strict load for anything but ``_extra_state``."""
    for module in load.model:
        module.load_state_dict = _strict_loader(load, module)
    try:
        yield
    finally:
        for module in load.model:
            del module.load_state_dict


def _strict_loader(load: _Load, module):
    original = module.load_state_dict

    def load_state_dict(state_dict, strict=True):
        if load.layer_maps is not None and not strict:
            expected = set(module.state_dict())
            differing = [
                key
                for key in sorted(expected.symmetric_difference(state_dict))
                if not key.endswith('_extra_state')
            ]
            if differing:
                where = 'missing from' if differing[0] in expected else 'only in'
                raise CheckpointingException(
                    f'{differing[0]}: {where} the loaded state ({len(differing)} such keys); '
                    f'between checkpoint and model only _extra_state may differ.'
                )
        return original(state_dict, strict=strict)

    return load_state_dict


def _load_optimizer_when_finetuning(load: _Load) -> None:
    # 0.18 leaves the optimizer alone under --finetune; 0.19 loads a GPT checkpoint's.
    if load.load_optim and load.loaded is not None and get_args().finetune:
        load.optimizer.load_state_dict(load.loaded['optimizer'])


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


if not _UPSTREAM_RETARGETS:

    def generate_state_dict(args, model, optimizer, *rest, **kwargs):
        """Upstream's, with the optimizer also under ``--finetune`` from a GPT checkpoint."""
        load = _current_load
        if load is not None and load.load_optim and optimizer is None:
            optimizer = load.optimizer
        return upstream.generate_state_dict(args, model, optimizer, *rest, **kwargs)

    def check_checkpoint_args(checkpoint_args):
        """Upstream's, but for the number of layers when GPT layers go into hybrid ones."""
        if _current_load is not None and _current_load.layer_maps is not None:
            checkpoint_args = copy.copy(checkpoint_args)
            checkpoint_args.num_layers = get_args().num_layers
        return upstream.check_checkpoint_args(checkpoint_args)
