"""Figures of a conversion, and how they and the plan are shown."""

from dataclasses import dataclass, field
from pathlib import Path

from ..common.directory import FSDP
from ..common.progress import format_bytes, format_rate, format_seconds
from ..merge.report import Timings
from .common_state import TARGET
from .plan import Position

_MOST_POSITIONS = 16


@dataclass
class ConversionResult:
    """What a conversion did; the same on every rank.

    Attributes:
        input_dir: the checkpoint that was read
        output_dir: the published one (or, in a dry run, the one to be)
        format: of the optimizer's state in the input
        target: the same of the output
        tensors: number of the output's optimizer tensors
        elements: of the main parameters, each written once
        copies: elements of replicated main parameters, which are compared and not written
        padding: elements of the stored buckets that belong to no parameter
        proven: elements of main parameters that are their weight's, copies among them
        different_copies: FQN to the number of replicated elements that other ranks store otherwise
        positions: by model-parallel position what is stored
        without_state: weights without optimizer state
        copied_bytes: of weights and other state, taken over as they are stored
        content_bytes: of the output
        bytes_read: of stored elements, and of what is copied
        world_size: number of ranks
        rank_bytes: bytes that each rank reads
        peak_memory, conversion_memory: of each rank in bytes, as a merge reports them
        warnings: what the user should know
        already: the input has the target's format; nothing was done
    """

    input_dir: Path
    output_dir: Path
    format: str
    target: str = TARGET
    tensors: int = 0
    elements: int = 0
    copies: int = 0
    padding: int = 0
    proven: int = 0
    different_copies: dict[str, int] = field(default_factory=dict)
    positions: list[Position] = field(default_factory=list)
    without_state: list[str] = field(default_factory=list)
    copied_bytes: int = 0
    content_bytes: int = 0
    bytes_read: int = 0
    world_size: int = 1
    rank_bytes: list[int] = field(default_factory=list)
    peak_memory: list[int] = field(default_factory=list)
    conversion_memory: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    already: bool = False
    dry_run: bool = False


def plan_text(result: ConversionResult) -> str:
    """The plan: what is stored at which position, and what is written where."""
    lines = [f'input: {result.input_dir}, optimizer state {result.format}']
    lines += [
        f'  {position.name}: {position.parameters} parameters, {position.elements} elements'
        + _in_buckets(position.buckets)
        for position in result.positions[:_MOST_POSITIONS]
    ]
    if len(result.positions) > _MOST_POSITIONS:
        lines.append(f'  … ({len(result.positions)} in all)')
    lines += [
        f'  {result.padding} elements of padding, {result.copies} of replicated parameters',
        f'output: {result.output_dir}, optimizer state {result.target}',
        f'  {result.tensors} tensors of optimizer state, {result.elements} elements each of '
        f'param and moments; {format_bytes(result.copied_bytes)} copied as they are; '
        f'{format_bytes(result.content_bytes)} in all',
    ]
    if result.without_state:
        lines.append(
            f'  {len(result.without_state)} weights without optimizer state: '
            + ', '.join(result.without_state[:4])
            + (', …' if len(result.without_state) > 4 else '')
        )
    return '\n'.join(lines + [f'warning: {text}' for text in result.warnings])


def _in_buckets(number: int) -> str:
    return f' in {number} bucket{"s" if number != 1 else ""}' if number else ''


def report_text(result: ConversionResult) -> str:
    """What was done, in how much time and memory."""
    times = result.timings
    lines = [
        f'converted {result.format} into {result.target}: {result.output_dir}',
        f'{result.elements} elements of main parameters written, each once'
        + (f', {result.proven} proven by their weights' if result.proven else ''),
        f'time: {format_seconds(times.total)} (discovery {times.discovery:.2f}, '
        f'read {times.load:.2f}, proof {times.accumulate:.2f}, save {times.save:.2f}, '
        f'verify {times.verify:.2f}, publish {times.publish:.2f})',
        f'read {format_bytes(result.bytes_read)} of content at '
        f'{format_rate(result.bytes_read, times.total)}, '
        f'wrote {format_bytes(result.content_bytes)}',
        'peak host memory by rank: '
        + ', '.join(format_bytes(size) for size in result.peak_memory[:16])
        + '; above what was loaded before (Python, torch): '
        + ', '.join(format_bytes(size) for size in result.conversion_memory[:16]),
    ]
    if result.different_copies:
        number = sum(result.different_copies.values())
        lines.append(
            f'warning: {number} elements of {len(result.different_copies)} replicated tensors '
            f'({next(iter(result.different_copies))}, …) differ between model-parallel ranks; the '
            "first rank's are written, as megatron-core does"
        )
    return '\n'.join(lines)


def already_text(result: ConversionResult) -> str:
    """Why there is nothing to do."""
    loads = 'what Megatron-FSDP loads' if result.target == FSDP else 'which loads into any layout'
    return (
        f'{result.input_dir}: the optimizer state is {result.target} already, {loads}; nothing '
        'was written'
    )
