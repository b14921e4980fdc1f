"""Which checkpoints go into a merge, and with which weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy

from ..common.directory import resolve_checkpoint
from ..common.errors import CheckpointError
from ..common.paths import list_iterations, parse_iteration_dirname, real_path
from .coefficients import load_coefficients
from .schedules import checkpoint_coefficients


@dataclass(frozen=True)
class Inputs:
    """Checkpoint directories in merge order, their weights, and where the weights come from.

    Attributes:
        directories: checkpoint directories (each has ``metadata.json``)
        weights: one for each directory, finite
        style: the schedule, ``coefficients`` for a file of weights, None for given weights
        normalized: whether the weights were scaled to sum 1
        last_iteration: end of the range in range mode
    """

    directories: tuple[Path, ...]
    weights: tuple[float, ...]
    style: str | None = None
    normalized: bool = False
    last_iteration: int | None = None

    @property
    def iterations(self) -> list[int | None]:
        """What the directory names say; None where a name says nothing."""
        return [parse_iteration_dirname(directory.name) for directory in self.directories]


def manual_inputs(
    pairs: Sequence[str], *, normalize: bool = False, min_checkpoints: int = 1
) -> Inputs:
    """Inputs from ``PATH:WEIGHT`` pairs; the weight is what follows the last colon.

    Raises:
        CheckpointError: no weight, a weight that is no finite number, no checkpoint there, or
            fewer than ``min_checkpoints``
    """
    directories, weights = [], []
    for pair in pairs:
        path, colon, weight = pair.rpartition(':')
        try:
            weights.append(float(weight))
        except ValueError:
            path = ''
        if not colon or not path:
            raise CheckpointError(
                f'{pair}: no weight, expected PATH:WEIGHT; for a range of one root give both '
                '--start-checkpoint and --end-checkpoint'
            )
        directories.append(path)
    if len(directories) < min_checkpoints:
        raise CheckpointError(
            f'{len(directories)} checkpoints given, --min-checkpoints asks for {min_checkpoints}'
        )
    return explicit_inputs(directories, weights, normalize=normalize)


def explicit_inputs(
    directories: Sequence[str | Path],
    weights: Sequence[float],
    *,
    style: str | None = None,
    normalize: bool = False,
) -> Inputs:
    """Inputs whose weights are given.

    Args:
        directories: checkpoint directories, or roots with a tracker
        weights: one for each
        style: what the provenance calls the weights' schedule
        normalize: scale the weights to sum 1

    Raises:
        CheckpointError: none or unequally many, the same checkpoint twice, weights that aren't
            finite in fp32, or can't be normalised
    """
    if not directories:
        raise CheckpointError('no checkpoints to merge')
    if len(directories) != len(weights):
        raise CheckpointError(f'{len(directories)} checkpoints, but {len(weights)} weights')
    resolved = [resolve_checkpoint(directory) for directory in directories]
    seen: dict[Path, Path] = {}
    for directory in resolved:
        if real_path(directory) in seen:
            raise CheckpointError(
                f'{directory}: given twice; name it once, with the sum of its weights'
            )
        seen[real_path(directory)] = directory
    scaled = [float(weight) for weight in weights]
    if normalize:
        try:
            total = math.fsum(scaled)
        except (OverflowError, ValueError):  # beyond a float, or of inf and -inf
            total = math.inf
        if not (math.isfinite(total) and total > 0):
            raise CheckpointError(
                f'weights sum to {total}; --normalize needs a finite, positive sum'
            )
        scaled = [weight / total for weight in scaled]
    with numpy.errstate(over='ignore'):
        for directory, weight in zip(resolved, scaled, strict=True):
            if not numpy.isfinite(numpy.float32(weight)):
                raise CheckpointError(f'{directory}: weight {weight} is not finite in fp32')
    return Inputs(tuple(resolved), tuple(scaled), style, normalize)


def range_inputs(
    root: str | Path,
    start: int,
    end: int,
    *,
    style: str = 'linear',
    seed: int = 0,
    min_interval: int = 0,
    min_checkpoints: int = 1,
    coefficients: str | Path | None = None,
    normalize: bool = False,
) -> Inputs:
    """The checkpoints of a root from ``start`` to ``end``, in iteration order, with a schedule.

    Args:
        root: directory that holds the ``iter_*`` directories
        start, end: first and last iteration; a checkpoint of ``end`` must exist
        style, seed: see ``checkpoint_coefficients``
        min_interval: walking back from ``end``, keep a checkpoint only this many iterations
            before the last one kept
        min_checkpoints: fail when fewer remain
        coefficients: file with a weight for each iteration, in place of a schedule
        normalize: scale the weights to sum 1

    Raises:
        CheckpointError: nothing suitable; the message says what is there
    """
    if start > end:
        raise CheckpointError(f'--start-checkpoint {start} lies after --end-checkpoint {end}')
    known = list_iterations(root)
    if end not in known:
        raise CheckpointError(
            f'{root}: no checkpoint of iteration {end}; found: '
            + (', '.join(map(str, known)) or 'none')
        )
    kept: list[int] = []
    for iteration in reversed([i for i in known if start <= i <= end]):
        if not kept or kept[-1] - iteration >= min_interval:
            kept.append(iteration)
    kept.reverse()
    if len(kept) < min_checkpoints:
        raise CheckpointError(
            f'{root}: {len(kept)} checkpoints in the range ({", ".join(map(str, kept))}), '
            f'--min-checkpoints asks for {min_checkpoints}'
        )
    if coefficients is not None:
        weights, style = load_coefficients(coefficients, kept), 'coefficients'
    else:
        weights = checkpoint_coefficients(kept, style, seed)
    inputs = explicit_inputs(
        [known[i] for i in kept], [weights[i] for i in kept], style=style, normalize=normalize
    )
    return replace(inputs, last_iteration=end)
