"""Amends upstream's ``ChainedOptimizer`` for checkpoints with another number of optimizers."""

from collections.abc import Sequence

from megatron.core.dist_checkpointing.core import CheckpointingException

import megatron_overlay

upstream = megatron_overlay.upstream(__name__)

# A run with expert parallelism has an optimizer of its own for the experts; one without has not.
_SPLIT_BY = 'is_expert_parallel'


class ChainedOptimizer(upstream.ChainedOptimizer):  # type: ignore[name-defined]
    """Upstream's, loading model-space state that another expert parallel size was saved from.

    The state of parameters follows the run's own structure already. Only the groups' settings
    (step, learning rate, …), which are stored by optimizer, have to be dealt out anew.
    """

    def load_state_dict(self, state_dict):
        """Upstream's, for a state dict with more or fewer optimizers than the run's too."""
        if isinstance(state_dict, dict):
            state_dict = self._with_own_number_of_optimizers(state_dict)
        super().load_state_dict(state_dict)

    def _with_own_number_of_optimizers(self, state_dict: dict) -> dict:
        by_optimizer = {key: part for key, part in state_dict.items() if isinstance(key, int)}
        rest = {key: part for key, part in state_dict.items() if not isinstance(key, int)}
        stored = [part for part in [rest, *by_optimizer.values()] if 'optimizer' in part]
        run_is_split = len(self.chained_optimizers) > 1
        stored_is_split = 'optimizer' not in rest
        if not stored or (
            run_is_split == stored_is_split
            and len(stored) == (len(self.chained_optimizers) if run_is_split else 1)
        ):
            return state_dict
        groups = [group for part in stored for group in part['optimizer']['param_groups']]
        own = [
            {
                **stored[0],
                **rest,
                **(by_optimizer.get(index, {}) if run_is_split else {}),
                'optimizer': {
                    **stored[0]['optimizer'],
                    'param_groups': _settings_for(optimizer.param_groups, groups),
                },
            }
            for index, optimizer in enumerate(self.chained_optimizers)
        ]
        return dict(enumerate(own)) if run_is_split else own[0]


def _settings_for(own_groups: list[dict], stored_groups: list[dict]) -> list[dict]:
    """For each of the run's groups, the stored settings of the group that it corresponds to."""
    keys = [key for key in upstream.param_group_identifier_keys if key != _SPLIT_BY]
    stored = groups_alike(own_groups, stored_groups, keys)
    return [
        {**settings, _SPLIT_BY: group.get(_SPLIT_BY)}
        for settings, group in zip(stored, own_groups, strict=True)
    ]


def groups_alike(
    own_groups: list[dict],
    stored_groups: list[dict],
    keys: Sequence[str] = upstream.param_group_identifier_keys,
) -> list[dict]:
    """For each of the run's groups of parameters, the stored one with the same values of ``keys``.

    Of several, the one with the same rates is taken: 0.18 has them not among the keys.

    Raises:
        CheckpointingException: there is none.
    """

    def identity(group):
        return group_identity(group, keys)

    def described(group):
        named = dict(zip(keys, identity(group), strict=True))
        return ', '.join(f'{key} {value}' for key, value in named.items() if value is not None)

    stored = {identity(group): group for group in reversed(stored_groups)}
    for group in own_groups:
        if identity(group) not in stored:
            raise CheckpointingException(
                f'The checkpoint has no group of parameters with {described(group)}; it has '
                f'{"; ".join(map(described, stored.values()))}. Give the run the same learning '
                f'rate and weight decay settings (--lr, --min-lr, …), or say whose count: the '
                f"run's (--override-opt-param-scheduler) or the checkpoint's "
                f'(--use-checkpoint-opt-param-scheduler), or pass --no-load-optim.'
            )
    with_rates = {(identity(group), group_rates(group)): group for group in reversed(stored_groups)}
    return [
        with_rates.get((identity(group), group_rates(group)), stored[identity(group)])
        for group in own_groups
    ]


def group_identity(group: dict, keys: Sequence[str]) -> tuple:
    """Values of ``keys`` in a group of parameters; NeMo has some as ``pre_<key>``."""
    return tuple(group.get(key, group.get(f'pre_{key}')) for key in keys)


def group_rates(group: dict) -> tuple:
    """Largest and smallest learning rate of a group of parameters."""
    return group.get('max_lr'), group.get('min_lr')
