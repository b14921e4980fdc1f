"""``--verify``: read the output back and compute every chunk again, by another path.

Chunks are read through ``torch.load``, whole, and merged in the plain loop of the contract; nothing
of the merge's block-wise reading or arithmetic is used.
"""

import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ..common.errors import CheckpointError
from ..common.tensors import same_bits
from .payload import OpenFiles, load_chunk, read_bytes
from .plan import ChunkJob, RankShare
from .source import Slice, StoredChunk


def verify_share(
    directory: Path,
    share: RankShare,
    places: Iterable[_StorageInfo],
    fault: Callable[[ChunkJob, StoredChunk, OpenFiles], str | None],
    on_bytes: Callable[[int], object],
) -> None:
    """Check what one rank wrote.

    Args:
        directory: the output, published or not
        share: chunks and byte entries to check
        places: where each of the share's entries is stored
        fault: what is wrong with a chunk that was written
        on_bytes: told the source bytes of each chunk that was checked

    Raises:
        CheckpointError: a chunk or byte entry differs; names its key
    """
    stored = ((directory / place.relative_path, Slice.of(place)) for place in places)
    with closing(OpenFiles()) as files:
        for job in share.chunks:
            path, piece = next(stored)
            found = fault(job, StoredChunk(path, piece, job.box, job.dtype), files)
            if found:
                raise CheckpointError(f'{path}: {job.key} at {job.box.offsets}: {found}')
            on_bytes(job.source_bytes)
    for entry, (path, piece) in zip(share.byte_entries, stored, strict=True):
        if read_bytes(path, piece) != entry.read():
            raise CheckpointError(f'{path}: {entry.key}: differs from what the input stores')


def merge_fault(
    job: ChunkJob, written: StoredChunk, files: OpenFiles, weights: Sequence[float]
) -> str | None:
    """What is wrong with a merged chunk."""
    if same_bits(_loaded(job.key, written, files), _expected(job, weights, files)):
        return None
    return 'differs from the weighted sum of its inputs; the output is not published'


def _expected(job: ChunkJob, weights: Sequence[float], files: OpenFiles) -> torch.Tensor:
    rounded = torch.tensor(weights, dtype=torch.float32, device='cpu').tolist()
    total = assembled(job, job.stored[0], files).float() * rounded[0]
    for stored, weight in zip(job.stored[1:], rounded[1:], strict=True):
        total.add_(assembled(job, stored, files).float(), alpha=weight)
    return total.to(job.dtype)


def assembled(job: ChunkJob, stored: Sequence[StoredChunk], files: OpenFiles) -> torch.Tensor:
    """One source's elements of the output chunk, by slicing whole chunks."""
    result = torch.empty(job.box.sizes, dtype=stored[0].dtype, device='cpu')
    for part in stored:
        chunk = _loaded(job.key, part, files)
        shared = job.box.intersection(part.box)
        if shared is not None:
            result[_window(shared.offsets, shared.ends, job.box.offsets)] = chunk[
                _window(shared.offsets, shared.ends, part.box.offsets)
            ]
    return result


def _loaded(key: str, part: StoredChunk, files: OpenFiles) -> torch.Tensor:
    """A stored chunk through ``torch.load``, and what that alone doesn't take as the merge does."""
    content = io.BytesIO(read_bytes(part.path, part.piece, files))
    try:
        with warnings.catch_warnings(action='ignore'):  # of other pickle protocols
            loaded = torch.load(content, map_location='cpu', weights_only=True)
    except Exception:
        loaded = None
    if (
        type(loaded) is torch.Tensor
        and loaded.layout == torch.strided
        and (loaded.dtype, tuple(loaded.shape)) == (part.dtype, part.box.sizes)
        and not loaded.is_meta
    ):
        return loaded
    return load_chunk(part, key)


def _window(starts: Sequence[int], ends: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, origin, strict=True))
