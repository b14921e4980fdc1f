"""``--verify``: read the output back and put every chunk together again, by another path.

Chunks are read through ``torch.load``, whole; nothing of the block-wise reading is used.
"""

from collections.abc import Sequence

import torch

from ..common.tensors import same_bits
from ..merge.geometry import Box
from ..merge.payload import load_chunk
from ..merge.plan import ChunkJob
from ..merge.source import StoredChunk
from .plan import OutputChunk, Piece


def conversion_fault(job: ChunkJob, written: StoredChunk) -> str | None:
    """What is wrong with a converted chunk."""
    assert isinstance(job, OutputChunk)
    found = load_chunk(written, job.key)
    if not same_bits(found, _expected(job)):
        return 'differs from what the input stores; the output is not published'
    if job.proof:
        weight = _filled(job.proof, job.box, job.proof[0].stored.dtype)
        if not same_bits(found.to(weight.dtype), weight):
            return 'not its weight'
    return None


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
