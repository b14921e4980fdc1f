"""Running a conversion: survey, plan, check everything, write, publish."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import CheckpointError, one_line
from ..common.paths import (
    RELEASE,
    parse_iteration_dirname,
    real_path,
    refuse_tracker_directory,
    refuse_unreachable,
)
from ..common.progress import progress_bar
from ..common.publish import (
    UNPUBLISHED,
    Publication,
    recover,
    refuse_existing,
    refuse_irreplaceable,
)
from . import rank_file, torch_file
from .commands import Request
from .discover import FILE_NAME, refuse_other_files, split_path
from .edges import refuse_misplaced, refuse_stray_keys
from .jobs import Job, make_jobs, prediction_note
from .layout import ChunkId, Move, Plan
from .rank_file import OldRank
from .same_model import SameModel
from .survey import SideSurvey, check_iteration, survey


@dataclass(frozen=True)
class Options:
    """What holds for every conversion.

    Attributes:
        iteration: iteration to convert; the tracker's of the (edge) source where None
        drop_optimizer: leave the optimizer state behind
        trust: load without restriction on classes
        workers: rank files written at the same time; None for one a CPU
        dry_run: nothing is to be written, nor what a killed run left taken away
        overwrite: replace outputs that exist
    """

    iteration: int | None = None
    drop_optimizer: bool = False
    trust: bool = False
    workers: int | None = None
    dry_run: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Prepared:
    """A checked conversion.

    Attributes:
        surveys: the sources
        plan: which chunk goes where
        jobs: the rank files to write
        targets: directory of each output side
        trackers: root of each output to the text of its tracker
        bytes: total size of the tensors to write
        notes: what the user should know
        replaced: directories of outputs that exist and are to be replaced
    """

    surveys: dict[str, SideSurvey]
    plan: Plan
    jobs: list[Job]
    targets: dict[str, Path]
    trackers: dict[Path, str]
    bytes: int
    notes: list[str]
    replaced: list[Path]


def prepare(request: Request, options: Options) -> Prepared:
    """Plan a conversion and check all of it; nothing is written.

    Args:
        request: what to convert
        options: how

    Raises:
        CheckpointError: anything is wrong with the sources or the outputs
    """
    _refuse_same_roots(request)
    surveys = _survey(request, options)
    plan = request.plan(surveys)
    directory = next(iter(surveys.values())).source.directory
    targets = {side: root / directory.name for side, root in request.outputs.items()}
    iteration = parse_iteration_dirname(directory.name)
    text = RELEASE if iteration is None else str(iteration)
    trackers = {root: text for root in request.outputs.values()}
    finished = not options.dry_run and recover(list(targets.values()), trackers)
    replaced = []
    for target in targets.values():
        if options.dry_run and (target / UNPUBLISHED).exists():
            continue  # a killed run's
        if not options.overwrite:
            way_out = 'is replaced with --overwrite only; pass it, or name another'
            refuse_existing(target, finished, way_out)
        elif os.path.lexists(target):
            refuse_irreplaceable(target)
            replaced.append(target)
    jobs = make_jobs(surveys, plan)
    _refuse_to_replace_sources(jobs, replaced)
    refuse_other_files(
        sorted({path for job in jobs for path in job.files.values()}), options.drop_optimizer
    )
    size, without_args = 0, 0
    added: dict[str, set[Path]] = {}
    same_model = SameModel()
    for job in jobs:
        ranks, _ = read_ranks(job, options)
        for (side, stage), rank in ranks.items():
            place = stage, job.rank.tp, job.rank.ep or 0
            same_model.check(rank, place, side, job.layout.tensor_size)
            for key in rank.added:
                added.setdefault(key, set()).add(rank.path)
        state = build(job, plan, options, ranks)
        size += _size(state)
        without_args += state.get('args') is None
    same_model.finish()
    notes = []
    if (note := prediction_note(surveys, plan)) is not None:
        notes.append(note)
    if without_args:
        notes.append(f'{without_args} of {len(jobs)} files have no `args`, and get none')
    for key, lacking in added.items():
        of = f'{len(lacking)} files have no `{key}`'
        notes.append(f'{of}; the outputs get what Megatron expects there')
    if options.drop_optimizer:
        notes.append('the outputs have no optimizer state; load them with --no-load-optim')
    return Prepared(surveys, plan, jobs, targets, trackers, size, notes, replaced)


def execute(prepared: Prepared, options: Options) -> None:
    """Write every rank file and publish all outputs together.

    Args:
        prepared: as ``prepare`` returns it
        options: as given to ``prepare``

    Raises:
        CheckpointError: a file can't be read or written any more; nothing is published then
    """
    stop = threading.Event()
    workers = min(len(prepared.jobs), options.workers or os.cpu_count() or 1)
    with (
        Publication(
            list(prepared.targets.values()), prepared.trackers, overwrite=options.overwrite
        ) as publication,
        progress_bar(prepared.bytes, 'writing', unit='B') as progress,
    ):

        def wrote(count: int) -> None:
            if stop.is_set():
                raise CheckpointError('stopped')
            progress.update(count)

        with ThreadPoolExecutor(workers) as pool:
            try:
                futures = []
                for job in prepared.jobs:
                    directory = publication.path(prepared.targets[job.side])
                    path = directory / job.rank.dirname / FILE_NAME
                    path.parent.mkdir()
                    futures.append(pool.submit(_write, job, path, prepared.plan, options, wrote))
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            finally:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
        publication.commit()


_loading = threading.Lock()  # torch's safe globals are one list for all threads


Ranks = dict[tuple[str, int], OldRank]


def read_ranks(job: Job, options: Options) -> tuple[Ranks, torch_file.Records]:
    """The source files of a job, taken apart, and where their storages lie.

    Raises:
        CheckpointError: one can't be read, or isn't a rank's
    """
    ranks: Ranks = {}
    records: dict[tuple[int, int], torch_file.Record] = {}
    for home, path in job.files.items():
        with _loading:
            mapped = torch_file.read(path, options.trust)
        check_iteration(path, mapped.state, path.parent.parent)
        ranks[home] = rank_file.take_apart(path, mapped.state, not options.drop_optimizer)
        records |= mapped.records
    return ranks, records


def build(job: Job, plan: Plan, options: Options, ranks: Ranks) -> dict[str, Any]:
    """The content of a new rank file.

    Raises:
        CheckpointError: the sources don't fit together
    """
    check_chunks(plan, ranks)
    chunks = [_new_chunk(move, plan, ranks) for move in job.moves]
    return rank_file.put_together(chunks, job.layout, not options.drop_optimizer)


def _new_chunk(move: Move, plan: Plan, ranks: Ranks) -> rank_file.NewChunk:
    def rank_of(chunk: ChunkId) -> OldRank:
        return ranks[chunk.side, chunk.rank]

    if move.empty:
        return rank_file.NewChunk({}, [], {}, [])
    if move.whole:
        source = move.pieces[0].source
        return rank_file.whole_chunk(rank_of(source), source.chunk)
    anyone = next(iter(ranks.values()))  # stands for an end that this chunk doesn't need
    first, last = (
        (end.chunk, ranks.get((end.side, end.rank), anyone))
        for end in (plan.sources[0], plan.sources[-1])
    )
    return rank_file.assembled_chunk(
        move, [(piece, rank_of(piece.source)) for piece in move.pieces], first, last
    )


def check_chunks(plan: Plan, ranks: Ranks) -> None:
    """Refuse files of a shard that lack what the plan was made from, or what their place has.

    Raises:
        CheckpointError: a chunk is missing, or has other layers or another stage's keys
    """
    planned: dict[ChunkId, int] = {}
    for move in plan.moves:
        for piece in move.pieces:
            planned[piece.source] = max(planned.get(piece.source, 0), piece.last)
    last_filled = max((i for i, chunk in enumerate(plan.sources) if planned.get(chunk)), default=0)
    for index, chunk in enumerate(plan.sources):
        rank = ranks.get((chunk.side, chunk.rank))
        if rank is None:
            continue
        if chunk.chunk not in rank.chunks:
            raise CheckpointError(
                f'{rank.path}: key `{chunk.key}` is missing, which other ranks of its stage have'
            )
        found = rank_file.model_state.count_layers(rank.chunks[chunk.chunk], str(rank.path))
        if found != planned.get(chunk, 0):
            raise CheckpointError(
                f'{rank.path}, key `{chunk.key}`: holds {found} layers, expected '
                f'{planned.get(chunk, 0)} as in the other ranks of its stage'
            )
        is_first, is_last = index == 0, index == len(plan.sources) - 1
        if any(not move.whole for move in plan.moves):
            refuse_stray_keys(chunk.chunk, rank, is_first, is_last)
        refuse_misplaced(
            chunk.chunk,
            rank,
            is_first=is_first,
            is_last=is_last,
            layers_follow=index < last_filled,
        )


def _survey(request: Request, options: Options) -> dict[str, SideSurvey]:
    surveys: dict[str, SideSurvey] = {}
    iteration: int | str | None = options.iteration
    for side, root in request.sources.items():  # the edge comes first and sets the iteration
        surveys[side] = survey(side, root, iteration, options.trust)
        name = surveys[side].source.directory.name
        found = parse_iteration_dirname(name)
        iteration = RELEASE if found is None else found
    return surveys


def _refuse_same_roots(request: Request) -> None:
    outputs = {side: _resolved(root) for side, root in request.outputs.items()}
    for root in request.outputs.values():
        refuse_unreachable(root.absolute())
        refuse_tracker_directory(root)
    if len(set(outputs.values())) < len(outputs):
        raise CheckpointError(
            f'{request.outputs["edge"]}: both --save-dir-edge and --save-dir-cloud; name two '
            'directories'
        )
    for source in {split_path(path)[0] for path in request.sources.values()}:
        if _resolved(source) in outputs.values():
            raise CheckpointError(f'{source}: both source and output; name another output')
        for output in outputs.values():
            if _in_an_iteration(output, _resolved(source)):
                raise CheckpointError(f'{output}: lies inside the source {source}; name another')
    for output in outputs.values():
        for other in outputs.values():
            if _in_an_iteration(output, other):
                raise CheckpointError(
                    f'{output}: lies inside the other output {other}; name another'
                )


def _refuse_to_replace_sources(jobs: Sequence[Job], replaced: Sequence[Path]) -> None:
    """Links may lead from a source to what is to be replaced."""
    for target in map(real_path, replaced):
        for path in (path for job in jobs for path in job.files.values()):
            if real_path(path).is_relative_to(target):
                raise CheckpointError(
                    f'{target}: holds {path}, which is to be converted; name another output'
                )


def _resolved(root: Path) -> Path:
    try:
        resolved = root.resolve()
        with contextlib.suppress(FileNotFoundError):
            resolved.lstat()
            resolved.stat()
    except (OSError, RuntimeError) as error:  # pathlib's own for a loop of links
        reason = (error.strerror if isinstance(error, OSError) else None) or one_line(error)
        raise CheckpointError(f"{root}: can't be used: {reason}; name another") from error
    return resolved


def _in_an_iteration(path: Path, root: Path) -> bool:
    """Whether a path is, or lies in, a directory that a checkpoint root has for an iteration."""
    if path == root or not path.is_relative_to(root):
        return False
    within = path.relative_to(root).parts[0]
    return within == RELEASE or parse_iteration_dirname(within) is not None


def _size(state: dict[str, Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in torch_file.tensors(state))


def _write(
    job: Job, path: Path, plan: Plan, options: Options, wrote: Callable[[int], object]
) -> None:
    ranks, records = read_ranks(job, options)
    state = build(job, plan, options, ranks)
    try:
        torch_file.write(path, state, records, wrote)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be written: {error.strerror or error}") from error
