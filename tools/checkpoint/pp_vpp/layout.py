"""Which old (side, PP rank, chunk) becomes which new one: the plan of a conversion, as data."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import chunk_key

from ..common.errors import CheckpointError


@dataclass(frozen=True, order=True)
class ChunkId:
    """One model chunk of a checkpoint.

    Attributes:
        side: 'edge', 'cloud', or '' where both are one directory
        rank: pipeline rank
        chunk: virtual pipeline chunk; None where the file has the plain key ``model``
    """

    side: str
    rank: int
    chunk: int | None = None

    @property
    def key(self) -> str:
        """The chunk's key in its file: ``model``, or ``model<chunk>``."""
        return chunk_key(self.chunk)


@dataclass(frozen=True)
class LayerRange:
    """A run of layers of an old chunk.

    Attributes:
        source: the old chunk
        first: first layer, numbered from 0 in the old chunk
        last: one past the last layer
    """

    source: ChunkId
    first: int
    last: int


@dataclass(frozen=True)
class Move:
    """What a new chunk is made of.

    Attributes:
        target: the new chunk
        pieces: runs of layers, in pipeline order; none for an empty chunk
        first_layer: global number of the first layer
        whole: the chunk is one old chunk, taken over with every key
        is_first: the embedding belongs here
        is_last: the final norm and the head belong here
    """

    target: ChunkId
    pieces: tuple[LayerRange, ...]
    first_layer: int
    whole: bool
    is_first: bool = False
    is_last: bool = False

    @property
    def layers(self) -> int:
        return sum(piece.last - piece.first for piece in self.pieces)

    @property
    def empty(self) -> bool:
        """Whether the new chunk holds nothing at all."""
        return self.whole and not self.pieces


@dataclass(frozen=True)
class OutputSide:
    """One output directory.

    Attributes:
        name: 'edge', 'cloud' or ''
        pipeline_size: ``pipeline_model_parallel_size`` of the output
        virtual_size: ``virtual_pipeline_model_parallel_size``; None without chunks
    """

    name: str
    pipeline_size: int
    virtual_size: int | None

    @property
    def has_pipeline(self) -> bool:
        """Whether who reads it has a pipeline: edge and cloud are stages of one run."""
        return bool(self.name) or self.pipeline_size > 1


@dataclass(frozen=True)
class Plan:
    """A conversion.

    Attributes:
        sources: every old chunk, in pipeline order
        moves: every new chunk, in pipeline order; empty chunks last
        outputs: the output sides by name
    """

    sources: tuple[ChunkId, ...]
    moves: tuple[Move, ...]
    outputs: dict[str, OutputSide]

    def ranks(self) -> dict[tuple[str, int], list[Move]]:
        """Moves of each new (side, pipeline rank), in the order of their chunks."""
        ranks: dict[tuple[str, int], list[Move]] = {}
        for move in self.moves:
            ranks.setdefault((move.target.side, move.target.rank), []).append(move)
        for moves in ranks.values():
            moves.sort(key=lambda move: move.target.chunk or 0)
        return ranks

    def layers(self) -> list[int]:
        """Layers of each new chunk in pipeline order, without the empty ones."""
        return [move.layers for move in self.moves if not move.empty]


def first_missing(found: Collection[int], size: int | None = None) -> int | None:
    """The first number that is missing from 0, 1, … ``size`` - 1; None where none is.

    Args:
        size: by default one past the largest of them; it may be any number, being read from a file
    """
    if size is None:
        size = max(found, default=-1) + 1
    first = next(number for number in range(len(found) + 1) if number not in found)
    return first if first < size else None


def interleaved(pipeline_size: int, chunks: int) -> list[ChunkId]:
    """Every chunk of a layout in pipeline order: chunk 0 of all ranks, then chunk 1, and so on.

    Args:
        chunks: chunks of each rank; 1 stands for the plain key ``model``
    """
    return [
        ChunkId('', rank, None if chunks == 1 else chunk)
        for chunk in range(chunks)
        for rank in range(pipeline_size)
    ]


def one_to_one(
    sources: Sequence[ChunkId],
    targets: Sequence[ChunkId],
    layers: Sequence[int],
    outputs: Sequence[OutputSide],
    empty: Sequence[ChunkId] = (),
) -> Plan:
    """Each old chunk, in pipeline order, becomes one new chunk, unchanged.

    Args:
        empty: new chunks that hold nothing
    """
    pieces = [
        (LayerRange(source, 0, count),) for source, count in zip(sources, layers, strict=True)
    ]
    moves = _moves(targets, pieces, whole=True)
    moves += [Move(target, (), sum(layers), whole=True) for target in empty]
    return Plan(tuple(sources), tuple(moves), {side.name: side for side in outputs})


def resplit(
    sources: Sequence[ChunkId],
    layers: Sequence[int],
    pipeline_size: int,
    virtual_size: int,
    new_layers: Sequence[int] | None = None,
) -> Plan:
    """Every layer goes to the chunk that holds its global number in the new layout.

    Args:
        sources: old chunks in pipeline order
        layers: number of layers of each
        new_layers: layers of each new chunk in pipeline order; default: the same number each

    Raises:
        CheckpointError: the layers can't be divided so
    """
    count, total = pipeline_size * virtual_size, sum(layers)
    if new_layers is None:
        if total % count or not total:
            raise CheckpointError(
                f"{total} layers can't be divided over {pipeline_size} pipeline ranks with "
                f'{virtual_size} chunks each ({count} chunks); give --layers-per-chunk'
            )
        new_layers = [total // count] * count
    if len(new_layers) != count:
        raise CheckpointError(
            f'--layers-per-chunk: {len(new_layers)} numbers, expected {count} '
            f'(--pipeline-size {pipeline_size} times --virtual-size {virtual_size})'
        )
    if sum(new_layers) != total:
        raise CheckpointError(
            f'--layers-per-chunk: adds up to {sum(new_layers)}, but the checkpoint has '
            f'{total} layers'
        )
    homes = [
        (source, layer)
        for source, count in zip(sources, layers, strict=True)
        for layer in range(count)
    ]
    edges = [0, *accumulate(new_layers)]
    pieces = [_runs(homes[first:last]) for first, last in pairwise(edges)]
    moves = _moves(interleaved(pipeline_size, virtual_size), pieces, whole=False)
    side = OutputSide('', pipeline_size, virtual_size if virtual_size > 1 else None)
    return Plan(tuple(sources), tuple(moves), {'': side})


def _moves(
    targets: Sequence[ChunkId], pieces: Sequence[tuple[LayerRange, ...]], whole: bool
) -> list[Move]:
    moves: list[Move] = []
    first_layer, last = 0, len(targets) - 1
    for index, (target, own) in enumerate(zip(targets, pieces, strict=True)):
        moves.append(Move(target, own, first_layer, whole, index == 0, index == last))
        first_layer += moves[-1].layers
    return moves


def _runs(homes: Sequence[tuple[ChunkId, int]]) -> tuple[LayerRange, ...]:
    pieces: list[LayerRange] = []
    for source, layer in homes:
        if pieces and pieces[-1].source == source:
            pieces[-1] = LayerRange(source, pieces[-1].first, layer + 1)
        else:
            pieces.append(LayerRange(source, layer, layer + 1))
    return tuple(pieces)
