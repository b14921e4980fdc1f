"""Weights from a file, in place of a schedule."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..common.errors import CheckpointError, one_line


def load_coefficients(file: str | Path, iterations: Sequence[int]) -> dict[int, float]:
    """Weights from a JSON or YAML file that maps each of ``iterations``, and no other, to one.

    Returns:
        iteration to weight, in rising order of iteration

    Raises:
        CheckpointError: unreadable, no such mapping, or other iterations than the merge has
    """
    found = _read_mapping(Path(file))
    weights: dict[int, float] = {}
    for key, value in found.items():
        try:
            iteration = int(str(key))
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError
            weight = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f'{file}: {reprlib.repr(key)}: {reprlib.repr(value)}, expected an iteration and '
                'its weight'
            ) from error
        if iteration in weights:
            raise CheckpointError(f'{file}: iteration {iteration} twice')
        weights[iteration] = weight
    missing = sorted(set(iterations) - set(weights))
    unexpected = sorted(set(weights) - set(iterations))
    if missing or unexpected:
        raise CheckpointError(
            f"{file}: iterations differ from the merge's: "
            f'without a weight: {missing or "none"}, not in the merge: {unexpected or "none"}'
        )
    return {iteration: weights[iteration] for iteration in sorted(weights)}


def _read_mapping(file: Path) -> Mapping[object, object]:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: can't be read: {one_line(error)}") from error
    try:
        if file.suffix == '.json':
            found = json.loads(text, object_pairs_hook=_without_twins)
        else:
            import yaml

            found = yaml.safe_load(text)
    except ImportError as error:
        raise CheckpointError(f'{file}: YAML needs the package pyyaml; or write JSON') from error
    except Exception as error:
        raise CheckpointError(f'{file}: no JSON or YAML: {one_line(error)}') from error
    if not isinstance(found, dict):
        raise CheckpointError(f'{file}: holds {type(found).__name__}, expected iteration: weight')
    return found


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    twins = sorted({key for key in keys if keys.count(key) > 1})
    if twins:
        raise ValueError(f'{twins[0]} twice')
    return dict(pairs)
