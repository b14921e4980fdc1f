"""The parameter names in an ``fsdp_dtensor`` checkpoint, which knows no ShardedTensors.

There a parameter's flattened key is its place in the state dict (``model``, ``optimizer.state``,
``optimizer.0.param_to_group_meta``), then the ``module.`` of each wrapper, then its name.
"""

import bisect
import re
from collections.abc import Iterable

MODULE_PREFIX_RE = re.compile(r'^(?:module\.)+')
_PLACE_AND_WRAPPERS_RE = re.compile(
    r'^((?:(?:model\d*|optimizer\d*|state|param_to_group_meta|\d+)\.)*)((?:module\.)*)'
)


class CheckpointNames:
    """Finds out how deeply the parameters of a checkpoint were wrapped.

    Looking up a name takes a binary search, since optimizer state has further levels below it.

    Attributes:
        keys: the checkpoint's flattened keys.
    """

    def __init__(self, keys: Iterable[str], place: str = ''):
        """Take the flattened keys, of which those of interest begin with ``place``."""
        self.keys = frozenset(keys)
        self._sorted_keys = sorted(self.keys)
        start = f'{place}.' if place else ''
        found = {
            _PLACE_AND_WRAPPERS_RE.match(key.removeprefix(start)).groups() for key in self.keys
        }
        self._places = {f'{start}{below}' for below, _ in found}
        self._prefixes = {prefix for _, prefix in found}

    def prefixes(self, name: str, place: str | None = None) -> dict[str, str]:
        """The ``module.`` prefixes that ``name`` is stored under, with the whole names.

        Args:
            name: of a parameter, without ``module.`` of its own.
            place: the name's place in the flattened keys; None looks in all of them.
        """
        places = self._places if place is None else {f'{place}.' if place else ''}
        return {
            prefix: f'{start}{prefix}{name}'
            for start in places
            for prefix in self._prefixes
            if self._has(f'{start}{prefix}{name}')
        }

    def nearest(self, key: str) -> str:
        """What the checkpoint has in place of ``key``, in words."""
        alike = [
            other
            for other in self._sorted_keys
            if f'.{key}'.endswith(f'.{_PLACE_AND_WRAPPERS_RE.sub("", other)}')
        ]
        return ' and '.join(alike[:3]) if alike else f'{len(self.keys)} other keys'

    def _has(self, name: str) -> bool:
        if name in self.keys:
            return True
        below = f'{name}.'
        position = bisect.bisect_left(self._sorted_keys, below)
        return position < len(self._sorted_keys) and self._sorted_keys[position].startswith(below)
