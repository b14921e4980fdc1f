"""Weights from a file, in place of a schedule."""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import CheckpointError, one_line

if TYPE_CHECKING:
    from yaml import MappingNode

_OTHER_BASE = re.compile(r'[-+]?0[0-9xXbBoO]')
_BARE_EXPONENT = re.compile(r'([-+]?\d+)(\.\d+)?\.?[eE]([-+]?)(\d+)', re.ASCII)


class _Unclear(ValueError):
    """Content that would not be taken as it is written."""


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
                f'its weight{_hint(value)}'
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
            found = _load_yaml(text)
    except _Unclear as error:
        raise CheckpointError(f'{file}: {error}') from error
    except ImportError as error:
        raise CheckpointError(f'{file}: YAML needs the package pyyaml; or write JSON') from error
    except Exception as error:
        raise CheckpointError(f'{file}: no JSON or YAML: {one_line(error)}') from error
    if not isinstance(found, dict):
        raise CheckpointError(f'{file}: holds {type(found).__name__}, expected iteration: weight')
    return found


def _load_yaml(text: str) -> object:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: 'MappingNode', deep: bool = False) -> dict[Any, Any]:
            _refuse_unclear(self, node)
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader)  # noqa: S506


def _refuse_unclear(loader: Any, node: 'MappingNode') -> None:
    """Raise for a key given twice, and for numbers that YAML 1.1 takes as octal, base 60, …."""
    seen = set()
    for pair in node.value:
        for part in pair:
            text = part.value
            if not part.tag.endswith((':int', ':float')) or not isinstance(text, str):
                continue
            if _OTHER_BASE.match(text) or set(text) & set(':_'):
                raise _Unclear(
                    f'{text} would be taken as {loader.construct_object(part)}; write a plain '
                    'decimal number'
                )
        if pair[0].tag.endswith((':int', ':str')):
            key = loader.construct_object(pair[0])
            if key in seen:
                raise _Unclear(f'{key} twice')
            seen.add(key)


def _hint(value: object) -> str:
    """How to write a number that YAML 1.1 takes for text, for want of a point or a sign."""
    match = isinstance(value, str) and _BARE_EXPONENT.fullmatch(value)
    if not match:
        return ''
    digits, fraction, sign, exponent = match.groups()
    return f'; write it as {digits}{fraction or ".0"}e{sign or "+"}{exponent}'


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    twins = sorted({key for key in keys if keys.count(key) > 1})
    if twins:
        raise _Unclear(f'{twins[0]} twice')
    return dict(pairs)
