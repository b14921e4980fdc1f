"""What stands before the first layer and after the last one when layers are dealt out anew.

With several stages Megatron keeps copies: a tied head is a second copy of the word embeddings on
the last stage, and multi-token prediction has an embedding of its own there. With one stage there
is one of each.
"""

import re
from typing import TYPE_CHECKING

from ..common.errors import CheckpointError
from .layout import Move
from .model_state import (
    EMBEDDING,
    HEAD,
    belongs_to_front,
    is_prediction,
    layer_of,
    same_tensor,
)
from .optimizer_state import equal

if TYPE_CHECKING:
    from .rank_file import OldRank

Origin = tuple[str, 'OldRank', int | None, str]
End = tuple[int | None, 'OldRank']

_FINAL_NORM = re.compile(r'(decoder|encoder)\.final_(layer)?norm\.')
_HEAD_PREFIXES = ('output_layer.', 'lm_head.')


def front(move: Move, first: End, last: End) -> list[Origin]:
    """The embedding's keys of a new chunk, each with its rank, chunk and key in the source.

    Args:
        move: the new chunk
        first: chunk number and rank with the embedding
        last: chunk number and rank with the head

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
    if move.is_last:
        if one_before and any(map(is_prediction, first[1].chunks[first[0]])):
            raise CheckpointError(
                f'{first[1].path}: multi-token prediction (mtp.*) on a single stage; splitting it '
                "off from its embedding isn't supported, keep first and last layer together"
            )
        if not one_before:
            return _keys(last, front=True)
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
    at = next((i for i, origin in enumerate(keys) if origin[0].startswith('output_layer.')), None)
    copied: Origin = (HEAD, first[1], first[0], EMBEDDING)
    return [*keys, copied] if at is None else [*keys[:at], copied, *keys[at:]]


def refuse_stray_keys(number: int | None, rank: 'OldRank', is_first: bool, is_last: bool) -> None:
    """Refuse keys that belong to no layer where neither embedding nor head stands.

    Raises:
        CheckpointError: names the first one
    """
    for key in rank.chunks[number]:
        allowed = is_first or is_last if belongs_to_front(key) else is_last
        if layer_of(key) is None and not allowed:
            raise CheckpointError(
                f'{rank.path}, model{"" if number is None else number}: key {key} belongs to no '
                'layer, expected such keys on the first and last stage only; merge and split '
                'carry stages whole'
            )


def refuse_misplaced(
    number: int | None, rank: 'OldRank', *, is_first: bool, is_last: bool, layers_follow: bool
) -> None:
    """Refuse a chunk that doesn't hold what its place in the pipeline calls for.

    Multi-token prediction brings an embedding and a head of its own to wherever it stands, and
    then the final norm stands beside the last layer.

    Args:
        number: the chunk's
        rank: its rank
        is_first: it is the model's first chunk
        is_last: it is the model's last chunk
        layers_follow: later chunks have layers

    Raises:
        CheckpointError: names the key that is missing or out of place
    """
    chunk = rank.chunks[number]
    where = f'{rank.path}, key `model{"" if number is None else number}`'
    way_out = 'the stages are not in model order: check the ranks named, and their directories'
    outside = [key for key in chunk if layer_of(key) is None]
    if is_first and not any(map(belongs_to_front, outside)):
        raise CheckpointError(
            f'{where}: no embedding.*, expected the embedding in the first stage; {way_out}'
        )
    if is_last and all(map(belongs_to_front, outside)):
        raise CheckpointError(
            f'{where}: neither final norm nor head, expected them in the last stage; {way_out}'
        )
    predicts = any(map(is_prediction, outside))
    for key in outside:
        if belongs_to_front(key):
            fits, home = is_first or is_last or predicts, 'the first and the last stage'
        elif key.startswith(_HEAD_PREFIXES):
            fits, home = is_last or predicts, 'the last stage'
        elif _FINAL_NORM.match(key):
            fits, home = not layers_follow, 'the stage of the last layer'
        else:
            continue
        if not fits:
            raise CheckpointError(f'{where}: holds {key}, expected in {home} only; {way_out}')


def _same(first: End, last: End) -> bool:
    return first[0] == last[0] and first[1] is last[1]


def _keys(end: End, front: bool) -> list[Origin]:
    number, rank = end
    return [
        (key, rank, number, key)
        for key in rank.chunks[number]
        if layer_of(key) is None and belongs_to_front(key) == front
    ]


def _tied(last: End) -> bool:
    number, rank = last
    args = rank.stage_state(number).get('args')
    untied = getattr(args, 'untie_embeddings_and_output_weights', None)
    if untied is None:
        raise CheckpointError(
            f"{rank.path}: args don't say whether the head is tied to the embedding "
            '(untie_embeddings_and_output_weights), which a change between one stage and several '
            'needs'
        )
    return not untied


def _check_copy(original: End, key: str, copy: End, copy_key: str) -> None:
    (number, rank), (copy_number, copy_rank) = original, copy
    one, two = rank.chunks[number].get(key), copy_rank.chunks[copy_number].get(copy_key)
    slots = rank.slots.get((number, key)), copy_rank.slots.get((copy_number, copy_key))
    same_slots = (slots[0] is None) == (slots[1] is None) and (
        slots[0] is None
        or slots[1] is None
        or (equal(slots[0].state, slots[1].state) and equal(slots[0].master, slots[1].master))
    )
    if not same_tensor(one, two) or not same_slots:
        raise CheckpointError(
            f'{copy_rank.path}: {copy_key} is no copy of {key} in {rank.path}; both would have to '
            'become one tensor'
        )
