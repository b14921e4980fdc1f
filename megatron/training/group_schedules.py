"""Whose learning rates and weight decay count when a checkpoint's optimizer state is loaded.

Groups of parameters carry their part of the schedule, and from 0.19 on are told apart by it. So one
side takes the other's before they are compared.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer.optimizer import (  # type: ignore[attr-defined]
    group_identity,
    group_rates,
    param_group_identifier_keys,
)

# What the scheduler sets in a group of parameters, or goes by; and what else tells groups apart.
# Experts may be in groups of their own in one of the runs and not in the other.
_SCHEDULE = ('lr', 'max_lr', 'min_lr', 'weight_decay', 'start_wd', 'end_wd')
_KIND = [
    key for key in param_group_identifier_keys if key not in (*_SCHEDULE, 'is_expert_parallel')
]


def settle_schedules(state_dict: dict[str, Any], optimizer, args) -> None:
    """Let the options of a resumed run say whose schedule counts, in its groups as well.

    ``--override-opt-param-scheduler``: the run's; the loaded groups take it.
    ``--use-checkpoint-opt-param-scheduler``: the checkpoint's; the run's groups take it.
    """
    if not _loads_schedule(optimizer, args):
        return
    stored = list(stored_groups(state_dict.get('optimizer')))
    if _own_schedule_counts(args):
        take_schedule(stored, optimizer.param_groups)
    elif _stored_schedule_counts(args):
        take_schedule(optimizer.param_groups, stored)


@contextmanager
def settled_groups(optimizer, scheduler, args) -> Iterator[None]:
    """A load inside ends with each group as the options and the loaded scheduler say.

    Under ``--override-opt-param-scheduler`` that is the schedule it began with. From 0.20 on
    upstream gives all groups that aren't marked ``--lr`` after the load, whatever rates they have.
    """
    keeps = _own_schedule_counts(args) and _loads_schedule(optimizer, args)
    own = _unmarked_schedules(optimizer.param_groups) if keeps else {}
    yield
    for index, schedule in own.items():
        optimizer.param_groups[index].update(schedule)
    if scheduler is not None and (keeps or _stored_schedule_counts(args)):
        # upstream's sets the groups' weight decay before it has the checkpoint's
        scheduler.step(increment=0)


def _loads_schedule(optimizer, args) -> bool:
    return optimizer is not None and not args.finetune and not args.no_load_optim


def _own_schedule_counts(args) -> bool:
    return getattr(args, 'override_opt_param_scheduler', False)


def _stored_schedule_counts(args) -> bool:
    return getattr(args, 'use_checkpoint_opt_param_scheduler', False)


def _unmarked_schedules(groups: list[dict]) -> dict[int, dict]:
    """By index, of groups without the mark of another rate; none where their rates are alike."""
    unmarked = {i: group for i, group in enumerate(groups) if not group.get('is_decoupled_lr')}
    if len({group_rates(group) for group in unmarked.values()}) < 2:
        return {}
    return {index: _schedule(group) for index, group in unmarked.items()}


def _schedule(group: dict) -> dict:
    return {name: group[name] for name in _SCHEDULE if name in group}


def take_schedule(groups, others: list[dict]) -> None:
    """Give each group what the others of its kind have, where those have the same."""
    for group in groups:
        kind = group_identity(group, _KIND)
        of_its_kind = [other for other in others if group_identity(other, _KIND) == kind]
        for alike in (
            of_its_kind,
            [o for o in of_its_kind if o.get('default_config') == group.get('default_config')],
            [o for o in of_its_kind if group_rates(o) == group_rates(group)],
        ):
            schedules = {tuple(_schedule(each).items()) for each in alike}
            if len(schedules) == 1:
                group.update(schedules.pop())
                break


def stored_groups(state: Any) -> Iterator[dict]:
    """Every group in the state of one optimizer, or of several in a dict or a list."""
    if isinstance(state, list):
        state = dict(enumerate(state))
    if not isinstance(state, dict):
        return
    if 'param_groups' in state:
        yield from state['param_groups']
    else:
        for part in state.values():
            yield from stored_groups(part)
