"""Which rank files a plan makes, and of what."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .layout import ChunkId, Move, Plan
from .rank_args import ParallelSizes
from .sources import RankId, ShardPaths, ShardRank, Shards, Side


@dataclass(frozen=True)
class Job:
    """One rank file to write.

    Attributes:
        side: output side
        rank: the file's ranks
        moves: what its chunks are made of
        sizes: of the output
        source: side and shard that its sources are of
        paths: source file of each (side, pipeline rank) that it needs
    """

    side: str
    rank: RankId
    moves: Sequence[Move]
    sizes: ParallelSizes
    source: tuple[str, ShardRank]
    paths: ShardPaths


def make_jobs(sides: Mapping[str, Side], plan: Plan, shards: Shards) -> list[Job]:
    """The rank files that a plan makes, each with the sizes of its output."""
    tensor = {name: len({tp for other, (tp, _) in shards if other == name}) for name in sides}
    ranks = plan.ranks()
    source_of = {target: _source_side(moves, plan) for target, moves in ranks.items()}
    resplit = plan.layers() != [sides[chunk.side].layers(chunk) for chunk in plan.sources]
    predicts = _predicting(sides)
    jobs = []
    for (side, rank), moves in ranks.items():
        output, source = plan.outputs[side], source_of[side, rank]
        stages = range(output.pipeline_size)
        tensor_ranks = [tensor[source_of.get((side, stage), source)] for stage in stages]
        own = [move for move in plan.moves if move.target.side == side and not move.empty]
        sizes = ParallelSizes(
            tensor=tensor[source],
            pipeline=output.pipeline_size,
            virtual=output.virtual_size,
            tensor_ranks=sum(tensor_ranks),
            tensor_ranks_before=sum(tensor_ranks[:rank]),
            layers=[move.layers for move in own],
            complete=len(plan.outputs) == 1,
            resplit=resplit,
            prediction=next((i for i, move in enumerate(own) if _takes(move, predicts)), None),
        )
        needed = _needed(moves, plan)
        for (name, (tp, ep)), paths in shards.items():
            if name == source:
                target = RankId(tp, rank if output.has_pipeline else None, ep)
                of_job = {home: paths[home] for home in needed}
                jobs.append(Job(side, target, moves, sizes, (name, (tp, ep)), of_job))
    return jobs


def prediction_note(sides: Mapping[str, Side], plan: Plan) -> str | None:
    """What to say where Megatron doesn't run multi-token prediction."""
    predicts = _predicting(sides)
    for target in (move.target for move in plan.moves if _takes(move, predicts)):
        chunks = plan.outputs[target.side].virtual_size
        if not target.side and chunks and (target.rank == 0 or target.chunk != chunks - 1):
            return (
                f'multi-token prediction is in {target.key} of rank {target.rank}; Megatron '
                'runs it only in the last chunk of another rank than the first'
            )
    return None


def _predicting(sides: Mapping[str, Side]) -> set[ChunkId]:
    return {
        ChunkId(name, rank, number)
        for name, side in sides.items()
        for rank, stage in side.stages.items()
        for number in stage.predicts
    }


def _takes(move: Move, chunks: Collection[ChunkId]) -> bool:
    """Whether a new chunk is one of the given old ones as it is."""
    return move.whole and any(piece.source in chunks for piece in move.pieces)


def _source_side(moves: Sequence[Move], plan: Plan) -> str:
    chunks = (piece.source for move in moves for piece in move.pieces)
    return next(chunks, plan.sources[0]).side


def _needed(moves: Sequence[Move], plan: Plan) -> dict[tuple[str, int], None]:
    """The (side, pipeline rank) of each source of a new rank, in order.

    The last new chunk may need a copy of the embedding; a chunk without layers gets what a stage
    has for itself from the first.
    """
    chunks = [piece.source for move in moves for piece in move.pieces]
    new = [move for move in moves if not move.whole]
    last = any(move.is_last for move in new)
    if last or any(move.is_first or not move.pieces for move in new):
        chunks.append(plan.sources[0])
    if last:
        chunks.append(plan.sources[-1])
    return dict.fromkeys((chunk.side, chunk.rank) for chunk in chunks)
