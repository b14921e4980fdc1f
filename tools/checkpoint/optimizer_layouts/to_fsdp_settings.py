"""Groups of parameters for ``fsdp_dtensor``: from the common state to each parameter's name.

Nothing but names tells which group a parameter belongs to. That is megatron-core's own rule: biases
and other one-dimensional parameters have no weight decay, embedding and output layer their own
learning rate with ``--decoupled-lr``, and experts on ranks of their own groups of their own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ..common.errors import CheckpointError, shown
from ..merge.plan import MadeBytes
from .archived import archived
from .checkpoint import Checkpoint
from .fsdp_names import Place
from .settings import OF_EXPERTS

# What groups may differ in by that rule: decay, and with --decoupled-lr the learning rate.
_OF_DECAY = {'wd_mult', 'weight_decay'}
_OF_RATE = {'max_lr', 'min_lr', 'lr', 'lr_mult', 'default_config', 'is_decoupled_lr'}
_EMBEDDING_AND_OUTPUT = ('embedding.word_embeddings.weight', 'output_layer.weight')

Group = dict[str, Any]


def wrappers(args: Any) -> str:
    """What Megatron-FSDP's optimizer puts before names: half precision is a module of its own."""
    half = any(getattr(args, name, False) for name in ('bf16', 'fp16'))
    return 'module.' * (2 + half)


def read_groups(checkpoint: Checkpoint) -> list[Group]:
    """Settings of all groups of all optimizers of the chain.

    Raises:
        CheckpointError: the common state holds none
    """
    state: Any = checkpoint.common.state.get('optimizer')
    try:
        chain = list(state.values()) if all(isinstance(key, int) for key in state) else [state]
        groups = [group for part in chain for group in part['optimizer']['param_groups']]
        return [{name: group[name] for name in group if name != 'params'} for group in groups]
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f'{checkpoint.directory}: common state: optimizer: {shown(state)}, expected its '
            'parameter groups; the checkpoint is damaged, take another'
        ) from error


def settings_of(
    checkpoint: Checkpoint,
    groups: list[Group],
    parameters: Mapping[str, tuple[Place, tuple[int, ...]]],
) -> Iterator[MadeBytes]:
    """Each parameter's group, under its name.

    Args:
        checkpoint: the input
        groups: as ``read_groups`` gave them
        parameters: those with state: place and shape by name

    Raises:
        CheckpointError: a parameter's group isn't known
    """
    written = _together(checkpoint, groups)
    contents: dict[tuple[int, str], bytes] = {}
    prefix = f'optimizer.param_to_group_meta.{wrappers(checkpoint.args)}'
    for name, (place, shape) in parameters.items():
        number = _group_of(checkpoint, groups, name, place, shape)
        for setting, value in written[number].items():
            if (number, setting) not in contents:
                contents[number, setting] = archived(value)
            yield MadeBytes(f'{prefix}{name}.{setting}', contents[number, setting])


def _is_of_experts(group: Group) -> bool:
    return group.get(OF_EXPERTS) is True


def _together(checkpoint: Checkpoint, groups: list[Group]) -> list[Group]:
    """The settings as Megatron-FSDP has them: experts are in the groups of all others."""
    together = [{**group, OF_EXPERTS: False} if OF_EXPERTS in group else group for group in groups]
    others = [new for new, group in zip(together, groups, strict=True) if not _is_of_experts(group)]
    for new, group in zip(together, groups, strict=True):
        alike = [other for other in others if other.get('wd_mult') == new.get('wd_mult')]
        differing = [
            [name for name in new | other if repr(new.get(name)) != repr(other.get(name))]
            for other in alike
        ]
        if _is_of_experts(group) and differing and all(differing):
            raise CheckpointError(
                f'{checkpoint.directory}: common state: {", ".join(min(differing))} of experts and '
                'of others differ in the parameter groups, expected the same: Megatron-FSDP has '
                'both in one group'
            )
    return together


def _group_of(
    checkpoint: Checkpoint, groups: list[Group], name: str, place: Place, shape: tuple[int, ...]
) -> int:
    args: Any = checkpoint.args
    apart = any(map(_is_of_experts, groups))
    own = [
        number
        for number, group in enumerate(groups)
        if _is_of_experts(group) == (apart and place.expert >= 0)
    ]
    decoupled = getattr(args, 'decoupled_lr', None) is not None
    _refuse_other_differences(checkpoint, [groups[number] for number in own], decoupled)
    if len(own) > 1 and decoupled:
        rate = name in _EMBEDDING_AND_OUTPUT
        own = [number for number in own if (groups[number].get('default_config') is False) == rate]
    if len(own) > 1:
        normed = any(part in name for part in ('q_layernorm.', 'k_layernorm.'))
        decayed = len(shape) > 1 or (normed and getattr(args, 'apply_wd_to_qk_layernorm', False))
        own = [number for number in own if (groups[number].get('wd_mult') != 0) == decayed]
    if len(own) != 1:
        raise CheckpointError(
            f'{checkpoint.directory}: common state: {len(own)} parameter groups for {name}, '
            'expected one; which group a parameter belongs to is not stored'
        )
    return own[0]


def _refuse_other_differences(checkpoint: Checkpoint, groups: list[Group], decoupled: bool) -> None:
    for setting in groups[0] if groups else ():
        values = {repr(group.get(setting)) for group in groups}
        known = _OF_DECAY | (_OF_RATE if decoupled else set())
        if len(values) > 1 and setting not in known:
            raise CheckpointError(
                f'{checkpoint.directory}: common state: parameter groups differ in {setting} '
                f'({", ".join(sorted(values))}), expected {" or ".join(sorted(known))} only; which '
                'group a parameter belongs to is not stored'
            )
