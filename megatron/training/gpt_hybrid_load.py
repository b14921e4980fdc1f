"""What one ``load_checkpoint`` call knows, and what it changes on model and optimizer meanwhile."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron.core.dist_checkpointing.checkpoint_layout import CheckpointLayout
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import GPTCompatLayerMaps
from megatron.core.optimizer.optimizer import (  # type: ignore[attr-defined]
    param_group_identifier_keys,
)
from megatron.training.global_vars import get_args

# What the scheduler sets in a group of parameters, or goes by; and what else tells groups apart.
# Experts may be in groups of their own in one of the runs and not in the other.
_SCHEDULE = ('lr', 'max_lr', 'min_lr', 'weight_decay', 'start_wd', 'end_wd')
_KIND = [
    key for key in param_group_identifier_keys if key not in (*_SCHEDULE, 'is_expert_parallel')
]


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
        _take_own_schedule(load.loaded['optimizer'], load.optimizer)
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
            _take_own_schedule(state_dict, optimizer)
        load_state_dict(state_dict)

    optimizer.reload_model_params = reload_unless_loaded
    optimizer.load_state_dict = load_with_own_schedule
    try:
        yield
    finally:
        del optimizer.reload_model_params, optimizer.load_state_dict


def _take_own_schedule(state_dict: dict, optimizer) -> None:
    """Give each loaded group what the run's groups of its kind have, where they have the same."""
    for group in _stored_groups(state_dict):
        of_its_kind = [own for own in optimizer.param_groups if _kind(own) == _kind(group)]
        same_rates = [own for own in of_its_kind if _rates(own) == _rates(group)]
        for alike in (of_its_kind, same_rates):
            own = {
                tuple((name, each[name]) for name in _SCHEDULE if name in each) for each in alike
            }
            if len(own) == 1:
                group.update(own.pop())
                break


def _rates(group: dict) -> tuple:
    return group.get('max_lr'), group.get('min_lr')


def _kind(group: dict) -> tuple:
    return tuple(group.get(key, group.get(f'pre_{key}')) for key in _KIND)


def _stored_groups(state_dict: dict):
    if 'optimizer' in state_dict:
        yield from state_dict['optimizer']['param_groups']
    else:
        for part in state_dict.values():
            yield from _stored_groups(part)
