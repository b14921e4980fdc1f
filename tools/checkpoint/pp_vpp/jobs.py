"""Which rank files a plan makes, and of what."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from .discover import RankId
from .layout import ChunkId, Move, Plan
from .rank_args import Layout
from .survey import SideSurvey, require_shards


@dataclass(frozen=True)
class Job:
    """One rank file to write.

    Attributes:
        side: output side
        rank: the file's ranks
        moves: what its chunks are made of
        layout: sizes of the output
        files: source file of each (side, pipeline rank) that it needs
    """

    side: str
    rank: RankId
    moves: Sequence[Move]
    layout: Layout
    files: dict[tuple[str, int], Path]


def make_jobs(surveys: dict[str, SideSurvey], plan: Plan) -> list[Job]:
    """The rank files that a plan makes, each with the sizes of its output.

    Raises:
        CheckpointError: stages of one side have different tensor or expert ranks, or lack some
    """
    used: dict[str, set[int]] = {}
    for chunk in plan.sources:
        used.setdefault(chunk.side, set()).add(chunk.rank)
    largest = max(side.tensor_size for side in surveys.values())
    shards = {side: require_shards(surveys[side], ranks, largest) for side, ranks in used.items()}
    sizes = {side: len({tp for tp, _ in found}) for side, found in shards.items()}
    ranks = plan.ranks()
    ends = [plan.sources[0], plan.sources[-1]]
    resplit = plan.layers() != [
        surveys[chunk.side].stages[chunk.rank].layers[chunk.chunk] for chunk in plan.sources
    ]
    predicts = _predicting(surveys)
    jobs = []
    for (side, rank), moves in ranks.items():
        output = plan.outputs[side]
        sources = [piece.source for move in moves for piece in move.pieces]
        if not all(move.whole for move in moves):
            sources += [end for end, needed in zip(ends, _ends(moves), strict=True) if needed]
        home = sources[0].side if sources else ends[0].side
        own = [move for move in plan.moves if move.target.side == side and not move.empty]
        present = {r: sizes[_home(m, home)] for (s, r), m in ranks.items() if s == side}
        layout = Layout(
            tensor_size=sizes[home],
            pipeline_size=output.pipeline_size,
            virtual_size=output.virtual_size,
            model_parallel_ranks=sum(
                present.get(r, sizes[home]) for r in range(output.pipeline_size)
            ),
            layers=[move.layers for move in own],
            complete=len(plan.outputs) == 1,
            resplit=resplit,
            ranks_before=sum(present.get(r, sizes[home]) for r in range(rank)),
            prediction=next((i for i, move in enumerate(own) if _takes(move, predicts)), None),
        )
        for tp, ep in shards[home]:
            jobs.append(
                Job(
                    side,
                    RankId(tp, rank if output.has_pipeline else None, ep),
                    moves,
                    layout,
                    {
                        (chunk.side, chunk.rank): surveys[home].source.files[chunk.rank, tp, ep]
                        for chunk in sources
                    },
                )
            )
    return jobs


def _predicting(surveys: dict[str, SideSurvey]) -> set[ChunkId]:
    return {
        ChunkId(side, rank, number)
        for side, survey in surveys.items()
        for rank, stage in survey.stages.items()
        for number in stage.predicts
    }


def prediction_note(surveys: dict[str, SideSurvey], plan: Plan) -> str | None:
    """What to say where Megatron doesn't run multi-token prediction."""
    predicts = _predicting(surveys)
    for target in (move.target for move in plan.moves if _takes(move, predicts)):
        chunks = plan.outputs[target.side].virtual_size
        if not target.side and chunks and (target.rank == 0 or target.chunk != chunks - 1):
            return (
                f'multi-token prediction is in {target.key} of rank {target.rank}; Megatron '
                'runs it only in the last chunk of another rank than the first'
            )
    return None


def _takes(move: Move, chunks: Collection[ChunkId]) -> bool:
    """Whether a new chunk is one of the given old ones as it is."""
    return move.whole and any(piece.source in chunks for piece in move.pieces)


def _home(moves: Sequence[Move], default: str) -> str:
    return next((piece.source.side for move in moves for piece in move.pieces), default)


def _ends(moves: Sequence[Move]) -> tuple[bool, bool]:
    """Whether a rank needs the old first and the old last chunk.

    The last new chunk may need a copy of the embedding; a chunk without layers gets what a stage
    has for itself from the first.
    """
    last = any(move.is_last for move in moves)
    return last or any(move.is_first or not move.pieces for move in moves), last
