"""A look over a loaded value before it is walked: does it end?

A file can hold a list that contains itself, or forty lists of which each contains the next one
twice: the first has no end, the second ends after 2^40 steps.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

_DEEPEST = 200
_LARGEST = 10_000_000
_CONTAINERS = (dict, list, tuple, Namespace)


class Endless(ValueError):
    """A value that can't be walked to its end, or not soon."""


def refuse_endless(value: Any) -> None:
    """Make sure that every walk over nested containers and namespaces ends soon.

    Raises:
        Endless: a container contains itself or is nested too deeply, or shared parts make the
            whole far larger than what is stored
    """
    done: dict[int, tuple[int, int]] = {}  # id -> levels, and values with everything below
    begun: set[int] = set()
    stored, todo = 0, [value]
    while todo:
        node = todo[-1]
        if id(node) in done:
            todo.pop()
            continue
        parts = _parts(node)
        containers = [part for part in parts if isinstance(part, _CONTAINERS)]
        waiting = [part for part in containers if id(part) not in done]
        if waiting:
            if id(node) in begun:
                raise Endless('a value contains itself')
            begun.add(id(node))
            todo += waiting
            continue
        todo.pop()
        below = [done[id(part)] for part in containers]
        levels = 1 + max((levels for levels, _ in below), default=0)
        values = len(parts) + sum(values for _, values in below)
        stored += len(parts)
        if levels > _DEEPEST:
            raise Endless(f'values are nested more than {_DEEPEST} levels deep')
        if values > _LARGEST and values > 10 * stored:
            raise Endless('shared values make the whole far larger than the file')
        done[id(node)] = levels, values


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, (list, tuple)) else ()
