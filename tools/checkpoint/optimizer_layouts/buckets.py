"""The buckets of a ``dp_reshardable`` checkpoint, as its keys and chunks tell.

``chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16,
torch.float32).bucket_idx_0.exp_avg`` is a one-dimensional tensor: the first bucket of the first
buffer of optimizer 1 of the chain at model-parallel position 0. Its chunks are the parameters, cut
where a data-parallel rank's share ends, and what is between them.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import PARAM, parse_position

from ..common.errors import CheckpointError
from ..common.tensors import dtype_name
from ..merge.geometry import Box
from ..merge.source import TensorEntry
from .checkpoint import Checkpoint
from .plan import Piece, stored_chunk

ALIGNMENT = 64  # elements; parameters start at multiples of it

# What fully_reshardable, which is float32, holds exactly.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Bucket:
    """One bucket: its tensors by state, all of one size and cut alike.

    Attributes:
        numel: size without the padding at its end
        edges: offsets at which a chunk begins or ends, in rising order
    """

    name: str
    numel: int = 0
    tensors: dict[str, tuple[str, TensorEntry]] = field(default_factory=dict)
    edges: list[int] = field(default_factory=list)

    def pieces(self, checkpoint: Checkpoint, state: str, start: int, count: int) -> Iterator[Piece]:
        """Elements ``start`` to ``start + count`` of a state, in as many pieces as are stored."""
        key, entry = self.tensors[state]
        done = 0
        first = bisect_right(self.edges, start) - 1
        while done < count:
            begin, end = self.edges[first], self.edges[first + 1]
            taken = min(end, start + count) - (start + done)
            stored = stored_chunk(checkpoint, entry, Box((begin,), (end - begin,)))
            yield Piece(stored, key, start + done - begin, taken, done)
            done += taken
            first += 1


@dataclass
class Buffer:
    """One buffer of a rank: its parameters' dtype, and its buckets in order."""

    dtype: torch.dtype
    buckets: list[Bucket] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Elements of all buckets, padding between parameters included."""
        return sum(bucket.numel for bucket in self.buckets)


@dataclass
class Place:
    """Where a parameter lies: ``numel`` elements from ``start`` of a bucket."""

    bucket: Bucket
    start: int


def read_buffers(checkpoint: Checkpoint) -> dict[tuple[int, int], list[Buffer]]:
    """The buffers of each optimizer of the chain at each model-parallel position, in order.

    Raises:
        CheckpointError: other optimizer tensors, a missing bucket or state, or buckets whose states
            are cut differently
    """
    found: dict[tuple[int, int], dict[int, dict[int, Bucket]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    dtypes: dict[tuple[int, int, int], torch.dtype] = {}
    for key, entry in checkpoint.optimizer.items():
        own = parse_position(key)
        if own is None or own.bucket is None:
            raise CheckpointError(
                f'{checkpoint.directory}: {key}: expected a bucket of the dp_reshardable format'
            )
        position = own.chain, own.group
        dtypes[(*position, own.buffer)] = getattr(torch, own.dtype)
        buckets = found[position][own.buffer]
        bucket = buckets.setdefault(own.bucket, Bucket(key.removesuffix('.' + own.entry)))
        bucket.tensors[own.entry] = key, entry
    states = {state for _, entry in _tensors(found) for state in entry.tensors}
    for _, bucket in _tensors(found):
        _check_bucket(checkpoint, bucket, states)
    return {
        position: [
            Buffer(dtypes[(*position, number)], _in_order(checkpoint, buckets))
            for number, buckets in sorted(buffers.items())
        ]
        for position, buffers in sorted(found.items())
    }


def _tensors(
    found: Mapping[tuple[int, int], Mapping[int, Mapping[int, Bucket]]],
) -> Iterator[tuple[tuple[int, int], Bucket]]:
    for position, buffers in found.items():
        for buckets in buffers.values():
            yield from ((position, bucket) for bucket in buckets.values())


def _in_order(checkpoint: Checkpoint, buckets: Mapping[int, Bucket]) -> list[Bucket]:
    if sorted(buckets) != list(range(len(buckets))):
        raise CheckpointError(
            f'{checkpoint.directory}: {next(iter(buckets.values())).name}: buckets '
            f'{sorted(buckets)} are stored, expected all, counted from 0'
        )
    return [buckets[number] for number in sorted(buckets)]


def _check_bucket(checkpoint: Checkpoint, bucket: Bucket, states: set[str]) -> None:
    where = f'{checkpoint.directory}: {bucket.name}'
    missing = sorted((states | {PARAM}) - set(bucket.tensors))
    if missing:
        raise CheckpointError(f'{where}: no {missing[0]}, which other buckets have')
    for state, (_, entry) in bucket.tensors.items():
        if len(entry.shape) != 1:
            raise CheckpointError(f'{where}.{state}: shape {entry.shape}, expected one dimension')
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f'{where}.{state}: {_dtype_refusal(entry.dtype)}')
    param = bucket.tensors[PARAM][1]
    bucket.numel, bucket.edges = param.shape[0], _edges(param)
    for state, (_, entry) in bucket.tensors.items():
        if entry.shape != param.shape or _edges(entry) != bucket.edges:
            raise CheckpointError(f'{where}.{state}: cut in other chunks than {PARAM}')


def _edges(entry: TensorEntry) -> list[int]:
    return sorted({0, *(e for box in entry.chunks for e in (*box.offsets, *box.ends))})


def _dtype_refusal(dtype: torch.dtype) -> str:
    found = f'stored as {dtype_name(dtype)}, expected float32, bfloat16 or float16'
    if dtype != torch.int16:
        return found
    return (
        f'{found}: these are the lower halves of main parameters, which --store-param-remainders '
        'keeps. Nothing proves to which weights they belong; load it in the layout that saved it, '
        'and save it again with --dist-ckpt-optim-fully-reshardable'
    )


def lay_out(sizes: list[int], buckets: list[Bucket]) -> list[Place] | None:
    """Where parameters of these sizes lie in a buffer's buckets; None where they don't fit.

    The sizes are in buffer order. A parameter starts at a multiple of ``ALIGNMENT``, begins and
    ends with a chunk, and the last one of a bucket ends where the bucket does (or in front of the
    padding before a tied embedding, which has a bucket of its own).
    """
    places: list[Place] = []
    number, at = 0, 0
    inner: list[set[int]] = [set(bucket.edges) for bucket in buckets]
    for size in sizes:
        start = _aligned(at)
        if number < len(buckets) and at and start >= buckets[number].numel:
            number, at, start = number + 1, 0, 0
        if number == len(buckets) or start + size > buckets[number].numel:
            return None
        edges = inner[number]
        if start not in edges or start + size not in edges:
            return None
        places.append(Place(buckets[number], start))
        at = start + size
    if number != len(buckets) - 1 or at != buckets[number].numel:
        return None
    return places if _cut_by_shares(sizes, places, buckets) else None


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _cut_by_shares(sizes: list[int], places: list[Place], buckets: list[Bucket]) -> bool:
    """Whether chunks that end inside parameters all end with a data-parallel rank's share.

    Shares are equal: inside a parameter there is a cut at every multiple of the share's size, so at
    every multiple of what divides all cuts.
    """
    spans: dict[int, list[tuple[int, int]]] = {id(bucket): [] for bucket in buckets}
    for size, place in zip(sizes, places, strict=True):
        spans[id(place.bucket)].append((place.start, place.start + size))
    for bucket in buckets:
        edges, cuts = bucket.edges, set[int]()
        for start, end in spans[id(bucket)]:
            cuts.update(edges[bisect_right(edges, start) : bisect_left(edges, end)])
        share = math.gcd(*cuts)
        for start, end in spans[id(bucket)] if cuts else ():
            first = (start // share + 1) * share
            if not cuts.issuperset(range(first, end, share)):
                return False
    return True
