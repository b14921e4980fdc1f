"""A summary and a comparison as text."""

from collections.abc import Iterator, Mapping

from megatron_overlay.standalone.dist_checkpointing.format_names import LEGACY, NO_STATE, OTHER

from ..common.progress import format_bytes
from ..common.stdout import printable
from .compare import Comparison
from .summary import Amount, CheckpointSummary, ModelSummary, counted_layers

_SHOWN = 4  # keys of each kind of difference


def summary_text(summary: CheckpointSummary) -> str:
    """The report, some 15 lines."""
    rows = {
        'format': summary.format,
        'iteration': 'unknown' if summary.iteration is None else str(summary.iteration),
        'model': ', '.join(_model(summary.model)),
        'saved with': _parallel(summary),
        'weights': _amounts(summary.weights),
        'optimizer state': _optimizer(summary),
        'other state': format_bytes(summary.other_bytes),
        'common state': summary.common_state,
        'integrity': (
            'no manifest'
            if summary.manifest_files is None
            else f'manifest of {_count(summary.manifest_files, "file")}, not checked here'
        ),
        'loaded by': summary.load or 'nothing: no directory above it has a tracker that names it',
        'on disk': f'{format_bytes(summary.file_bytes)} in {_count(summary.files, "file")}',
    }
    lines = [str(summary.directory), *(f'  {name:16}  {text}' for name, text in rows.items())]
    lines.append('taken by')
    for use in summary.uses:
        answer = {True: 'yes', False: 'no', None: 'unknown'}[use.works]
        lines.append(f'  {use.name:22}  {answer}' + (f': {use.reason}' if use.reason else ''))
    return '\n'.join(map(printable, lines))


def comparison_text(comparison: Comparison) -> str:
    """What keeps two checkpoints from being merged: a bounded number of lines."""
    first, other = comparison.directories
    lines = [f'A  {first}', f'B  {other}', *comparison.faults]
    for group in comparison.groups():
        count = len(group)
        if group[0].key:
            merges = f', {group[0].option} merges them' if group[0].option else ''
            lines.append(f'{group[0].kind} of {_count(count, "tensor")}, B against A{merges}')
            lines += [f'  {item.key}: {item.text}' for item in group[:_SHOWN]]
            if count > _SHOWN:
                lines.append(f'  and {count - _SHOWN} more')
        else:
            lines += [f'{item.kind} {item.text}, B against A' for item in group]
    options = ' '.join(comparison.options)
    if not comparison.mergeable:
        lines.append('not mergeable')
    else:
        lines.append(f'mergeable with {options}' if options else 'mergeable')
    return '\n'.join(map(printable, lines))


def _model(model: ModelSummary) -> Iterator[str]:
    if model.family == OTHER:
        yield 'neither GPT nor hybrid by its keys'
        return
    if model.pattern is not None:
        yield f'hybrid, {_count(model.layers, "layer")} {model.pattern}'
    else:
        yield f'GPT, {counted_layers(model.layers, model.stored_by == "index")}'
        kinds = [f'{model.dense} dense'] if model.dense else []
        kinds += [f'{model.moe} MoE'] if model.moe else []
        yield f'{" and ".join(kinds) or "no"} MLPs'
    if model.latent_attention:
        yield 'multi-latent attention'
    if model.mtp_layers:
        yield f'{_count(model.mtp_layers, "MTP layer")}'
    yield f'by {model.evidence}'


def _parallel(summary: CheckpointSummary) -> str:
    if not summary.parallel:
        return 'unknown: no arguments are stored'
    sizes = ', '.join(f'{name} {size}' for name, size in summary.parallel.items())
    return f'{sizes} (by {summary.parallel_from})'


def _amounts(amounts: Mapping[str, Amount]) -> str:
    parts = [
        f'{name} {format_bytes(amount.bytes)} in {_count(amount.tensors, "tensor")}'
        for name, amount in sorted(amounts.items())
    ]
    return ', '.join(parts) or 'none'


def _optimizer(summary: CheckpointSummary) -> str:
    state = summary.optimizer
    if state.format == NO_STATE:
        return 'none'
    parts = [state.format]
    if state.steps is not None:
        parts.append(f'step {" and ".join(map(str, state.steps)) or "not stored"}')
    if state.amounts or summary.format != LEGACY:
        parts.append(_amounts(state.amounts))
    return ', '.join(parts)


def _count(number: int, what: str) -> str:
    return f'{number} {what}' if number == 1 else f'{number} {what}s'
