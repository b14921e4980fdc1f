"""Everything before the first byte is written: discover, validate, plan; on rank 0 only."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from ..common.directory import resolve_checkpoint
from ..common.errors import CheckpointError
from ..common.paths import (
    TRACKER_NAME,
    existing_parent,
    iteration_dirname,
    parse_iteration_dirname,
    read_tracker,
    real_path,
    refuse_tracker_directory,
    refuse_unreachable,
    refuse_url,
)
from ..common.progress import format_bytes
from ..common.publish import recover, refuse_existing
from .accumulate import BLOCK_ELEMENTS
from .common_state import CommonState, choose_common_state, make_provenance, refuse_unstorable
from .inputs import Inputs
from .options import BYTE_ACCOUNTING
from .plan import MergePlan, make_plan
from .report import MergeResult, refuse_report
from .source import FLOAT8_DTYPES, Source, read_source
from .validate import validate_given_extra_states, validate_sources


@dataclass
class Request:
    """What to merge and how; see the command line for the meaning of each.

    Attributes:
        inputs: finds the inputs; called on rank 0 only, whose word counts
        report: file that the caller writes when all is done; checked before anything is written
        threads: writer threads of each rank; None for torch's number of threads, at most
            ``MAX_THREADS``
        block_elements: elements of a block of arithmetic
        on_plan: shown the plan on rank 0 before anything is written
    """

    inputs: Callable[[], Inputs]
    output_dir: Path
    output_iteration: int | None = None
    save_dtype: str = 'same'
    keep_fp32: Sequence[str] = ()
    balance_rank_work: bool = False
    extra_state_source_index: int | None = None
    common_state_checkpoint: Path | None = None
    byte_accounting: str = 'rank0'
    model_only: bool = False
    allow_reshard: bool = False
    allow_nonfinite: bool = False
    trust_checkpoints: bool = False
    verify: bool = False
    save_integrity: bool = False
    dry_run: bool = False
    report: Path | None = None
    threads: int | None = None
    block_elements: int = BLOCK_ELEMENTS
    on_plan: Callable[[MergeResult], object] = field(default=lambda result: None)

    @classmethod
    def options(cls) -> set[str]:
        """Names of what a user sets, on the command line and in the library alike."""
        return {option.name for option in fields(cls)} - {'inputs', 'on_plan'}


@dataclass
class Prepared:
    """What rank 0 found out.

    Attributes:
        provenance: what the output says of where it comes from; None in a dry run
    """

    inputs: Inputs
    target: Path
    output_iteration: int | None
    plan: MergePlan
    common: CommonState
    provenance: dict[str, object] | None
    result: MergeResult

    @property
    def trackers(self) -> dict[Path, str]:
        """Root of the output to the text of its tracker, where it has an iteration."""
        return output_trackers(self.target, self.output_iteration)


def output_target(output_dir: Path, output_iteration: int | None) -> Path:
    """The directory that is written: ``output_dir``, or its ``iter_XXXXXXX``.

    Raises:
        CheckpointError: ``output_dir`` is the directory of another iteration
    """
    if output_iteration is None:
        return output_dir
    if output_iteration < 0:
        raise CheckpointError(f'--output-iteration {output_iteration}: expected 0 or more')
    name = iteration_dirname(output_iteration)
    if output_dir.name == name:
        return output_dir
    if parse_iteration_dirname(output_dir.name) is not None:
        raise CheckpointError(
            f'{output_dir}: the directory of another iteration, expected {name} or a root'
        )
    return output_dir / name


def output_trackers(target: Path, output_iteration: int | None) -> dict[Path, str]:
    """The tracker that is written beside ``target``: its root and text; none without iteration."""
    return {} if output_iteration is None else {target.parent: str(output_iteration)}


def refuse_target(
    target: Path,
    trackers: Mapping[Path, str],
    dry_run: bool,
    given: str = '--output-iteration',
    way_out: str = 'give another --merge-output',
) -> None:
    """Raise where no output can be made, or its tracker names a later iteration.

    Training that resumes there would silently start from the earlier one. A tracker that says
    nothing (missing, damaged, ``release``) is replaced. What a killed run left is put in order.

    Args:
        trackers: see ``output_trackers``
        given, way_out: what the message calls the iteration, and what it says to do

    Raises:
        CheckpointError: so it is
    """
    refuse_existing(target, not dry_run and recover([target], trackers))
    refuse_unreachable(target)
    for root, iteration in trackers.items():
        refuse_tracker_directory(root)
        try:
            found = read_tracker(root)
        except CheckpointError:
            continue
        if isinstance(found, int) and found > int(iteration):
            raise CheckpointError(
                f'{root / TRACKER_NAME}: names {found}, later than {given} {iteration}, '
                f'which it would name instead; {way_out}'
            )


def refuse_inside(target: Path, read_from: Mapping[Path, str]) -> None:
    """Raise where the output lies in a checkpoint that is read, by what that is called.

    Raises:
        CheckpointError: it does
    """
    for directory, name in read_from.items():
        if real_path(target).is_relative_to(real_path(directory)):
            raise CheckpointError(f'{target}: lies inside {name}')


def refuse_threads(threads: int | None) -> None:
    """Raise where no thread would write.

    Raises:
        CheckpointError: so it is
    """
    if threads is not None and threads < 1:
        raise CheckpointError(f'{threads} writer threads: expected 1 or more')


def space_warnings(target: Path, content_bytes: int) -> list[str]:
    """What to say where that much doesn't seem to fit."""
    try:
        disk = shutil.disk_usage(existing_parent(target))
    except OSError:
        return []
    # some file systems don't say, and some compress
    if not disk.total or disk.free >= content_bytes:
        return []
    return [
        f'{format_bytes(content_bytes)} are to be written to {target}, where '
        f'{format_bytes(disk.free)} are free'
    ]


def prepare(request: Request, world_size: int) -> Prepared:
    """Find the inputs, check them against each other, and plan the merge.

    Raises:
        CheckpointError: anything that the contract rejects
    """
    inputs = request.inputs()
    iteration = request.output_iteration
    if iteration is None:
        iteration = inputs.last_iteration
    target = _free_target(request, iteration)
    given_directory = _refuse_places(request, inputs, target)
    _refuse_options(request)

    def read(directory: Path) -> Source:
        return read_source(
            directory, model_only=request.model_only, trust=request.trust_checkpoints
        )

    sources = [read(directory) for directory in inputs.directories]
    validate_sources(sources, allow_reshard=request.allow_reshard)
    given = _given(request, sources, read, given_directory)
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
    provenance = None
    if not request.dry_run:  # starts git, which must not be while locks are held
        provenance = make_provenance(
            inputs,
            common.origin,
            extra_states.directory,
            save_dtype=request.save_dtype,
            balanced=request.balance_rank_work,
        )
    result = _result(request, inputs, plan, sources, target, world_size)
    result.copied_extra_states = len(extra_states.extra_states)
    result.warnings = _warnings(inputs, common, iteration, target, result.content_bytes, sources[0])
    return Prepared(inputs, target, iteration, plan, common, provenance, result)


def _free_target(request: Request, iteration: int | None) -> Path:
    """The output's directory, where one can be made, and named by no tracker of a later one."""
    refuse_url(request.output_dir)
    target = output_target(request.output_dir.absolute(), iteration)
    refuse_target(target, output_trackers(target, iteration), request.dry_run)
    return target


def _refuse_places(request: Request, inputs: Inputs, target: Path) -> Path | None:
    """Raise where output or report lie in what is read; where the common state is given."""
    read_from = {directory: f'the input {directory}' for directory in inputs.directories}
    given = None
    if request.common_state_checkpoint is not None:
        given = resolve_checkpoint(request.common_state_checkpoint)
        read_from.setdefault(given, f'--common-state-checkpoint {given}')
    refuse_inside(target, read_from)
    if request.report is not None:
        refuse_report(request.report, target, read_from)
    return given


def _refuse_options(request: Request) -> None:
    refuse_threads(request.threads)
    if request.byte_accounting not in BYTE_ACCOUNTING:
        raise CheckpointError(
            f'byte accounting {request.byte_accounting!r}: expected {", ".join(BYTE_ACCOUNTING)}'
        )


def _given(
    request: Request,
    sources: Sequence[Source],
    read: Callable[[Path], Source],
    directory: Path | None,
) -> Source | None:
    """The checkpoint of ``--common-state-checkpoint``."""
    if directory is None:
        return None
    if request.extra_state_source_index is not None:
        raise CheckpointError(
            '--common-state-checkpoint supplies _extra_state too; drop --extra-state-source-index'
        )
    given = read(directory)
    validate_given_extra_states(given, sources)
    return given


def _extra_state_index(request: Request, count: int) -> int:
    index = request.extra_state_source_index or 0
    if not 0 <= index < count:
        raise CheckpointError(f'--extra-state-source-index {index}: expected 0 to {count - 1}')
    return index


def _result(
    request: Request,
    inputs: Inputs,
    plan: MergePlan,
    sources: Sequence[Source],
    target: Path,
    world_size: int,
) -> MergeResult:
    """What is known of the result before anything is written."""
    content_bytes = plan.output_bytes + sum(job.length for job in plan.byte_entries)
    return MergeResult(
        output_dir=target,
        inputs=[str(directory) for directory in inputs.directories],
        weights=list(inputs.weights),
        averaged_tensors=len(plan.tensors),
        copied_extra_states=0,
        content_bytes=content_bytes,
        bytes_written=content_bytes,
        world_size=world_size,
        rank_bytes=[share.source_bytes for share in plan.shares],
        narrowed=plan.narrowed,
        left_out=sum(len(source.left_out) for source in sources),
        dry_run=request.dry_run,
    )


def _warnings(
    inputs: Inputs,
    common: CommonState,
    iteration: int | None,
    target: Path,
    content_bytes: int,
    first: Source,
) -> list[str]:
    found = space_warnings(target, content_bytes)
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
