"""Everything before the first byte is written: discover, validate, plan; on rank 0 only."""

from functools import partial
from pathlib import Path

from ..common.directory import resolve_checkpoint
from ..common.errors import CheckpointError
from .collective import Prepared
from .common_state import (
    CommonState,
    choose_common_state,
    make_provenance,
    output_common_state,
    refuse_unstorable,
)
from .inputs import Inputs
from .output import output_target, refuse_inside, refuse_target, space_warnings
from .plan import make_plan
from .report import MergeResult, refuse_report
from .request import BYTE_ACCOUNTING, MergeRequest
from .source import FLOAT8_DTYPES, Source, read_source
from .validate import validate_given_extra_states, validate_sources


def prepare(request: MergeRequest, world_size: int) -> Prepared[MergeResult]:
    """Find the inputs, check them against each other, and plan the merge.

    Raises:
        CheckpointError: anything that the contract rejects
    """
    inputs = request.inputs()
    iteration = request.output_iteration
    if iteration is None:
        iteration = inputs.last_iteration
    target, trackers = output_target(request.output_dir, iteration)
    refuse_target(target, trackers, request.dry_run)
    given_directory = _refuse_places(request, inputs, target)
    if request.byte_accounting not in BYTE_ACCOUNTING:
        raise CheckpointError(
            f'byte accounting {request.byte_accounting!r}: expected {", ".join(BYTE_ACCOUNTING)}'
        )

    read = partial(read_source, model_only=request.model_only, trust=request.trust_checkpoints)
    sources = [read(directory) for directory in inputs.directories]
    validate_sources(sources, allow_reshard=request.allow_reshard)
    given = None
    if given_directory is not None:
        given = read(given_directory)
        validate_given_extra_states(given, sources)
    extra_states = given or sources[_extra_state_index(request, len(sources))]
    common = choose_common_state(
        sources, output_iteration=iteration, given=given, trust=request.trust_checkpoints
    )
    refuse_unstorable(common)
    plan = make_plan(
        sources,
        extra_states,
        world_size=world_size,
        save_dtype=request.save_dtype,
        keep_fp32=request.keep_fp32,
        balance=request.balance_rank_work,
    )
    if not request.dry_run:  # starts git, which must not be while locks are held
        provenance = make_provenance(
            inputs,
            common.origin,
            extra_states.directory,
            save_dtype=request.save_dtype,
            balanced=request.balance_rank_work,
        )
        plan.common_state = output_common_state(common, provenance, iteration)
    content_bytes = plan.output_bytes + sum(job.length for job in plan.byte_entries)
    result = MergeResult(
        output_dir=target,
        inputs=[str(directory) for directory in inputs.directories],
        weights=list(inputs.weights),
        averaged_tensors=len(plan.tensors),
        copied_extra_states=len(extra_states.extra_states),
        content_bytes=content_bytes,
        bytes_written=content_bytes,
        world_size=world_size,
        rank_bytes=[share.source_bytes for share in plan.shares],
        narrowed=plan.narrowed,
        left_out=sum(len(source.left_out) for source in sources),
        warnings=space_warnings(target, content_bytes)
        + _warnings(inputs, common, iteration, sources[0]),
        dry_run=request.dry_run,
    )
    return Prepared(plan, result, trackers, inputs.directories)


def _refuse_places(request: MergeRequest, inputs: Inputs, target: Path) -> Path | None:
    """Raise where output or report lie in what is read; where the common state is given."""
    read_from = {directory: f'the input {directory}' for directory in inputs.directories}
    given = None
    if request.common_state_checkpoint is not None:
        given = resolve_checkpoint(request.common_state_checkpoint)
        read_from.setdefault(given, f'--common-state-checkpoint {given}')
        if request.extra_state_source_index is not None:
            raise CheckpointError(
                '--common-state-checkpoint supplies _extra_state too; drop '
                '--extra-state-source-index'
            )
    refuse_inside(target, read_from)
    if request.report is not None:
        refuse_report(request.report, target, read_from, MergeResult)
    return given


def _extra_state_index(request: MergeRequest, count: int) -> int:
    index = request.extra_state_source_index or 0
    if not 0 <= index < count:
        raise CheckpointError(f'--extra-state-source-index {index}: expected 0 to {count - 1}')
    return index


def _warnings(
    inputs: Inputs, common: CommonState, iteration: int | None, first: Source
) -> list[str]:
    found = []
    if iteration is None:
        found.append(
            'no tracker is written, and --load starts from random weights where it finds none; '
            'pass --output-iteration'
        )
    total = sum(inputs.weights)
    if min(inputs.weights) < 0 or abs(total - 1) > 1e-6:
        found.append(
            f'weights sum to {total:.6g} (smallest {min(inputs.weights):.6g}) and are used as they '
            'are; outputs may leave the range of the inputs'
        )
    float8 = [key for key, entry in first.tensors.items() if entry.dtype in FLOAT8_DTYPES]
    if float8:
        found.append(
            f'{len(float8)} float8 tensors ({float8[0]}, …) are averaged as the numbers they hold: '
            'scales stored apart from them are not applied'
        )
    if common.origin is None:
        found.append("no input has common state; the output can't be resumed by its iteration")
    return found
