"""What one ``load_checkpoint`` call knows, and what it changes on model and optimizer meanwhile."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron.core.dist_checkpointing.checkpoint_layout import CheckpointLayout
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import GPTCompatLayerMaps
from megatron.training.global_vars import get_args
from megatron.training.group_schedules import stored_groups, take_schedule


@dataclass
class Load:
    """What the functions inside one ``load_checkpoint`` call know of it.

    Attributes:
        layout, content_metadata, release: of the checkpoint, once it has been looked at.
        layer_maps: there when the checkpoint is of the other kind than the run.
        retarget: points the run's state at it then; None where upstream does so.
        load_optim: the optimizer's state is translated too.
        loaded: the state dict that came back.
    """

    model: list
    optimizer: Any
    layout: CheckpointLayout | None = None
    content_metadata: dict | None = None
    release: bool = False
    layer_maps: GPTCompatLayerMaps | None = None
    retarget: Callable | None = None
    load_optim: bool = False
    loaded: dict | None = field(default=None, repr=False)


@contextmanager
def strict_but_for_extra_state(load: Load):
    """Keep upstream from falling back to a non-strict load for anything but ``_extra_state``."""
    for module in load.model:
        module.load_state_dict = _strict_loader(load, module)
    try:
        yield
    finally:
        for module in load.model:
            del module.load_state_dict


def _strict_loader(load: Load, module):
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


def load_optimizer_when_finetuning(load: Load) -> None:
    """Load what upstream leaves alone under ``--finetune``, but for 0.19 and a GPT checkpoint."""
    if load.load_optim and load.loaded is not None and get_args().finetune:
        take_schedule(stored_groups(load.loaded['optimizer']), load.optimizer.param_groups)
        load.optimizer.load_state_dict(load.loaded['optimizer'])


@contextmanager
def finetuning_keeps_the_optimizer(load: Load):
    """Between GPT and hybrid ``--finetune`` starts the schedule anew, and nothing else.

    Upstream takes the main parameters from the weights then, and by now they have been loaded.
    """
    optimizer = load.optimizer
    if optimizer is None:
        yield
        return
    reload_model_params, load_state_dict = optimizer.reload_model_params, optimizer.load_state_dict

    def reload_unless_loaded(*args, **kwargs):
        if load.retarget is None or not load.load_optim:
            reload_model_params(*args, **kwargs)

    def load_with_own_schedule(state_dict):
        # Asked for this late, as --pretrained-checkpoint turns it on within the load.
        if load.layer_maps is not None and get_args().finetune:
            take_schedule(stored_groups(state_dict), optimizer.param_groups)
        load_state_dict(state_dict)

    optimizer.reload_model_params = reload_unless_loaded
    optimizer.load_state_dict = load_with_own_schedule
    try:
        yield
    finally:
        del optimizer.reload_model_params, optimizer.load_state_dict
