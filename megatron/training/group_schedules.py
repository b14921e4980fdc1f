"""Whose learning rates and weight decay count when a checkpoint's optimizer state is loaded.

Groups of parameters carry their part of the schedule, and from 0.19 on are told apart by it. So one
side takes the other's before they are compared.
"""

from collections.abc import Iterator
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
    if optimizer is None or args.finetune or args.no_load_optim:
        return
    stored = list(stored_groups(state_dict.get('optimizer')))
    if getattr(args, 'override_opt_param_scheduler', False):
        take_schedule(stored, optimizer.param_groups)
    elif getattr(args, 'use_checkpoint_opt_param_scheduler', False):
        take_schedule(optimizer.param_groups, stored)


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
            schedules = {
                tuple((name, each[name]) for name in _SCHEDULE if name in each) for each in alike
            }
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
