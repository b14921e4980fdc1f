"""Routing model state: the keys of old chunks to those of new ones."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from ..common.errors import CheckpointError
from .layout import first_missing

# As Megatron writes numbers: two ways to write one could make two keys the same.
_LAYER = re.compile(
    r'(decoder\.layers\.|encoder\.layers\.)(0|[1-9]\d{0,99})(\..+)', re.DOTALL | re.ASCII
)
EMBEDDING = 'embedding.word_embeddings.weight'
HEAD = 'output_layer.weight'


def count_layers(state: Mapping[str, Any], where: str) -> int:
    """Number of layers in a chunk.

    Args:
        state: the chunk's model state
        where: what an error message calls it

    Raises:
        CheckpointError: nested (pre-core) state; layers missing in between; two kinds of layers
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f'{where}: holds {type(state).__name__}, expected a state dict')
    numbers: dict[str, set[int]] = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise CheckpointError(f'{where}: key {key!r}, expected names of parameters')
        if isinstance(value, Mapping):
            raise CheckpointError(
                f'{where}, key {key}: nested model state from before megatron-core, expected '
                'flat keys such as decoder.layers.0.…; re-save it with megatron-core first'
            )
        match = _LAYER.fullmatch(key)
        if match:
            numbers.setdefault(match.group(1), set()).add(int(match.group(2)))
    if len(numbers) > 1:
        raise CheckpointError(
            f'{where}: both encoder and decoder layers; only decoder-only and encoder-only '
            'models can be converted'
        )
    for prefix, found in numbers.items():
        missing = first_missing(found)
        if missing is not None:
            raise CheckpointError(
                f'{where}: {prefix}{missing} is missing (found {len(found)} layers up to '
                f'{max(found)}); the checkpoint is damaged'
            )
    return sum(len(found) for found in numbers.values())


def layer_of(key: str) -> int | None:
    """Number of the layer in its chunk that a key belongs to; None for embedding, norm, head."""
    match = _LAYER.fullmatch(key)
    return int(match.group(2)) if match else None


def renumber(key: str, layer: int) -> str:
    """The key with another layer number."""
    return _LAYER.sub(lambda match: f'{match.group(1)}{layer}{match.group(3)}', key)


def belongs_to_front(key: str) -> bool:
    """Whether a key outside the layers belongs to the first stage."""
    return key.startswith('embedding.')


def is_prediction(key: str) -> bool:
    """Whether a key belongs to multi-token prediction."""
    return key.startswith('mtp.')


def same_tensor(one: Any, other: Any) -> bool:
    """Bit-identical tensors: type, shape and every bit, NaNs and signed zeros included."""
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(_bits(one), _bits(other))
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
