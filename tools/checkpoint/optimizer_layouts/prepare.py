"""Everything before the first byte is written: find, read metadata, plan; on rank 0 only."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..common.directory import DISTRIBUTED, FSDP, find_checkpoint
from ..common.errors import CheckpointError
from ..common.paths import (
    CONFIG_NAME,
    METADATA_NAME,
    TRACKER_NAME,
    existing_parent,
    iteration_dir,
    parse_iteration_dirname,
    real_path,
    refuse_unreachable,
    refuse_url,
    resolve_checkpoint,
    tracker_target,
)
from ..common.progress import format_bytes
from ..common.publish import recover, refuse_existing
from ..merge.common_state import refuse_unstorable
from ..merge.prepare import output_target, output_trackers, refuse_later_tracker
from .checkpoint import Checkpoint, read_checkpoint
from .common_state import TARGET
from .formats import plan_optimizer
from .fsdp_checkpoint import read_fsdp_checkpoint
from .plan import PARAM, STATE_PREFIX, ConversionPlan, make_plan
from .report import ConversionResult
from .to_fsdp import plan_fsdp


@dataclass
class Request:
    """What to convert; see the command line for the meaning of each.

    Attributes:
        load_dir: checkpoint directory, or a root with a tracker
        save_dir: where its ``iter_XXXXXXX`` is written, with a tracker
        iteration: of the root; None for the one that the tracker names
        threads: writer threads of each rank; None as in a merge
        to: format of the output: ``torch_dist`` or ``fsdp_dtensor``
        on_plan: shown the plan on rank 0 before anything is written
    """

    load_dir: Path
    save_dir: Path
    iteration: int | None = None
    dry_run: bool = False
    verify: bool = False
    trust_checkpoints: bool = False
    threads: int | None = None
    to: str = DISTRIBUTED
    on_plan: Callable[[ConversionResult], object] = field(default=lambda result: None)


@dataclass
class Prepared:
    """What rank 0 found out; no plan where there is nothing to do."""

    checkpoint: Checkpoint
    target: Path
    trackers: dict[Path, str]
    plan: ConversionPlan | None
    result: ConversionResult


def prepare(request: Request, world_size: int) -> Prepared:
    """Read the checkpoint and plan the conversion.

    Raises:
        CheckpointError: anything that the contract rejects
    """
    directory = _input(request)
    read = read_fsdp_checkpoint if _is_fsdp(directory) else read_checkpoint
    checkpoint = read(directory, trust=request.trust_checkpoints)
    iteration = _iteration(checkpoint)
    refuse_url(request.save_dir)
    target = output_target(request.save_dir.absolute(), iteration)
    result = ConversionResult(
        directory,
        target,
        checkpoint.format,
        FSDP if request.to == FSDP else TARGET,
        world_size=world_size,
        dry_run=request.dry_run,
    )
    if checkpoint.format == result.target:
        result.already = True
        return Prepared(checkpoint, target, {}, None, result)
    trackers = output_trackers(target, iteration)
    finished = not request.dry_run and recover([target], trackers)
    refuse_existing(target, finished)
    refuse_unreachable(target)
    refuse_later_tracker(target, iteration, 'the iteration', 'give another --save-dir')
    if real_path(target).is_relative_to(real_path(directory)):
        raise CheckpointError(f'{target}: lies inside the input {directory}')
    if request.threads is not None and request.threads < 1:
        raise CheckpointError(f'{request.threads} writer threads: expected 1 or more')
    refuse_unstorable(checkpoint.common)
    planned = plan_fsdp(checkpoint) if request.to == FSDP else plan_optimizer(checkpoint)
    plan = make_plan(checkpoint, planned, world_size)
    _fill_result(result, plan)
    return Prepared(checkpoint, target, trackers, plan, result)


def _input(request: Request) -> Path:
    refuse_url(request.load_dir)
    if request.iteration is None:
        return _resolved(request.load_dir)
    if any((request.load_dir / name).exists() for name in (CONFIG_NAME, METADATA_NAME)):
        if parse_iteration_dirname(request.load_dir.name) != request.iteration:
            raise CheckpointError(
                f'{request.load_dir}: the directory of one checkpoint, and not of iteration '
                f'{request.iteration}; leave out --iteration, or give the root'
            )
        return request.load_dir
    return _resolved(iteration_dir(request.load_dir, request.iteration))


def _resolved(path: Path) -> Path:
    """The checkpoint's directory, which may be one of Megatron-FSDP."""
    directory = tracker_target(path) if (path / TRACKER_NAME).exists() else path
    return directory if _is_fsdp(directory) else resolve_checkpoint(path)


def _is_fsdp(directory: Path) -> bool:
    has_metadata = (directory / METADATA_NAME).exists() and not (directory / CONFIG_NAME).exists()
    return has_metadata and find_checkpoint(directory).format == FSDP


def _iteration(checkpoint: Checkpoint) -> int:
    named = parse_iteration_dirname(checkpoint.directory.name)
    stored = checkpoint.common.iteration
    if named is None and stored is None:
        raise CheckpointError(
            f'{checkpoint.directory}: neither the name nor the common state tells the iteration'
        )
    if None not in (named, stored) and named != stored:
        raise CheckpointError(
            f'{checkpoint.directory}: records iteration {stored}; rename the directory to tell it'
        )
    return named if named is not None else int(stored or 0)


def _fill_result(result: ConversionResult, plan: ConversionPlan) -> None:
    optimizer = plan.optimizer
    if optimizer.format == FSDP:
        main = [job for job in optimizer.chunks if job.proof]
    else:
        main = [job for job in optimizer.chunks if job.key.startswith(f'{STATE_PREFIX}.{PARAM}.')]
    result.tensors = len(optimizer.tensors)
    result.elements = sum(job.box.numel for job in main)
    result.copies = sum(job.box.numel * len(job.copies) for job in main)
    result.padding = optimizer.padding
    result.positions = optimizer.positions
    result.without_state = optimizer.without_state
    result.copied_bytes = sum(job.length for job in plan.byte_entries)
    result.content_bytes = plan.output_bytes + result.copied_bytes
    result.rank_bytes = [share.source_bytes for share in plan.shares]
    result.warnings = [*optimizer.notes]
    disk = shutil.disk_usage(existing_parent(result.output_dir))
    if disk.total and disk.free < result.content_bytes:  # no error: it may compress
        result.warnings.append(
            f'{format_bytes(result.content_bytes)} are to be written to {result.output_dir}, '
            f'where {format_bytes(disk.free)} are free'
        )
