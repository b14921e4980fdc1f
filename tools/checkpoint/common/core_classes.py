"""Classes that megatron-core lets checkpoints hold, without megatron-core.

Megatron's arguments have core's enumerations among them. Importing core for these takes seconds, so
they are read as stand-ins, which pickle as what they stand for.
"""

import argparse
import copyreg
import io
import pickle
import signal
import types
from functools import cache
from pathlib import PosixPath
from typing import Any, ClassVar, Self

import numpy
import torch

# What core registers with torch: `SAFE_GLOBALS` in `safe_globals.py` of each of its versions.
CORE_CLASSES = (
    'megatron.core.enums.ModelType',
    'megatron.core.optimizer.optimizer_config.OptimizerConfig',
    'megatron.core.rerun_state_machine.RerunDiagnostic',
    'megatron.core.rerun_state_machine.RerunMode',
    'megatron.core.rerun_state_machine.RerunState',
    'megatron.core.transformer.enums.AttnBackend',
    'megatron.core.transformer.enums.CudaGraphModule',
    'megatron.core.transformer.enums.CudaGraphScope',
    'megatron.core.transformer.enums.InferenceCudaGraphScope',
)
_OTHERS: tuple[Any, ...] = (
    argparse.Namespace,
    io.BytesIO,
    numpy.dtype,
    numpy.dtypes.UInt32DType,
    numpy.ndarray,
    signal.Signals,
    torch._C.Generator,
    types.SimpleNamespace,
)


class StandIn:
    """An object of one of core's classes: how it is made, and nothing that it does."""

    __slots__ = ('_arguments', '_by_call', '_state')
    _arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Self:
        """As the class is made, by a call or by its own ``__new__``.

        Raises:
            pickle.UnpicklingError: of anything but numbers and text, which no such object is
        """
        if not all(isinstance(argument, int | str) for argument in arguments):
            raise pickle.UnpicklingError(f'{cls.__qualname__} made of other than numbers or text')
        self = super().__new__(cls)
        self._arguments, self._by_call, self._state = arguments, False, None
        return self

    def __init__(self, *arguments: Any) -> None:
        self._by_call = True

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """As the object itself was pickled."""
        if self._by_call:
            made: tuple[Any, ...] = type(self), self._arguments
        else:
            made = copyreg.__newobj__, (type(self), *self._arguments)  # type: ignore[attr-defined]
        return made if self._state is None else (*made, self._state)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__reduce_ex__(2) == other.__reduce_ex__(2)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f'{type(self).__qualname__}{self._arguments!r}'


@cache
def stand_in(name: str) -> type:
    """The class that stands for core's of that full name."""
    module, _, own = name.rpartition('.')
    return type(own, (StandIn,), {'__module__': module, '__slots__': ()})


def admitted() -> list[tuple[Any, str]]:
    """For ``torch.serialization.safe_globals``: objects, and the names they have in pickles."""
    return [
        *((stand_in(name), name) for name in CORE_CLASSES),
        *((cls, f'{cls.__module__}.{cls.__qualname__}') for cls in _OTHERS),
        *((PosixPath, f'{module}.PosixPath') for module in ('pathlib', 'pathlib._local')),
    ]


class WithStandIns:
    """The ``pickle_module`` that ``torch.save`` gets for what was read with stand-ins."""

    class Pickler(pickle._Pickler):
        """Writes the name of a class that a stand-in stands for, without importing it."""

        dispatch: ClassVar[dict[type, Any]] = pickle._Pickler.dispatch.copy()

        def save_type(self, obj: type) -> None:
            """As ``pickle._Pickler`` does, which looks the class up by its name."""
            if not issubclass(obj, StandIn):
                super().save_type(obj)  # type: ignore[misc]
                return
            name = f'{obj.__module__}\n{obj.__qualname__}\n'
            self.write(pickle.GLOBAL + name.encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]

        dispatch[type] = save_type
