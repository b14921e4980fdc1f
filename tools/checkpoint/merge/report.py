"""Figures of a merge, and how they and the plan are shown."""

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path

from ..common.errors import CheckpointError
from ..common.paths import TRACKER_NAME, real_path, refuse_unwritable
from ..common.progress import format_bytes, format_rate, format_seconds

MAX_REPORT_BYTES = 2**26


@dataclass
class Timings:
    """Wall time in seconds.

    Attributes:
        discovery: metadata, validation, planning
        load: reading tensors, mean of a rank's writer threads, of the slowest rank
        accumulate: arithmetic, likewise
        save: the rest of writing, and the common state
        verify: checks after writing (``--verify``, the integrity manifest)
        publish: flushing and renaming
        total: all of it
    """

    discovery: float = 0.0
    load: float = 0.0
    accumulate: float = 0.0
    save: float = 0.0
    verify: float = 0.0
    publish: float = 0.0
    total: float = 0.0


@dataclass(kw_only=True)
class Result:
    """What a command that writes a checkpoint did; the same on every rank.

    Attributes:
        output_dir: the published checkpoint directory (or, in a dry run, the one to be)
        bytes_read: content read by all ranks: bytes of elements and of entries that are copied
        content_bytes: content of the output
        world_size: number of ranks
        rank_bytes: source bytes of each rank
        peak_memory: largest resident size of each rank in bytes
        warnings: what the user should know
        timings: where the time went
    """

    output_dir: Path
    bytes_read: int = 0
    content_bytes: int = 0
    world_size: int = 1
    rank_bytes: list[int] = field(default_factory=list)
    peak_memory: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    dry_run: bool = False


@dataclass(kw_only=True)
class MergeResult(Result):
    """What a merge did.

    Attributes:
        inputs, weights: what was merged, in order
        averaged_tensors: number of tensors merged
        copied_extra_states: number of ``_extra_state`` entries copied
        bytes_written: bytes of the output's files, which have archives, metadata and common state
            besides; ``content_bytes`` where nobody looked at them, as in a dry run
        merge_memory: how far ``peak_memory`` lies above the size at the start of the merge, which
            is Python, torch and megatron-core themselves
        narrowed: fp32 tensors saved in a narrower dtype
        nonfinite_inputs: ``source: key`` to the number of its elements that aren't finite
        left_out: number of entries of training state left unread, of all inputs together
    """

    inputs: list[str]
    weights: list[float]
    averaged_tensors: int
    copied_extra_states: int
    bytes_written: int = 0
    merge_memory: list[int] = field(default_factory=list)
    narrowed: list[str] = field(default_factory=list)
    nonfinite_inputs: dict[str, int] = field(default_factory=dict)
    left_out: int = 0


def plan_text(result: MergeResult) -> str:
    """The plan: inputs with weights, what is written where, the ranks' load."""
    width = max(len(name) for name in result.inputs)
    lines = ['inputs, in order:']
    lines += [
        f'  {name:<{width}}  weight {weight:.9g}'
        for name, weight in zip(result.inputs, result.weights, strict=True)
    ]
    lines += [
        f'output: {result.output_dir}',
        f'  {result.averaged_tensors} tensors averaged, {result.copied_extra_states} _extra_state '
        f'entries copied: {format_bytes(result.content_bytes)} of content, plus file '
        'headers and metadata',
        f'  {format_bytes(sum(result.rank_bytes))} of content to read by {result.world_size} rank'
        f'{"s" if result.world_size > 1 else ""}: ' + _sizes(result.rank_bytes),
    ]
    if result.left_out:
        lines.append(f'  {result.left_out} entries of training state in all left unread')
    if result.narrowed:
        lines.append('  fp32 tensors narrowed: ' + ', '.join(_some(result.narrowed)))
    return '\n'.join(lines + [f'warning: {text}' for text in result.warnings])


def report_text(result: MergeResult) -> str:
    """What was done, in how much time and memory."""
    lines = [
        f'merged {len(result.inputs)} checkpoints into {result.output_dir}: '
        f'{result.averaged_tensors} tensors, {result.copied_extra_states} _extra_state entries'
    ]
    wrote = f'{_written(result)} at {format_rate(result.bytes_written, result.timings.total)}'
    memory = result.merge_memory
    lines += figure_lines(result, memory, wrote, 'load', 'accumulate', 'the merge')
    lines += [
        f'not finite: {count} values of {name}' for name, count in result.nonfinite_inputs.items()
    ]
    return '\n'.join(lines)


def figure_lines(
    result: Result, own_memory: Sequence[int], wrote: str, load: str, accumulate: str, what: str
) -> list[str]:
    """Time, bytes and memory.

    Args:
        own_memory: of each rank, above what it held at the beginning
        load, accumulate: what the command calls reading and arithmetic
        what: it does
    """
    times = result.timings
    return [
        f'time: {format_seconds(times.total)} (discovery {times.discovery:.2f}, '
        f'{load} {times.load:.2f}, {accumulate} {times.accumulate:.2f}, save {times.save:.2f}, '
        f'verify {times.verify:.2f}, publish {times.publish:.2f})',
        f'read {format_bytes(result.bytes_read)} of content at '
        f'{format_rate(result.bytes_read, times.total)}, wrote {wrote}',
        f'peak host memory by rank: {_sizes(result.peak_memory)}; above what was loaded before '
        f'{what} (Python, torch): {_sizes(own_memory)}',
    ]


def _sizes(sizes: Sequence[int]) -> str:
    return ', '.join(_some([format_bytes(size) for size in sizes]))


def _written(result: MergeResult) -> str:
    content = f'{format_bytes(result.content_bytes)} of content'
    if result.bytes_written == result.content_bytes:
        return content
    return f'{format_bytes(result.bytes_written)} of files ({content})'


def write_json(result: Result, file: Path) -> None:
    """Write every figure of a result as JSON."""
    try:
        file.write_text(json.dumps(asdict(result), indent=2, default=str) + '\n')
    except OSError as error:
        raise CheckpointError(f"{file}: can't be written: {error.strerror}") from error


def is_report(content: bytes, of: type[Result]) -> bool:
    """Whether a file holds such a result by ``write_json``, or nothing, and so may be replaced."""
    if not content.strip():
        return True
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return False
    required = {
        field.name
        for field in fields(of)
        if field.default is field.default_factory is MISSING  # reports of other versions have them
    }
    return isinstance(found, dict) and required <= set(found)


def refuse_report(
    report: Path, target: Path, read_from: Mapping[Path, str], of: type[Result]
) -> None:
    """Raise where writing a report would damage something, or can't work.

    What it may replace is a report, or an empty file; a pipe or a terminal takes it too.

    Args:
        report: the file
        target: the directory that is written
        read_from: checkpoint directories that are read, and what they are called
        of: the result that is reported

    Raises:
        CheckpointError: it lies in one of the checkpoints, or is something else that exists
    """
    file, output = real_path(report), real_path(target)
    if file.is_relative_to(output) or output.is_relative_to(file):
        raise CheckpointError(f'--report-json {report}: in the place of the output {target}')
    if file.name == TRACKER_NAME:
        raise CheckpointError(f'--report-json {report}: the place of a tracker; name another file')
    for directory, name in read_from.items():
        if file.is_relative_to(real_path(directory)):
            raise CheckpointError(f'--report-json {report}: lies inside {name}')
    try:
        found = os.stat(file)
        mode = found.st_mode
        if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
            return
        if not stat.S_ISREG(mode):
            raise CheckpointError(f'--report-json {report}: exists and is no file; name another')
        refuse_unwritable(report, file)
        if found.st_size > MAX_REPORT_BYTES or not is_report(file.read_bytes(), of):
            raise CheckpointError(
                f'--report-json {report}: exists and is no such report; name another file'
            )
    except FileNotFoundError:
        refuse_unwritable(report, file.parent)
    except OSError as error:
        raise CheckpointError(
            f"--report-json {report}: can't be written: {error.strerror}"
        ) from error


def _some(values: Sequence[str]) -> list[str]:
    return [*values[:16], f'… ({len(values)} in all)'] if len(values) > 16 else list(values)
