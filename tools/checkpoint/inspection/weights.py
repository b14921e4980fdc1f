"""Whether a checkpoint's main parameters are those of its weights, told from the checkpoint alone.

Stored side by side, a weight is its main parameter in the weight's dtype. Where it isn't, the
optimizer state under that name belongs to something else, and the first step after a resume
overwrites the weight with it.
"""

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import (
    MAIN_PARAMS,
    is_training_state,
    parse_key,
)
from megatron_overlay.standalone.dist_checkpointing.format_names import NO_STATE
from megatron_overlay.standalone.dist_checkpointing.optimizer_load import (
    conversion_command,
    is_convertible,
)
from megatron_overlay.standalone.dist_checkpointing.stored_checkpoint import (
    StoredCheckpoint,
    stored_optimizer_format,
)
from megatron_overlay.standalone.dist_checkpointing.unstored_state import NO_OPTIMIZER
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..common.errors import CheckpointError
from ..common.progress import progress_bar
from ..common.stdout import printable
from ..common.stored import tensors_in
from ..merge.geometry import Box
from ..merge.payload import OpenFiles
from ..merge.plan import ChunkJob, StoredChunk
from ..merge.source import Places, TensorEntry, tensor_entry
from ..merge.verify import assembled
from .resume import find_distributed, read_stored

_COMPARED = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class WeightCheck:
    """What comparing the main parameters of a checkpoint with its weights found.

    Attributes:
        checkpoint_dir: the directory of one iteration.
        compared: number of weights that were compared.
        different: weight to the number of its elements that differ, in the checkpoint's order.
        sizes: weight to its number of elements, for those that differ.
        without_main_param: weights that the optimizer has no main parameter for: frozen ones, and
            buffers such as MoE expert biases.
        not_compared: main parameter to the reason why there is nothing to compare it with.
    """

    checkpoint_dir: Path
    compared: int = 0
    different: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    without_main_param: list[str] = field(default_factory=list)
    not_compared: dict[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        counts = f'{self.compared} main parameters compared with their weights'
        lines = [f'{self.checkpoint_dir}: {counts}, {len(self.different) or "none"} differ']
        lines += [
            f'  {weight}: {found} of {self.sizes[weight]} elements'
            for weight, found in self.different.items()
        ]
        lines += [f'  not compared: {key} ({why})' for key, why in self.not_compared.items()]
        if self.without_main_param:
            lines.append(f'  {len(self.without_main_param)} tensors have no optimizer state:')
            lines += [f'    {weight}' for weight in self.without_main_param]
        if self.different:
            lines += [
                'These weights and their optimizer state do not belong together. If the checkpoint',
                'was saved by stock megatron-core from several buckets, the weights are right:',
                'resume with --no-load-optim. Otherwise either may be damaged: take another one.',
            ]
        return '\n'.join(map(printable, lines))


def check_weights(checkpoint: str | Path) -> WeightCheck:
    """Compare each stored main parameter, in the weight's dtype, with the stored weight.

    One stored chunk after the other is read: memory is two chunks, whatever the checkpoint's size.

    Args:
        checkpoint: directory of one iteration, or one above with a tracker file.

    Raises:
        CheckpointError: there is no distributed checkpoint; the optimizer state isn't
            stored by parameter, or can't be read.
    """
    found = find_distributed(checkpoint)
    directory, metadata = found.directory, found.metadata
    tensors = tensors_in(metadata)
    result = WeightCheck(directory)
    pairs = list(_pairs(tensors, result))
    if not pairs:
        raise CheckpointError(f'{directory}: {_why_nothing_to_compare(read_stored(found))}')
    remainders, places = True, Places(directory, metadata)
    size = sum(4 * math.prod(tensors[key].size) for key, _ in pairs)
    with (
        progress_bar(size, 'compared', unit='B') as progress,
        closing(OpenFiles()) as files,
    ):
        for pair in pairs:
            entries = [tensor_entry(key, tensors[key], places) for key in pair]
            differing = 0
            for box in entries[0].chunks:
                main, stored = (
                    _read(directory, key, entry, box, files)
                    for key, entry in zip(pair, entries, strict=True)
                )
                remainders &= _may_be_remainders(main)
                differing += _count_different(main.to(stored.dtype), stored)
                progress.update(4 * main.numel())
            result.compared += 1
            if differing:
                result.different[pair[1]] = differing
                result.sizes[pair[1]] = math.prod(entries[1].shape)
    if result.different and remainders:
        raise CheckpointError(
            f'{directory}: the main parameters are whole numbers: their last 16 bits, as '
            f"Transformer Engine's precision-aware optimizer keeps them; nothing to compare"
        )
    return result


def _pairs(tensors: dict[str, TensorStorageMetadata], result: WeightCheck) -> Iterator[tuple]:
    """Keys of main parameters and their weights; notes in the result what makes no pair."""
    main_params = {
        own.weight: key for key in tensors if (own := parse_key(key)).state in MAIN_PARAMS
    }
    result.without_main_param = [
        key for key in tensors if key not in main_params and not is_training_state(key)
    ]
    for weight, key in main_params.items():
        stored = tensors.get(weight)
        if stored is None:
            result.not_compared[key] = 'the checkpoint has no such weight'
        elif stored.size != tensors[key].size:
            shapes = f'{list(tensors[key].size)} instead of {list(stored.size)}'
            result.not_compared[key] = f'its shape is {shapes}'
        elif stored.properties.dtype not in _COMPARED:
            result.not_compared[key] = f'the weight is {stored.properties.dtype}'
        else:
            yield key, weight


def _why_nothing_to_compare(stored: StoredCheckpoint) -> str:
    kind = stored_optimizer_format(stored)
    if kind == NO_STATE:
        return f'{NO_OPTIMIZER}, and so no main parameters to compare with the weights'
    if is_convertible(stored):
        return (
            f'the main parameters are stored as {kind}; {conversion_command(stored.directory)} '
            f'puts them together and compares each with its weight'
        )
    return (
        f'no optimizer.state.param.<weight> beside a <weight>, in optimizer state that is stored '
        f'as {kind}; an fp32 optimizer that is not distributed has no main parameters'
    )


def _may_be_remainders(main: torch.Tensor) -> bool:
    return bool(((main == main.round()) & (main.abs() <= 1 << 15)).all())


def _count_different(main: torch.Tensor, weight: torch.Tensor) -> int:
    both_nan = main.isnan() & weight.isnan()
    return int(((main != weight) & ~both_nan).sum())


def _read(
    directory: Path, key: str, entry: TensorEntry, box: Box, files: OpenFiles
) -> torch.Tensor:
    """The part of a tensor inside the box, from whatever chunks hold it."""
    stored = [
        StoredChunk(directory / piece.file, piece, other, entry.dtype)
        for other, piece in entry.chunks.items()
        if other == box or box.intersection(other)
    ]
    return assembled(ChunkJob(key, box, entry.dtype, ()), stored, files)
