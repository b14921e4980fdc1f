"""What stands before the first layer and after the last one when layers are dealt out anew.

With several stages Megatron keeps copies: a tied head is a second copy of the word embeddings on
the last stage, and multi-token prediction has an embedding of its own there. With one stage there
is one of each.
"""

from typing import TYPE_CHECKING

from ..common.errors import CheckpointError
from .keys import EMBEDDING, HEAD, is_embedding, is_head, is_prediction, layer_of
from .layout import Move
from .optimizer_state import equal

if TYPE_CHECKING:
    from .rank_file import RankFile

# A new key, and rank file, chunk number and key that it comes from.
Origin = tuple[str, 'RankFile', int | None, str]
End = tuple[int | None, 'RankFile']


def front(move: Move, first: End, last: End) -> list[Origin]:
    """The embedding's keys of a new chunk.

    Args:
        first: chunk number and rank file with the embedding
        last: chunk number and rank file with the head

    Raises:
        CheckpointError: copies that differ
    """
    one_before = _same(first, last)
    if move.is_first:
        keys = _keys(first, front=True)
        if move.is_last and not one_before:
            for key, *_ in _keys(last, front=True):
                _check_copy(first, key, last, key)
        return keys
    if not move.is_last:
        return []
    if not one_before:
        return _keys(last, front=True)
    if any(map(is_prediction, first[1].chunks[first[0]])):
        raise CheckpointError(
            f'{first[1].path}: multi-token prediction (mtp.*) on a single stage; splitting it '
            "off from its embedding isn't supported, keep first and last layer together"
        )
    return []


def back(move: Move, first: End, last: End) -> list[Origin]:
    """Keys of the final norm, the head and multi-token prediction of a new chunk.

    Raises:
        CheckpointError: ``args`` don't say whether the head is tied where that matters; a tied
            head that differs from the embedding
    """
    if not move.is_last:
        return []
    keys = _keys(last, front=False)
    one_before, one_after = _same(first, last), move.is_first
    if one_before == one_after or not _tied(last):
        return keys
    if one_after:
        _check_copy(first, EMBEDDING, last, HEAD)
        return [origin for origin in keys if origin[0] != HEAD]
    at = next((i for i, (key, *_) in enumerate(keys) if is_head(key)), len(keys))
    return [*keys[:at], (HEAD, first[1], first[0], EMBEDDING), *keys[at:]]


def _same(first: End, last: End) -> bool:
    return first[0] == last[0] and first[1] is last[1]


def _keys(end: End, front: bool) -> list[Origin]:
    number, file = end
    return [
        (key, file, number, key)
        for key in file.chunks[number]
        if layer_of(key) is None and is_embedding(key) == front
    ]


def _tied(last: End) -> bool:
    number, file = last
    args = file.stage_state(number).get('args')
    untied = getattr(args, 'untie_embeddings_and_output_weights', None)
    if untied is None:
        raise CheckpointError(
            f"{file.path}: args don't say whether the head is tied to the embedding "
            '(untie_embeddings_and_output_weights), which a change between one stage and several '
            'needs'
        )
    return not untied


def _check_copy(original: End, key: str, copy: End, copy_key: str) -> None:
    """Tensor, moments and master are the same bit for bit."""
    (one, slot), (two, other_slot) = _held(original, key), _held(copy, copy_key)
    if one is None or not equal(one, two) or not equal(slot, other_slot):
        raise CheckpointError(
            f'{copy[1].path}: {copy_key} is no copy of {key} in {original[1].path}; both would '
            'have to become one tensor'
        )


def _held(end: End, key: str) -> tuple[object, object]:
    number, file = end
    slot = file.slots.get((number, key))
    return file.chunks[number].get(key), slot and [slot.state, slot.master]
