"""``--verify``: read the output back and put every chunk together again, by another path.

Chunks are read through ``torch.load``, whole; nothing of the block-wise reading is used.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ..common.errors import CheckpointError
from ..common.tensors import same_bits
from ..merge.geometry import Box
from ..merge.payload import load_chunk, read_bytes
from ..merge.plan import RankShare
from ..merge.source import Slice, StoredChunk
from .plan import OutputChunk, Piece


def verify_share(
    directory: Path,
    share: RankShare,
    places: Iterable[_StorageInfo],
    on_bytes: Callable[[int], object] = lambda count: None,
) -> None:
    """Check what one rank wrote.

    Args:
        directory: the output, published or not
        share: chunks and byte entries to check
        places: where each of them is stored
        on_bytes: told the source bytes of each chunk that was checked

    Raises:
        CheckpointError: a chunk or byte entry differs; names its key
    """
    written = ((directory / place.relative_path, Slice.of(place)) for place in places)
    for job in share.chunks:
        assert isinstance(job, OutputChunk)
        path, piece = next(written)
        found = load_chunk(StoredChunk(path, piece, job.box, job.dtype), job.key)
        if not same_bits(found, _expected(job)):
            raise CheckpointError(
                f'{path}: {job.key} at {job.box.offsets}: differs from what the input stores; the '
                'output is not published'
            )
        if job.proof:
            weight = _filled(job.proof, job.box, job.proof[0].stored.dtype)
            if not same_bits(found.to(weight.dtype), weight):
                raise CheckpointError(f'{path}: {job.key} at {job.box.offsets}: not its weight')
        on_bytes(job.source_bytes)
    for entry, (path, piece) in zip(share.byte_entries, written, strict=True):
        if read_bytes(path, piece) != entry.read():
            raise CheckpointError(f'{path}: {entry.key}: differs from what the input stores')


def _expected(job: OutputChunk) -> torch.Tensor:
    if job.fill is not None:
        return torch.full(job.box.sizes, job.fill, dtype=job.dtype, device='cpu')
    return _filled(job.pieces, job.box, job.dtype)


def _filled(pieces: Sequence[Piece], box: Box, dtype: torch.dtype) -> torch.Tensor:
    result = torch.empty(box.numel, dtype=dtype, device='cpu')
    for piece in pieces:
        chunk = load_chunk(piece.stored, piece.key)
        part = chunk.reshape(-1)[piece.start : piece.start + piece.count]
        result[piece.at : piece.at + piece.count] = part
    return result.view(box.sizes)
