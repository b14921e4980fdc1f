"""The parameter names in an ``fsdp_dtensor`` checkpoint, which knows no ShardedTensors.

There a parameter's flattened key is its place in the state dict (``model``, ``optimizer.state``,
``optimizer.0.param_to_group_meta``), then the ``module.`` of each wrapper, then its name.
"""

import bisect
import itertools
from collections.abc import Iterable
from functools import cached_property

from .checkpoint_keys import parse_key


class CheckpointNames:
    """Finds out how deeply the parameters of a checkpoint were wrapped.

    Looking up a name takes constant time where it is a key or the level above one, as most are,
    and a binary search where there are further levels between.

    Attributes:
        keys: the checkpoint's flattened keys.
    """

    def __init__(self, keys: Iterable[str], place: str = ''):
        """Take the flattened keys, of which those of interest begin with ``place``."""
        self.keys = frozenset(keys)
        start = f'{place}.' if place else ''
        # What the pattern looks at ends before a model's layers, and is the same for most keys.
        heads = {''.join(key.partition('.layers.')[:2]) for key in self.keys}
        self._places, self._prefixes = set(), set()
        for before in {parse_key(head).prefix for head in heads if head.startswith(start)}:
            place, prefix = _before_wrappers(before)
            self._places.add(place)
            self._prefixes.add(prefix)

    def prefixes(self, name: str, place: str | None = None) -> dict[str, str]:
        """The ``module.`` prefixes that ``name`` is stored under, with the whole names.

        Args:
            name: of a parameter, without ``module.`` of its own.
            place: the name's place in the flattened keys; None looks in all of them.
        """
        places = self._places if place is None else {f'{place}.' if place else ''}
        found = {}
        for start in places:
            for prefix in self._prefixes:
                whole = f'{start}{prefix}{name}'
                if self._has(whole):
                    found[prefix] = whole
        return found

    def nearest(self, key: str) -> str:
        """What the checkpoint has in place of ``key``, in words."""
        alike = [
            other for other in self._sorted_keys if f'.{key}'.endswith(f'.{parse_key(other).name}')
        ]
        return ' and '.join(alike[:3]) if alike else f'{len(self.keys)} other keys'

    def _has(self, name: str) -> bool:
        if name in self.keys or name in self._parents:
            return True
        below = f'{name}.'
        position = bisect.bisect_left(self._sorted_keys, below)
        return position < len(self._sorted_keys) and self._sorted_keys[position].startswith(below)

    @cached_property
    def _parents(self) -> frozenset[str]:
        return frozenset(key.rpartition('.')[0] for key in self.keys)

    @cached_property
    def _sorted_keys(self) -> list[str]:
        return sorted(self.keys)


def _before_wrappers(prefix: str) -> tuple[str, str]:
    """``model.`` and ``module.module.`` of ``model.module.module.``."""
    *names, _ = prefix.split('.')
    wrappers = sum(1 for _ in itertools.takewhile('module'.__eq__, reversed(names)))
    return prefix[: len(prefix) - len('module.') * wrappers], 'module.' * wrappers
