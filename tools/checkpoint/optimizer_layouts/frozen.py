"""Which weights have no optimizer state, found by content: frozen parameters are in no bucket.

A parameter that is trained has its main parameter in a bucket, and that, cast, is the weight. So a
weight whose first elements begin no piece of any bucket is frozen. Those that others are equal to
(layer norms of ones) may be; then each way is derived, and all but one have to fail.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing

import torch

from ..common.errors import CheckpointError
from .assemble import Assembler
from .buckets import ALIGNMENT, Bucket
from .checkpoint import Checkpoint
from .parameters import Model, Parameter, Part
from .plan import PARAM, stored_chunk

_HEAD = 256  # elements that are compared
_MOST_DOUBTFUL = 8

Head = tuple[torch.dtype, int, int, bytes]
"""Of a parameter: dtype, size, and the number and bits of the first elements."""


def possibly_frozen(
    checkpoint: Checkpoint, model: Model, buckets: list[Bucket]
) -> Iterator[frozenset[str]]:
    """Every set of weights that may be those without optimizer state, by FQN.

    Raises:
        CheckpointError: a part of a stack has state, which ``fully_reshardable`` can't express
    """
    keys_of: dict[Head, set[str]] = defaultdict(set)
    layers: dict[str, dict[bool, set[int]]] = defaultdict(lambda: {True: set(), False: set()})
    with closing(Assembler()) as assembler:
        heads = _Heads(checkpoint, buckets, assembler)
        for parameter in model.parameters:
            for parts in parameter.ranks:
                head = heads.of_weight(parameter, parts[0])
                keys_of[head].add(parameter.key)
                layers[parameter.key][heads.in_a_bucket(head)].add(parameter.layer)
    for key, by_state in layers.items():
        if by_state[True] and by_state[False]:
            raise CheckpointError(
                f'{checkpoint.directory}: {key}: of layers {sorted(by_state[True])} optimizer '
                f'state is stored, and of {sorted(by_state[False])} none: fully_reshardable has '
                'state of all layers of a stack or of none; load it in the layout that saved it'
            )
    frozen = {key for key, by_state in layers.items() if not by_state[True]}
    doubtful = sorted(set().union(*(keys for keys in keys_of.values() if len(keys) > 1)) - frozen)
    for count in range(len(doubtful) + 1 if len(doubtful) <= _MOST_DOUBTFUL else 1):
        for more in itertools.combinations(doubtful, count):
            yield frozenset(frozen.union(more))


class _Heads:
    """First elements of all that may be a parameter in a bucket."""

    def __init__(self, checkpoint: Checkpoint, buckets: list[Bucket], assembler: Assembler) -> None:
        self._checkpoint = checkpoint
        self._assembler = assembler
        self._buckets = [(bucket, set(bucket.edges)) for bucket in buckets]
        self._of_size: dict[int, list[tuple[Bucket, int]]] = {}
        self._read: dict[tuple[int, int, int], torch.Tensor] = {}
        self._found: dict[tuple[torch.dtype, int, int], set[bytes]] = {}

    def of_weight(self, parameter: Parameter, part: Part) -> Head:
        key, box = part
        count = min(box.numel, _HEAD)
        stored = stored_chunk(self._checkpoint, self._checkpoint.weights[key], box)
        values = self._assembler.read(stored, key, 0, count)
        return parameter.dtype, parameter.numel, count, _bits(values)

    def in_a_bucket(self, head: Head) -> bool:
        """Whether a piece of a bucket of that size begins so."""
        dtype, numel, count, bits = head
        kind = dtype, numel, count
        if kind not in self._found:
            self._found[kind] = {
                _bits(self._first(bucket, start, count).to(dtype))
                for bucket, start in self._pieces(numel)
            }
        return bits in self._found[kind]

    def _pieces(self, numel: int) -> list[tuple[Bucket, int]]:
        if numel not in self._of_size:
            self._of_size[numel] = [
                (bucket, start)
                for bucket, edges in self._buckets
                for start in bucket.edges
                if start % ALIGNMENT == 0 and start + numel in edges
            ]
        return self._of_size[numel]

    def _first(self, bucket: Bucket, start: int, count: int) -> torch.Tensor:
        place = id(bucket), start, count
        if place not in self._read:
            pieces = bucket.pieces(self._checkpoint, PARAM, start, count)
            read = self._assembler.read
            self._read[place] = torch.cat([read(p.stored, p.key, p.start, p.count) for p in pieces])
        return self._read[place]


def _bits(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()
