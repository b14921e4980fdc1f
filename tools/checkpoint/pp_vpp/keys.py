"""A rank file's keys: chunks, layers, and what stands outside the layers."""

from collections.abc import Mapping
from typing import Any

from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import (
    DECODER,
    ENCODER,
    MTP_PREFIX,
    chunk_key,
    chunk_number,
    parse_key,
)

from ..common.errors import CheckpointError
from .layout import first_missing

EMBEDDING = 'embedding.word_embeddings.weight'
HEAD = 'output_layer.weight'

_FINAL_NORMS = tuple(
    f'{stack}.final_{norm}.' for stack in ('decoder', 'encoder') for norm in ('norm', 'layernorm')
)


def layer_of(key: str) -> int | None:
    """Number of the layer in its chunk that a key belongs to; None for embedding, norm, head."""
    own = parse_key(key)
    is_one = own.block in (DECODER, ENCODER) and own.part and not own.prefix
    return own.layer if is_one else None


def renumber(key: str, layer: int) -> str:
    """The key with another layer number; one outside the layers as it is."""
    own = parse_key(key)
    return key if layer_of(key) is None else f'{own.block}.{layer}.{own.part}'


def is_embedding(key: str) -> bool:
    """Whether a key outside the layers belongs to the first stage."""
    return key.startswith('embedding.')


def is_prediction(key: str) -> bool:
    """Whether a key belongs to multi-token prediction."""
    return key.startswith(MTP_PREFIX)


def is_head(key: str) -> bool:
    return key.startswith(('output_layer.', 'lm_head.'))


def is_final_norm(key: str) -> bool:
    return key.startswith(_FINAL_NORMS)


def chunk_numbers(state: Mapping[Any, Any], where: object) -> list[int | None]:
    """Numbers of a file's chunks: ``[None]`` for ``model``, else 0, 1, ….

    Raises:
        CheckpointError: no model, both forms, or a chunk missing in between
    """
    found = [chunk_number(key) for key in state if isinstance(key, str)]
    numbers = sorted(number for number in found if number is not None)
    plain = 'model' in state
    if plain and numbers:
        raise CheckpointError(
            f'{where}: both `model` and `model{numbers[0]}`, expected one form; the file is damaged'
        )
    if not plain and not numbers:
        raise CheckpointError(
            f'{where}: key `model` is missing (found {", ".join(map(str, state)) or "nothing"}); '
            'not a rank file of a model'
        )
    missing = first_missing(numbers)
    if missing is not None:
        raise CheckpointError(
            f'{where}: key `{chunk_key(missing)}` is missing (found up to '
            f'`{chunk_key(numbers[-1])}`); the file is damaged'
        )
    if len(set(numbers)) < len(numbers):
        raise CheckpointError(f'{where}: two keys for one chunk (such as `model1` and `model01`)')
    return [None] if plain else list(numbers)


def count_layers(state: Any, where: str) -> int:
    """Number of layers in a chunk's model state.

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
        layer = layer_of(key)
        if layer is not None:
            numbers.setdefault(str(parse_key(key).block), set()).add(layer)
    if len(numbers) > 1:
        raise CheckpointError(
            f'{where}: both encoder and decoder layers; only decoder-only and encoder-only '
            'models can be converted'
        )
    for block, found in numbers.items():
        missing = first_missing(found)
        if missing is not None:
            raise CheckpointError(
                f'{where}: {block}.{missing} is missing (found {len(found)} layers up to '
                f'{max(found)}); the checkpoint is damaged'
            )
    return sum(map(len, numbers.values()))
