"""Everything before the first byte is written: find, read metadata, plan; on rank 0 only."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import PARAM, parse_key
from megatron_overlay.standalone.dist_checkpointing.format_names import (
    FLATTENED,
    FSDP_DTENSOR,
    FULLY_RESHARDABLE,
    IN_BUCKETS,
    NO_STATE,
    TORCH_DIST,
)

from ..common.directory import FoundCheckpoint, find_checkpoint_of
from ..common.errors import CheckpointError, reading
from ..common.paths import (
    CONFIG_NAME,
    METADATA_NAME,
    iteration_dir,
    named_path,
    parse_iteration_dirname,
    refuse_url,
)
from ..merge.collective import Prepared
from ..merge.common_state import refuse_unstorable
from ..merge.output import output_target, refuse_inside, refuse_target, space_warnings
from ..merge.plan import MergePlan
from ..merge.report import refuse_report
from ..merge.request import Request
from . import dp_reshardable, fsdp_dtensor, model_space
from .checkpoint import Checkpoint, read_checkpoint
from .fsdp_checkpoint import read_fsdp_checkpoint
from .plan import OptimizerPlan, make_plan
from .report import ConversionResult
from .to_fsdp import plan_fsdp

# The formats of optimizer state that can be converted, each a module that yields a plan.
_FORMATS: dict[str, Callable[[Checkpoint], OptimizerPlan]] = {
    IN_BUCKETS: dp_reshardable.plan_optimizer,
    FLATTENED: model_space.plan_optimizer,
    FSDP_DTENSOR: fsdp_dtensor.plan_optimizer,
}


@dataclass
class ConversionRequest(Request):
    """What to convert; see the command line for the meaning of each.

    Attributes:
        load_dir: checkpoint directory, or a root with a tracker
        save_dir: where its ``iter_XXXXXXX`` is written, with a tracker
        iteration: of the root; None for the one that the tracker names
        to: format of the output: ``torch_dist`` or ``fsdp_dtensor``
    """

    load_dir: Path
    save_dir: Path
    iteration: int | None = None
    to: str = TORCH_DIST


def prepare(request: ConversionRequest, world_size: int) -> Prepared[ConversionResult]:
    """Read the checkpoint and plan the conversion.

    Raises:
        CheckpointError: anything that the contract rejects
    """
    found = _input(request)
    directory = found.directory
    read = read_fsdp_checkpoint if found.format == FSDP_DTENSOR else read_checkpoint
    checkpoint = read(directory, trust=request.trust_checkpoints)
    target, trackers = output_target(request.save_dir, _iteration(checkpoint))
    read_from = {directory: f'the input {directory}'}
    if request.report is not None:
        refuse_report(request.report, target, read_from, ConversionResult)
    result = ConversionResult(
        input_dir=directory,
        output_dir=target,
        format=checkpoint.format,
        target=FSDP_DTENSOR if request.to == FSDP_DTENSOR else FULLY_RESHARDABLE,
        world_size=world_size,
        dry_run=request.dry_run,
    )
    if checkpoint.format == result.target:
        result.already = True
        return Prepared(None, result, {}, [directory])
    refuse_target(target, trackers, request.dry_run, 'the iteration', 'give another --save-dir')
    refuse_inside(target, read_from)
    refuse_unstorable(checkpoint.common)
    with reading(directory, 'checkpoint that Megatron wrote'):  # arguments and settings of any type
        planned = (
            plan_fsdp(checkpoint) if request.to == FSDP_DTENSOR else _plan_optimizer(checkpoint)
        )
    plan = make_plan(checkpoint, planned, world_size)
    _fill_result(result, planned, plan)
    return Prepared(plan, result, trackers, [directory])


def _plan_optimizer(checkpoint: Checkpoint) -> OptimizerPlan:
    """The plan for a checkpoint's optimizer state."""
    if checkpoint.format == NO_STATE:
        raise CheckpointError(
            f'{checkpoint.directory}: no optimizer state; there is nothing to convert'
        )
    if checkpoint.format not in _FORMATS:
        raise CheckpointError(
            f'{checkpoint.directory}: the optimizer state is {checkpoint.format!r}, expected '
            f'{" or ".join(_FORMATS)}'
        )
    for option in ('fp8_param_gather', 'fp4_param_gather'):
        if getattr(checkpoint.args, option, None) is True:
            raise CheckpointError(
                f'{checkpoint.directory}: args say {option}: the weights are quantised, so that '
                'main parameters rounded are not the weights, which would be the proof; load it '
                'in the layout that saved it, and save it again with '
                '--dist-ckpt-optim-fully-reshardable'
            )
    return _FORMATS[checkpoint.format](checkpoint)


def _input(request: ConversionRequest) -> FoundCheckpoint:
    path, iteration = named_path(request.load_dir), request.iteration
    refuse_url(path)
    if iteration is not None:
        if not any((path / name).exists() for name in (CONFIG_NAME, METADATA_NAME)):
            path = iteration_dir(path, iteration)
        elif parse_iteration_dirname(path.name) != iteration:
            raise CheckpointError(
                f'{path}: the directory of one checkpoint, and not of iteration {iteration}; '
                'leave out --iteration, or give the root'
            )
    return find_checkpoint_of(path, TORCH_DIST, FSDP_DTENSOR)


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


def _fill_result(result: ConversionResult, optimizer: OptimizerPlan, plan: MergePlan) -> None:
    main = [
        job
        for job in optimizer.chunks
        if (job.proof if optimizer.format == FSDP_DTENSOR else parse_key(job.key).state == PARAM)
    ]
    result.tensors = len(optimizer.tensors)
    result.elements = sum(job.box.numel for job in main)
    result.copies = sum(job.box.numel * len(job.copies) for job in main)
    result.padding = optimizer.padding
    result.positions = optimizer.positions
    result.without_state = optimizer.without_state
    result.copied_bytes = sum(job.length for job in plan.byte_entries)
    result.content_bytes = plan.output_bytes + result.copied_bytes
    result.rank_bytes = [share.source_bytes for share in plan.shares]
    result.warnings = [*optimizer.notes, *space_warnings(result.output_dir, result.content_bytes)]
