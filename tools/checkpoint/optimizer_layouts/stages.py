"""Which parameters each rank's buffers hold: the layers of the model's chunks, found by size.

Chunks of a model (pipeline stages, and with virtual stages several of each) have consecutive
layers; the first one has the embedding as well, the last one the final norm, the output layer and
MTP. A chunk has one buffer for each dtype. The layers of a chunk are as many as fill its buffers:
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


@dataclass
class Placed:
    """A parameter and where it lies at one position."""

    parameter: Parameter
    place: Place


@dataclass
class Chunks:
    """The parameters of a model by what decides which chunk has them, each in order."""

    first: list[Parameter] = field(default_factory=list)
    layers: list[list[Parameter]] = field(default_factory=list)
    last: list[Parameter] = field(default_factory=list)


def split(parameters: Sequence[Parameter], order: Order) -> Chunks:
    """The parameters in the order of registration, by chunk."""
    chunks = Chunks()
    by_layer: dict[int, list[Parameter]] = {}
    for parameter in sorted(parameters, key=order.key):
        if parameter.block in ('decoder.layers', 'encoder.layers'):
            by_layer.setdefault(parameter.layer, []).append(parameter)
        elif parameter.name.startswith(_EMBEDDING):
            chunks.first.append(parameter)
        else:
            chunks.last.append(parameter)
    chunks.layers = [by_layer.get(i, []) for i in range(max(by_layer, default=-1) + 1)]
    return chunks


def _variants(chunks: Chunks, is_first: bool, is_last: bool) -> Iterator[tuple[list, list]]:
    """What may stand before and after the layers of a chunk.

    The last of several chunks has a copy of the word embedding where that is the output layer's
    weight too, and one of the whole embedding where it has MTP.
    """
    before = chunks.first if is_first else []
    after = chunks.last if is_last else []
    yield before, after
    if is_last and not is_first:
        shared = [p for p in chunks.first if p.name == _WORD_EMBEDDING]
        yield before, after + shared
        yield chunks.first, after
        yield chunks.first, after + shared


def fit_chunks(
    chunks: Chunks, stages: Sequence[Sequence[Buffer]], virtual: int
) -> list[list[list[Placed]]] | None:
    """The parameters of each stage's chunks; None where they don't fill the buffers.

    Args:
        chunks: what there is
        stages: the buffers of each pipeline stage, of one tensor-parallel rank
        virtual: number of chunks of a stage
    """
    found: list[list[list[Placed]]] = [[] for _ in stages]
    left = [list(buffers) for buffers in stages]
    layer, count = 0, len(stages) * virtual
    for number in range(count):
        stage = number % len(stages)
        fitted = _fit_chunk(chunks, layer, left[stage], number == 0, number == count - 1)
        if fitted is None:
            return None
        placed, layers, buffers = fitted
        layer += layers
        found[stage].append(placed)
        left[stage] = left[stage][buffers:]
    complete = layer == len(chunks.layers) and not any(left)
    return found if complete else None


def _fit_chunk(
    chunks: Chunks, layer: int, buffers: Sequence[Buffer], is_first: bool, is_last: bool
) -> tuple[list[Placed], int, int] | None:
    """What the chunk holds, the number of its layers, and of the buffers that it fills."""
    remaining = len(chunks.layers) - layer
    for count in (remaining,) if is_last else range(remaining + 1):
        layers = [p for own in chunks.layers[layer : layer + count] for p in own]
        for before, after in _variants(chunks, is_first, is_last):
            parameters = [*before, *layers, *after]
            used = _dtypes(parameters)
            placed = fit_buffers(parameters, buffers[: len(used)])
            if placed is not None and (parameters or is_last or not buffers):
                return placed, count, len(used)
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
