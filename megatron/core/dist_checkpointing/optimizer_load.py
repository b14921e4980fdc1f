"""What a load does with a checkpoint's optimizer state, and which conversion it takes first."""

import os
import shlex
from pathlib import PurePath
from typing import Any

from megatron_overlay.commands import command_of

from .format_names import FLATTENED, FSDP_DTENSOR, FULLY_RESHARDABLE, IN_BUCKETS, PLAIN, TORCH_DIST
from .stored_checkpoint import StoredCheckpoint, is_layer_wise, stored_optimizer_format
from .unstored_state import saved_without_optimizer, unstored_reason, unstored_state

# What `convert_ckpt_optimizer.py` makes `fully_reshardable` of, and why that is needed.
CONVERTED_FORMATS = {
    IN_BUCKETS: 'which belongs to the layout that saved it',
    FLATTENED: 'which megatron-core loads up to 0.15 only',
}


def optimizer_verdict(stored: StoredCheckpoint, args: Any) -> tuple[bool, str]:
    """Whether the optimizer's state is loaded, and what is in the way of that."""
    if args.no_load_optim or stored.release:
        return False, ''
    has_optimizer = stored.layout is None or stored.layout.has_optimizer
    if not has_optimizer or saved_without_optimizer(stored):
        return False, '' if args.finetune else unstored_reason(unstored_state(stored))
    kind = stored_optimizer_format(stored)
    if stored.layout is None or stored.format != TORCH_DIST:
        return True, ''
    distributed = args.use_distributed_optimizer or is_layer_wise(args)
    if kind == FULLY_RESHARDABLE and not distributed:
        return True, (
            f'The optimizer state of the checkpoint is {kind!r}: pass --use-distributed-optimizer '
            f'to load it, or --no-load-optim.'
        )
    if kind == PLAIN and args.use_distributed_optimizer:
        return True, (
            'The optimizer state of the checkpoint is that of an optimizer which is not '
            'distributed: leave out --use-distributed-optimizer to load it, or pass '
            '--no-load-optim.'
        )
    if is_convertible(stored):
        return True, _convert(stored, kind, CONVERTED_FORMATS[kind])
    if kind not in (PLAIN, FULLY_RESHARDABLE):
        return True, (
            f'The optimizer state of the checkpoint is {kind!r}; between GPT and hybrid only '
            f'{FULLY_RESHARDABLE} can be read. Save it again with '
            f'--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable, or pass '
            f'--no-load-optim.'
        )
    return True, ''


def is_convertible(stored: StoredCheckpoint) -> bool:
    """Whether optimizer state becomes ``fully_reshardable`` by a conversion."""
    return stored_optimizer_format(stored) in CONVERTED_FORMATS and not is_layer_wise(stored.args)


def conversion_refusal(stored: StoredCheckpoint, args: Any) -> str:
    """Why optimizer state goes into the run after a conversion only; empty where it does without.

    In buckets it goes into runs of the same TP and PP size.
    """
    nothing_known = stored.layout is None and 'content_metadata' not in stored.common
    if (
        stored.release
        or nothing_known
        or stored.format != TORCH_DIST
        or any(getattr(args, name, False) for name in ('no_load_optim', 'finetune'))
        or saved_without_optimizer(stored)
        or not getattr(args, 'use_distributed_optimizer', False)
        or is_layer_wise(stored.args)
    ):
        return ''
    kind = stored_optimizer_format(stored)
    if kind == FLATTENED:
        return _convert(stored, kind, CONVERTED_FORMATS[kind])
    sizes = ('tensor_model_parallel_size', 'pipeline_model_parallel_size')
    saved, own = ([getattr(of, name, None) for name in sizes] for of in (stored.args, args))
    if kind != IN_BUCKETS or saved == own or None in saved + own:
        return ''
    why = f'saved with TP {saved[0]} and PP {saved[1]}, and the run has TP {own[0]} and PP {own[1]}'
    return _convert(stored, kind, why)


def _convert(stored: StoredCheckpoint, kind: str, why: str) -> str:
    return (
        f'The optimizer state of the checkpoint is {kind!r}, {why}. Convert it and load the '
        f'result: {conversion_command(stored.directory)}; or pass --no-load-optim.'
    )


def conversion_command(directory: str, to: str = TORCH_DIST) -> str:
    """What makes optimizer state of `CONVERTED_FORMATS` load into any layout.

    Args:
        directory: of the checkpoint's iteration; where empty, the command has no paths.
        to: the format that is wanted.
    """
    path = PurePath(os.path.abspath(directory))  # `.` and `..` don't end with a name
    root = path.parent if path.name.startswith('iter_') else path
    kind = 'fully-reshardable' if to == TORCH_DIST else 'fsdp-dtensor'
    source, target = (directory, f'{root}-{kind}') if directory else ('DIR', 'OUT')
    return (
        f'{command_of("convert_ckpt_optimizer")} --load-dir {shlex.quote(source)} '
        f'--save-dir {shlex.quote(target)}' + ('' if to == TORCH_DIST else f' --to {to}')
    )


def other_format_refusal(stored: str, wanted: str, directory: str) -> str:
    """Why a run that loads one of ``torch_dist`` and ``fsdp_dtensor`` can't take the other.

    Args:
        stored: format of the checkpoint.
        wanted: the one that the run loads.
        directory: of the checkpoint's iteration.
    """
    loaders = 'runs with' if stored == FSDP_DTENSOR else 'runs without'
    return (
        f'{directory}: a {stored} checkpoint, which {loaders} --use-megatron-fsdp load. Convert it '
        f'and load the result: {conversion_command(directory, wanted)}'
    )
