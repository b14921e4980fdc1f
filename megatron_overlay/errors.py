"""Core's ``CheckpointingException``, for those who may not have core to import it from."""

import sys
from functools import cache

_CORE = 'megatron.core.dist_checkpointing.core'


class CheckpointingException(Exception):  # noqa: N818 (the name is core's)
    """A checkpoint that can't be worked with.

    It is raised as core's exception of this name, too, wherever core has been imported: who catches
    that one has imported it. Importing core for the name alone would take seconds.
    """

    def __new__(cls, *args: object) -> 'CheckpointingException':
        """An instance of this class, and of core's where that is there."""
        base = getattr(sys.modules.get(_CORE), 'CheckpointingException', None)
        return super().__new__(cls if base is None else _of_both(cls, base), *args)  # type: ignore[arg-type]


@cache
def _of_both(cls: type, base: type) -> type:
    names = {
        '__module__': cls.__module__,
        '__qualname__': cls.__qualname__,
        '__doc__': cls.__doc__,
        '__reduce__': lambda self: (cls, self.args),
    }
    return cls if issubclass(cls, base) else type(cls.__name__, (cls, base), names)
