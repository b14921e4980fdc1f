"""What one ``load_checkpoint`` call knows, and what it changes on model and optimizer meanwhile."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.dist_checkpointing.checkpoint_keys import is_extra_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.load_plan import LoadPlan
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.dist_checkpointing.stored_checkpoint import StoredCheckpoint
from megatron.training.group_schedules import stored_groups, take_schedule

_MOMENTS = {'exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'momentum_buffer'}


@dataclass
class Load:
    """What the functions inside one ``load_checkpoint`` call know of it.

    Attributes:
        model, optimizer, args, strict, scheduler: as the call has them.
        changes: what is set on model and optimizer for the call, and put back after it.
        stored: the checkpoint, then.
        plan: what is done with it.
        retarget: points the run's state at a checkpoint of the other kind; None where there is
            none, and for ``fsdp_dtensor``, where upstream does so.
        loaded: the state dict that came back.
    """

    model: list
    optimizer: Any
    args: Any
    strict: bool = True
    changes: ExitStack = field(default_factory=ExitStack)
    stored: StoredCheckpoint | None = None
    plan: LoadPlan = LoadPlan()
    retarget: Callable | None = None
    loaded: dict | None = field(default=None, repr=False)
    scheduler: Any = None


def amend_model_and_optimizer(load: Load) -> None:
    """Change how they load, until the call ends; only a load that translates needs it.

    Upstream falls back to a non-strict load, which here may pass over ``_extra_state`` only. Under
    ``--finetune`` it takes the main parameters from the weights; between GPT and hybrid they have
    been loaded by then, and the option starts the schedule anew, and nothing else.
    """
    optimizer = load.optimizer
    for module in load.model if load.strict else []:
        _replace(load, module, 'load_state_dict', _strict_loader(module))
    if optimizer is None or not load.plan.load_optim:
        return
    load_state_dict = optimizer.load_state_dict

    def load_with_own_schedule(state_dict):
        if load.args.finetune:
            take_schedule(stored_groups(state_dict), optimizer.param_groups)
        load_state_dict(state_dict)

    _replace(load, optimizer, 'load_state_dict', load_with_own_schedule)
    if load.retarget is not None:
        _replace(load, optimizer, 'reload_model_params', lambda *args, **kwargs: None)


def _replace(load: Load, owner: Any, name: str, replacement: Callable) -> None:
    """Set an attribute of the instance ``owner`` for the call."""
    if name in vars(owner):
        load.changes.callback(setattr, owner, name, vars(owner)[name])
    else:
        load.changes.callback(delattr, owner, name)
    setattr(owner, name, replacement)


def _strict_loader(module):
    original = module.load_state_dict

    def load_state_dict(state_dict, strict=True):
        if not strict:
            expected = set(module.state_dict())
            differing = [
                key
                for key in sorted(expected.symmetric_difference(state_dict))
                if not is_extra_state(key)
            ]
            if differing:
                where = 'missing from' if differing[0] in expected else 'only in'
                raise CheckpointingException(
                    f'{differing[0]}: {where} the loaded state ({len(differing)} such keys); '
                    f'between checkpoint and model only _extra_state may differ.'
                )
        return original(state_dict, strict=strict)

    return load_state_dict


def zero_moments_of_fresh_layers(optimizer_state: Any) -> None:
    """Let the moments of what isn't read begin anew, in a sharded state dict, in place.

    An optimizer that has stepped holds some that belong to other weights of the other layers.
    """
    values = optimizer_state.values() if isinstance(optimizer_state, dict) else optimizer_state
    for value in values:
        if isinstance(value, (dict, list)):
            zero_moments_of_fresh_layers(value)
    if isinstance(optimizer_state, dict):
        for name in _MOMENTS & optimizer_state.keys():
            value = optimizer_state[name]
            if isinstance(value, LocalNonpersistentObject):
                optimizer_state[name] = LocalNonpersistentObject(torch.zeros_like(value.unwrap()))


def make_dicts_of_mixed_lists(state: Any, path: tuple = ()) -> list[tuple]:
    """Turn lists of which only a part is read into dicts, in place.

    An optimizer that isn't distributed has its main parameters in lists. ``dist_checkpointing``
    puts together what was read and what wasn't, and of lists it doesn't know which is which.

    Args:
        state: a sharded state dict, or a dict or list in one.
        path: where in it that is.

    Returns:
        where the lists were, inner ones first.
    """
    found = []
    for key, value in list(state.items() if isinstance(state, dict) else enumerate(state)):
        if isinstance(value, (dict, list)):
            found += make_dicts_of_mixed_lists(value, (*path, key))
        if isinstance(value, list):
            kinds = {isinstance(entry, LocalNonpersistentObject) for entry in _sharded(value)}
            if len(kinds) == 2:
                state[key] = dict(enumerate(value))
                found.append((*path, key))
    return found


def _sharded(value: list):
    values = nested_values(value)
    return (x for x in values if isinstance(x, (ShardedBase, LocalNonpersistentObject)))


def make_lists_again(state: dict, paths: list[tuple]) -> None:
    """Undo :func:`make_dicts_of_mixed_lists` on what was loaded."""
    for *path, last in paths:
        parent = state
        for key in path:
            parent = parent[key]
        parent[last] = [entry for _, entry in sorted(parent[last].items())]


def load_optimizer_when_finetuning(load: Load) -> None:
    """Load what upstream leaves alone under ``--finetune``, where it doesn't retarget itself."""
    asked = load.retarget is not None and load.plan.load_optim and load.args.finetune
    if asked and load.loaded is not None and not load.optimizer.is_stub_optimizer:
        load.optimizer.load_state_dict(load.loaded['optimizer'])
