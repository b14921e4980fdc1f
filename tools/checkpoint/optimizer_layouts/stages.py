"""Which parameters each rank's buffers hold: the layers of the model's chunks, found by size.

Chunks of a model (pipeline stages, and with virtual stages several of each) have consecutive parts
of it: layers, then the final norm, MTP, and the output layer; the first one has the embedding as
well. A chunk has one buffer for each dtype. The parts of a chunk are as many as fill its buffers:
more don't fit, and fewer leave elements over.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .buckets import ALIGNMENT, Buffer, Place, lay_out
from .order import Order
from .parameters import Parameter

_EMBEDDING = 'embedding.'
_WORD_EMBEDDING = 'embedding.word_embeddings.weight'
_STACKS = ('decoder.layers', 'encoder.layers')
_MTP = 'mtp.layers'


@dataclass
class Placed:
    """A parameter and where it lies at one position."""

    parameter: Parameter
    place: Place


@dataclass
class Chunk:
    """What one chunk of the model has.

    Attributes:
        placed: its parameters
        layers: block and number of its layers
    """

    placed: list[Placed]
    layers: set[tuple[str, int]]


@dataclass
class Parts:
    """The parameters of a model by what decides which chunk has them, each in order.

    Attributes:
        embedding: of the first chunk, and again of the one that has MTP
        following: those of each layer, of the final norm, of MTP and of the output layer
        layers: block and number of the layers in each of ``following``
    """

    embedding: list[Parameter] = field(default_factory=list)
    following: list[list[Parameter]] = field(default_factory=list)
    layers: list[set[tuple[str, int]]] = field(default_factory=list)


def split(parameters: Sequence[Parameter], everything: Sequence[Parameter], order: Order) -> Parts:
    """The parameters in the order of registration, by part.

    Args:
        parameters: those in the buffers
        everything: those of the model, which tell its layers
    """
    numbers = [p.layer for p in everything if p.block in _STACKS]
    count = 1 + max(numbers, default=-1)
    depths = {(p.block, p.layer) for p in everything if p.block == _MTP}
    parts = Parts(following=[[] for _ in range(count + 3)])
    parts.layers = [{(block, i) for block in _STACKS} for i in range(count)] + [
        set(),
        depths,
        set(),
    ]
    for parameter in sorted(parameters, key=order.key):
        if parameter.block in _STACKS:
            parts.following[parameter.layer].append(parameter)
        elif parameter.name.startswith(_EMBEDDING):
            parts.embedding.append(parameter)
        elif parameter.block == _MTP:
            parts.following[count + 1].append(parameter)
        elif parameter.name.startswith('output_layer.'):
            parts.following[count + 2].append(parameter)
        else:
            parts.following[count].append(parameter)
    return parts


def _variants(
    parts: Parts, is_first: bool, is_last: bool, mtp: bool
) -> Iterator[tuple[list, list]]:
    """What may stand before and after the parts of a chunk.

    One that is not the first has a copy of the whole embedding where it has MTP; the last one of
    the word embedding where that is the output layer's weight too.
    """
    copies: list[list[Parameter]] = [[]]
    if is_last and not is_first:
        copies.append([p for p in parts.embedding if p.name == _WORD_EMBEDDING])
    for before in [parts.embedding] if is_first else [[], parts.embedding][: 1 + mtp]:
        yield from ((before, after) for after in copies)


def fit_chunks(
    parts: Parts, stages: Sequence[Sequence[Buffer]], virtual: int
) -> list[list[Chunk]] | None:
    """The parameters of each stage's chunks; None where they don't fill the buffers.

    Args:
        parts: what there is
        stages: the buffers of each pipeline stage, of one tensor-parallel rank
        virtual: number of chunks of a stage
    """
    found: list[list[Chunk]] = [[] for _ in stages]
    left = [list(buffers) for buffers in stages]
    begin, count = 0, len(stages) * virtual
    for number in range(count):
        stage = number % len(stages)
        fitted = _fit_chunk(parts, begin, left[stage], number == 0, number == count - 1)
        if fitted is None:
            return None
        chunk, end, buffers = fitted
        begin = end
        found[stage].append(chunk)
        left[stage] = left[stage][buffers:]
    complete = begin == len(parts.following) and not any(left)
    return found if complete else None


def _fit_chunk(
    parts: Parts, begin: int, buffers: Sequence[Buffer], is_first: bool, is_last: bool
) -> tuple[Chunk, int, int] | None:
    """What the chunk holds, where the next one begins, and the number of buffers that it fills."""
    last = len(parts.following)
    for end in (last,) if is_last else range(begin, last + 1):
        own = [p for part in parts.following[begin:end] for p in part]
        mtp = any(p.block == _MTP for p in own)
        for before, after in _variants(parts, is_first, is_last, mtp):
            parameters = [*before, *own, *after]
            used = _dtypes(parameters)
            placed = fit_buffers(parameters, buffers[: len(used)])
            if placed is not None and (parameters or is_last or not buffers):
                return Chunk(placed, set().union(*parts.layers[begin:end])), end, len(used)
    return None


def _dtypes(parameters: Sequence[Parameter]) -> list[torch.dtype]:
    return list(dict.fromkeys(parameter.dtype for parameter in parameters))


def fit_buffers(parameters: Sequence[Parameter], buffers: Sequence[Buffer]) -> list[Placed] | None:
    """Where the parameters of one chunk lie in its buffers; None where they don't fill them."""
    dtypes = _dtypes(parameters)
    if [buffer.dtype for buffer in buffers] != dtypes:
        return None
    placed: list[Placed] = []
    for dtype, buffer in zip(dtypes, buffers, strict=True):
        own = [parameter for parameter in reversed(parameters) if parameter.dtype == dtype]
        total = sum(parameter.numel for parameter in own)
        if not total <= buffer.numel < total + ALIGNMENT * (len(own) + 1):
            return None
        places = lay_out([parameter.numel for parameter in own], buffer.buckets)
        if places is None:
            return None
        placed += [Placed(*pair) for pair in zip(own, places, strict=True)]
    return placed
