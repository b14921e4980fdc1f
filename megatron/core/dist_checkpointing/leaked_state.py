"""Optimizer state in the common state that belongs to parameters, and so doesn't belong there."""

from typing import Any

from .checkpoint_keys import is_optimizer_state
from .format_names import IN_BUCKETS


def leaked_param_states(common_state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    """The optimizers' dicts in the common state that hold a ``param_state`` they shouldn't."""
    found = []
    todo = [value for key, value in common_state_dict.items() if is_optimizer_state(str(key))]
    seen: set[int] = set()
    while todo:
        state = todo.pop()
        if not isinstance(state, dict) or id(state) in seen:
            continue
        seen.add(id(state))  # a state can contain itself
        if state.get('param_state_sharding_type') == IN_BUCKETS:
            if 'param_state' in state:
                found.append(state)
        else:
            todo.extend(state.values())
    return found
