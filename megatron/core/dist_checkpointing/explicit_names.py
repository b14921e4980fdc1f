"""The parameter names in an ``fsdp_dtensor`` checkpoint, which knows no ShardedTensors.

There a parameter's flattened key is its place in the state dict (``model``, ``optimizer.state``,
``optimizer.0.param_to_group_meta``), then the ``module.`` of each wrapper, then its name.
"""

from collections.abc import Iterable

from .checkpoint_keys import before_wrappers, parse_key


class CheckpointNames:
    """Finds out how deeply the parameters of a checkpoint were wrapped.

    Attributes:
        keys: the checkpoint's flattened keys.
    """

    def __init__(self, keys: Iterable[str], place: str = ''):
        """Take the flattened keys, of which those of interest begin with ``place``."""
        self.keys = frozenset(keys)
        self._known = _with_levels_above(self.keys)
        start = f'{place}.' if place else ''
        # What the pattern looks at ends before a model's layers, and is the same for most keys.
        heads = {''.join(key.partition('.layers.')[:2]) for key in self.keys}
        self._places, self._prefixes = set(), set()
        for prefix in {parse_key(head).prefix for head in heads if head.startswith(start)}:
            self._places.add(before_wrappers(prefix))
            self._prefixes.add(prefix.removeprefix(before_wrappers(prefix)))

    def prefixes(self, name: str, place: str | None = None) -> dict[str, str]:
        """The ``module.`` prefixes that ``name`` is stored under, with the whole names.

        Args:
            name: of a parameter, without ``module.`` of its own.
            place: the name's place in the flattened keys; None looks in all of them.
        """
        places = self._places if place is None else {f'{place}.' if place else ''}
        return {
            prefix: whole
            for start in places
            for prefix in self._prefixes
            if (whole := f'{start}{prefix}{name}') in self._known
        }

    def nearest(self, key: str) -> str:
        """What the checkpoint has in place of ``key``, in words."""
        alike = [
            other for other in sorted(self.keys) if f'.{key}'.endswith(f'.{parse_key(other).name}')
        ]
        return ' and '.join(alike[:3]) if alike else f'{len(self.keys)} other keys'


def _with_levels_above(keys: Iterable[str]) -> set[str]:
    """The keys, and every name that others of them begin with."""
    found = set(keys)
    for key in keys:
        above = key.rpartition('.')[0]
        while above and above not in found:
            found.add(above)
            above = above.rpartition('.')[0]
    return found
