"""Figures of a conversion, and how they and the plan are shown."""

from dataclasses import dataclass, field
from pathlib import Path

from megatron_overlay.standalone.dist_checkpointing.format_names import (
    FSDP_DTENSOR,
    FULLY_RESHARDABLE,
)

from ..common.progress import format_bytes
from ..merge.report import Result, figure_lines
from .plan import Position

_MOST_POSITIONS = 16


@dataclass(kw_only=True)
class ConversionResult(Result):
    """What a conversion did.

    Attributes:
        input_dir: the checkpoint that was read
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
        conversion_memory: of each rank in bytes, as a merge reports it
        already: the input has the target's format; nothing was done
    """

    input_dir: Path
    format: str
    target: str = FULLY_RESHARDABLE
    tensors: int = 0
    elements: int = 0
    copies: int = 0
    padding: int = 0
    proven: int = 0
    different_copies: dict[str, int] = field(default_factory=dict)
    positions: list[Position] = field(default_factory=list)
    without_state: list[str] = field(default_factory=list)
    copied_bytes: int = 0
    conversion_memory: list[int] = field(default_factory=list)
    already: bool = False


def plan_text(result: ConversionResult) -> str:
    """The plan: what is stored at which position, and what is written where."""
    if result.already:
        loads = (
            'what Megatron-FSDP loads'
            if result.target == FSDP_DTENSOR
            else 'which loads into any layout'
        )
        return (
            f'{result.input_dir}: the optimizer state is {result.target} already, {loads}; nothing '
            'was written'
        )
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
    """What was done, in how much time and memory; empty where the plan says that nothing is."""
    if result.already:
        return ''
    lines = [
        f'converted {result.format} into {result.target}: {result.output_dir}',
        f'{result.elements} elements of main parameters written, each once'
        + (f', {result.proven} proven by their weights' if result.proven else ''),
    ]
    wrote, memory = format_bytes(result.content_bytes), result.conversion_memory
    lines += figure_lines(result, memory, wrote, 'read', 'proof', 'the conversion')
    if result.different_copies:
        number = sum(result.different_copies.values())
        lines.append(
            f'warning: {number} elements of {len(result.different_copies)} replicated tensors '
            f'({next(iter(result.different_copies))}, …) differ between model-parallel ranks; the '
            "first rank's are written, as megatron-core does"
        )
    return '\n'.join(lines)
