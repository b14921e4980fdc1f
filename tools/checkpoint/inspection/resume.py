"""What resuming from a checkpoint will do to the optimizer, told from the checkpoint alone.

Read are the metadata, the common state and the optimizers' settings; no tensor is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import OPTIMIZER, parse_position
from megatron_overlay.standalone.dist_checkpointing.checkpoint_layout import (
    CheckpointLayout,
    layout_from_metadata,
)
from megatron_overlay.standalone.dist_checkpointing.format_names import (
    FLATTENED,
    FULLY_RESHARDABLE,
    IN_BUCKETS,
    LEGACY,
    PLAIN,
    TORCH_DCP,
    TORCH_DIST,
)
from megatron_overlay.standalone.dist_checkpointing.leaked_state import leaked_param_states
from megatron_overlay.standalone.dist_checkpointing.optimizer_load import conversion_command
from megatron_overlay.standalone.dist_checkpointing.stored_checkpoint import (
    StoredCheckpoint,
    is_layer_wise,
    stored_optimizer_format,
)
from megatron_overlay.standalone.dist_checkpointing.unstored_state import (
    unstored_reason,
    unstored_state,
)
from torch.distributed.checkpoint.metadata import Metadata

from megatron_overlay.optimizer_classes import is_optimizer_class

from ..common.directory import FoundCheckpoint, find_checkpoint
from ..common.errors import CheckpointError
from ..common.paths import RELEASE, describe_foreign
from ..common.safe_load import NOTHING_RUNS
from ..common.stdout import printable
from ..common.stored import (
    Slice,
    check_stored_files,
    common_state_slice,
    read_common_state,
    read_object,
)


@dataclass
class ResumeReport:
    """What a checkpoint says about its optimizer.

    Attributes:
        checkpoint_dir: the directory of one iteration.
        iteration: as stored; None where it isn't.
        sharding_type: the optimizer's format; ``none`` without optimizer state, ``plain`` for
            an optimizer that isn't distributed.
        steps: Adam's step counts, in the parameter groups or common to all parameters.
        leaked_steps: number of values of per-parameter state in the common state.
        offload_fraction: of ``--optimizer-cpu-offload``; None without, and where the training
            arguments aren't stored.
        layer_wise: the optimizer is distributed by layers, as of Muon.
        unstored: what a run asks for and isn't there.
    """

    checkpoint_dir: Path
    iteration: int | None
    sharding_type: str
    steps: set[int] = field(default_factory=set)
    leaked_steps: int = 0
    offload_fraction: float | None = None
    layer_wise: bool = False
    unstored: dict[str, str] = field(default_factory=dict)

    @property
    def loads(self) -> bool:
        """Whether there is optimizer state that a run can go on with."""
        unusable = OPTIMIZER in self.unstored or self.sharding_type == FLATTENED
        return not unusable and len(self.steps) <= 1

    @property
    def release(self) -> bool:
        """Whether a run takes nothing but the weights."""
        return self.checkpoint_dir.name == RELEASE

    @property
    def in_buckets(self) -> bool:
        """Whether the format follows the distributed optimizer's buckets."""
        return self.sharding_type == IN_BUCKETS


def read_resume_report(checkpoint: str | Path) -> ResumeReport:
    """Look at a checkpoint.

    Args:
        checkpoint: directory of one iteration, or one above with a tracker file.

    Raises:
        CheckpointError: there is no distributed checkpoint, with the reason.
    """
    found = find_distributed(checkpoint)
    check_stored_files(found.directory, found.metadata)
    return resume_report(found.metadata, read_stored(found))


def resume_report(metadata: Metadata, stored: StoredCheckpoint) -> ResumeReport:
    """What a checkpoint says, whose metadata and common state have been read already."""
    directory = Path(stored.directory)
    # With offloading the optimizers' classes, of anyone's make, stand among their settings.
    settings = _stored_objects(directory, metadata, _is_settings, lambda name: True)
    iteration = stored.common.get('iteration')
    return ResumeReport(
        checkpoint_dir=directory,
        iteration=iteration if isinstance(iteration, int) else None,
        sharding_type=stored_optimizer_format(stored),
        steps=_steps(stored.common.get('optimizer')).union(*map(_steps, settings)),
        leaked_steps=sum(
            _count_leaves(state['param_state']) for state in leaked_param_states(stored.common)
        ),
        offload_fraction=_offload_fraction(stored.args),
        layer_wise=is_layer_wise(stored.args),
        unstored=unstored_state(stored),
    )


def _offload_fraction(args: Any) -> float | None:
    fraction = getattr(args, 'optimizer_offload_fraction', None)
    offloading = getattr(args, 'optimizer_cpu_offload', False) is True
    known = offloading and isinstance(fraction, (int, float)) and 0 <= fraction <= 1
    return fraction if known else None


def find_distributed(checkpoint: str | Path) -> FoundCheckpoint:
    """The ``torch_dist`` checkpoint that is meant."""
    found = find_checkpoint(checkpoint)
    if found.format != TORCH_DIST:
        reason = f'has the format {found.format}; only {TORCH_DIST} checkpoints can be looked at'
        if found.format == LEGACY:
            reason = describe_foreign(found.directory)
        raise CheckpointError(f'{found.directory}: {reason}')
    return found


def read_stored(found: FoundCheckpoint, layout: CheckpointLayout | None = None) -> StoredCheckpoint:
    """What is known of a checkpoint that DCP wrote, by its metadata and common state.

    Args:
        layout: by its metadata, where that has been looked at
    """
    layout = layout or layout_from_metadata(found.metadata)
    common = {} if found.format == TORCH_DCP else _common_state(found.directory, found.metadata)
    return StoredCheckpoint(layout, common, found.format, found.release, str(found.directory))


def _common_state(directory: Path, metadata: Metadata) -> dict[str, Any]:
    """The common state, from ``common.pt`` or as it is stored among the tensors; maybe empty."""
    place = common_state_slice(metadata)
    state = read_common_state(directory, place, trust_hint=NOTHING_RUNS)
    if state is None:
        # Where DCP wrote it without dist_checkpointing, the arguments stand by themselves.
        args = _stored_objects(directory, metadata, 'args'.__eq__, is_optimizer_class)
        state = dict(zip(['args'], args, strict=False))
    return state


def _stored_objects(
    directory: Path,
    metadata: Metadata,
    is_meant: Callable[[str], bool],
    stand_in_for: Callable[[str], bool],
) -> list[Any]:
    """The objects that are meant, by their keys, each read at its place in its file."""
    return [
        read_object(
            directory, Slice.of(info), index.fqn, stand_in_for=stand_in_for, trust_hint=NOTHING_RUNS
        )
        for index, info in metadata.storage_data.items()
        if is_meant(index.fqn)
    ]


def _is_settings(key: str) -> bool:
    own = parse_position(key)
    return own is not None and own.bucket is None and own.entry == OPTIMIZER


def _steps(optimizer_state: Any) -> set[int]:
    if not isinstance(optimizer_state, dict):
        return set()
    groups = optimizer_state.get('param_groups')
    if isinstance(groups, list):
        steps = [_number(group.get('step')) for group in groups if isinstance(group, dict)]
        state = optimizer_state.get('state')
        if isinstance(state, dict):  # of an optimizer that isn't distributed
            steps.append(_number(state.get('common_step')))
        return {int(step) for step in steps if step is not None}
    return set().union(
        *(_steps(value) for key, value in optimizer_state.items() if key != 'param_state')
    )


def _number(value: Any) -> int | float | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return value if finite else None


def _count_leaves(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_count_leaves, value.values()))
    if isinstance(value, list):
        return sum(map(_count_leaves, value))
    return 1


def describe(report: ResumeReport) -> str:
    """The report in words, several lines."""
    lines = [
        f'{report.checkpoint_dir}',
        f'  iteration        {"unknown" if report.iteration is None else report.iteration}',
        f'  optimizer state  {report.sharding_type}',
        f'  step             {", ".join(map(str, sorted(report.steps))) or "not stored"}',
        f'  leaked step      {_leak(report)}',
        f'  offloaded        {_offload(report)}',
        'resuming with this package',
        *(f'  - {line}' for line in with_overlay(report)),
        'resuming with megatron-core as it is',
        *(f'  - {line}' for line in _stock(report)),
    ]
    return '\n'.join(map(printable, lines))


def _leak(report: ResumeReport) -> str:
    if not report.leaked_steps:
        return 'no'
    return f'yes: {report.leaked_steps} values of per-parameter state in the common state'


def _offload(report: ResumeReport) -> str:
    if report.offload_fraction is None:
        return 'no'
    return f'--optimizer-cpu-offload, {report.offload_fraction:g} of the parameters'


def with_overlay(report: ResumeReport) -> list[str]:
    """What resuming does with this package, one statement a line."""
    if report.release:
        return ['weights only: a release, from which the optimizer starts fresh']
    return [*_with_overlay(report), *filter(None, [unstored_reason(report.unstored)])]


def _with_overlay(report: ResumeReport) -> list[str]:
    if OPTIMIZER in report.unstored:
        return ['weights only: the optimizer starts fresh, from the loaded weights']
    if report.layer_wise:
        return ['an optimizer that is distributed by layers is left to megatron-core']
    if report.sharding_type == FLATTENED:
        command = conversion_command(str(report.checkpoint_dir))
        return [f'{FLATTENED} is loaded by megatron-core up to 0.15 only; first: {command}']
    if report.sharding_type not in (IN_BUCKETS, FULLY_RESHARDABLE, PLAIN):
        return [f'{report.sharding_type} is left to megatron-core']
    lines = ['no step is stored: bias correction starts again, all else goes on']
    if report.steps:
        lines = ['the next steps are those of the run that did not stop']
    if report.leaked_steps:
        lines.append('the leaked values are ignored: the parameter groups have the step')
    if len(report.steps) > 1:
        lines.append('the parameter groups disagree on the step: loading will be refused')
    if report.in_buckets:
        command = conversion_command(str(report.checkpoint_dir))
        lines.append(f'only the data-parallel size may change; for the others first: {command}')
    return lines


def _stock(report: ResumeReport) -> list[str]:
    if report.release or OPTIMIZER in report.unstored:
        if report.offload_fraction is None:
            return ['as above']
        return ['offloaded fp32 parameters step from their fresh values, not from the weights']
    if report.layer_wise or report.sharding_type not in (IN_BUCKETS, FULLY_RESHARDABLE):
        return ['as above']
    if report.leaked_steps:
        return ['refused: duplicate values, or lists of different lengths, in the common state']
    without_te = 'refused without Transformer Engine or Apex: the optimizer has no state yet'
    if report.offload_fraction is None:
        return [f'{without_te}; right with them']
    if not report.in_buckets and report.offload_fraction == 1:
        return [f'{without_te}; right with them']
    lines = [without_te]
    if report.in_buckets and report.offload_fraction > 0:
        lines.append('Adam in host memory starts again at step 1')
    if report.offload_fraction == 0:
        lines.append('FusedAdam starts again at step 1: megatron-core stores none')
    elif report.offload_fraction < 1:
        lines.append('the step of FusedAdam on the GPU stands still after the first step')
    return lines
