"""Running a conversion: look at the sources, plan, check everything, write, publish.

A tensor's way: the plan (``layout``) says which new chunk it belongs to, here a rank file of the
output becomes a job, ``rank_file`` takes the tensor out of the old chunk and puts it into the new
one under its new key, ``torch_file`` copies its bytes.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
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
from .checks import ShardFiles, checked_shards, read_shard
from .commands import Conversion
from .jobs import Job, make_jobs, prediction_note
from .layout import Move, Plan
from .sources import (
    FILE_NAME,
    Side,
    find_directory,
    look_at,
    refuse_other_files,
    shard_paths,
    split_path,
)


@dataclass(frozen=True)
class Options:
    """What holds for every conversion.

    Attributes:
        iteration: iteration to convert; the tracker's of the (edge) source where None
        workers: rank files written at the same time; None for one a CPU
        dry_run: nothing is to be written, nor what a killed run left taken away
    """

    iteration: int | None = None
    drop_optimizer: bool = False
    trust_checkpoints: bool = False
    workers: int | None = None
    dry_run: bool = False
    overwrite: bool = False

    def map(self, path: Path) -> torch_file.MappedFile:
        with _loading:
            return torch_file.read(path, self.trust_checkpoints)

    def read(self, path: Path) -> rank_file.RankFile:
        return rank_file.take_apart(self.map(path), with_optimizer=not self.drop_optimizer)


_loading = threading.Lock()  # torch's safe globals are one list for all threads


@dataclass(frozen=True)
class CheckedConversion:
    """A conversion that can be carried out.

    Attributes:
        plan: which chunk goes where
        jobs: the rank files to write
        targets: directory of each output side
        trackers: root of each output to the text of its tracker
        bytes: total size of the tensors to write
        notes: what the user should know
        replaced: directories of outputs that exist and are to be replaced
    """

    plan: Plan
    jobs: list[Job]
    targets: dict[str, Path]
    trackers: dict[Path, str]
    bytes: int
    notes: list[str]
    replaced: list[Path]


def prepare(conversion: Conversion, options: Options) -> CheckedConversion:
    """Plan a conversion and check all of it; nothing is written.

    Raises:
        CheckpointError: anything is wrong with the sources or the outputs
    """
    _refuse_same_roots(conversion)
    sides = _look_at_sources(conversion, options)
    plan = conversion.plan(sides)
    name = next(iter(sides.values())).directory.name
    targets = {side: root / name for side, root in conversion.outputs.items()}
    text = str(_iteration(name))
    trackers = {root: text for root in conversion.outputs.values()}
    replaced = _make_way(targets, trackers, options)
    shards = shard_paths(sides, plan)
    paths = sorted(path for shard in shards.values() for path in shard.values())
    _refuse_to_replace_sources(paths, replaced)
    refuse_other_files(paths, options.drop_optimizer)
    jobs = make_jobs(sides, plan, shards)
    size, without_args = 0, 0
    added: dict[str, int] = {}
    for source, files in checked_shards(shards, plan, options.read):
        for file in files.values():
            for key in file.added:
                added[key] = added.get(key, 0) + 1
        for job in jobs:
            if job.source == source:
                state = _new_file(job, plan, files, options)
                size += sum(t.numel() * t.element_size() for t in torch_file.tensors(state))
                without_args += state.get('args') is None
    notes = []
    if (note := prediction_note(sides, plan)) is not None:
        notes.append(note)
    if without_args:
        notes.append(f'{without_args} of {len(jobs)} files have no `args`, and get none')
    for key, count in added.items():
        of = f'{count} files have no `{key}`'
        notes.append(f'{of}; the outputs get what Megatron expects there')
    if options.drop_optimizer:
        notes.append('the outputs have no optimizer state; load them with --no-load-optim')
    return CheckedConversion(plan, jobs, targets, trackers, size, notes, replaced)


def execute(checked: CheckedConversion, options: Options) -> None:
    """Write every rank file and publish all outputs together.

    Raises:
        CheckpointError: a file can't be read or written any more; nothing is published then
    """
    stop = threading.Event()
    workers = min(len(checked.jobs), options.workers or os.cpu_count() or 1)
    targets = list(checked.targets.values())
    with (
        Publication(targets, checked.trackers, overwrite=options.overwrite) as publication,
        progress_bar(checked.bytes, 'writing', unit='B') as progress,
    ):

        def wrote(count: int) -> None:
            if stop.is_set():
                raise CheckpointError('stopped')
            progress.update(count)

        with ThreadPoolExecutor(workers) as pool:
            try:
                futures = []
                for job in checked.jobs:
                    directory = publication.path(checked.targets[job.side])
                    path = directory / job.rank.dirname / FILE_NAME
                    path.parent.mkdir()
                    futures.append(pool.submit(_write, job, path, checked.plan, options, wrote))
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            finally:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
        publication.commit()


def _write(
    job: Job, path: Path, plan: Plan, options: Options, wrote: Callable[[int], object]
) -> None:
    files = read_shard(job.paths, plan, options.read)
    state = _new_file(job, plan, files, options)
    records = {at: record for file in files.values() for at, record in file.records.items()}
    try:
        torch_file.write(path, state, records, wrote)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be written: {error.strerror or error}") from error


def _new_file(job: Job, plan: Plan, files: ShardFiles, options: Options) -> dict[str, Any]:
    chunks = [_new_chunk(move, plan, files) for move in job.moves]
    return rank_file.put_together(chunks, job.sizes, with_optimizer=not options.drop_optimizer)


def _new_chunk(move: Move, plan: Plan, files: ShardFiles) -> rank_file.NewChunk:
    if move.empty:
        return rank_file.NewChunk({}, [], {}, [])
    pieces = [(piece, files[piece.source.side, piece.source.rank]) for piece in move.pieces]
    if move.whole:
        piece, file = pieces[0]
        return rank_file.whole_chunk(file, piece.source.chunk)
    anyone = next(iter(files.values()))  # stands for an end that this chunk doesn't need
    first, last = (
        (end.chunk, files.get((end.side, end.rank), anyone))
        for end in (plan.sources[0], plan.sources[-1])
    )
    return rank_file.assembled_chunk(move, pieces, first, last)


def _look_at_sources(conversion: Conversion, options: Options) -> dict[str, Side]:
    sides: dict[str, Side] = {}
    iteration: int | str | None = options.iteration
    for name, root in conversion.sources.items():  # the edge comes first and sets the iteration
        directory = find_directory(root, iteration)
        sides[name] = look_at(name, directory, options.map)
        iteration = _iteration(directory.name)
    return sides


def _iteration(name: str) -> int | str:
    iteration = parse_iteration_dirname(name)
    return RELEASE if iteration is None else iteration


def _make_way(
    targets: Mapping[str, Path], trackers: Mapping[Path, str], options: Options
) -> list[Path]:
    """Outputs that exist and are to be replaced; what a killed run left is brought to an end."""
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
    return replaced


def _refuse_same_roots(conversion: Conversion) -> None:
    outputs = {side: _resolved(root) for side, root in conversion.outputs.items()}
    for root in conversion.outputs.values():
        refuse_unreachable(root.absolute())
        refuse_tracker_directory(root)
    if len(set(outputs.values())) < len(outputs):
        raise CheckpointError(
            f'{conversion.outputs["edge"]}: both --save-dir-edge and --save-dir-cloud; name two '
            'directories'
        )
    for source in {split_path(path)[0] for path in conversion.sources.values()}:
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


def _refuse_to_replace_sources(paths: Sequence[Path], replaced: Sequence[Path]) -> None:
    """Links may lead from a source to what is to be replaced."""
    for target in map(real_path, replaced):
        for path in paths:
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
