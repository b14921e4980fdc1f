"""Reading checkpoint files without running what they hold.

``torch.save`` files go through ``torch.load(weights_only=True)`` with the safe globals that core
registers, core's own classes as stand-ins, and a few that Megatron stores besides.
"""

import importlib
import io
import pickle
import re
import sys
from _compat_pickle import IMPORT_MAPPING
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy
import torch

from . import core_classes
from .errors import CheckpointError, one_line
from .forged_arrays import refuse_forged_arrays, refuse_pointers
from .nesting import Endless, refuse_endless
from .pickle_protocol import as_protocol_2
from .quiet import quiet_imports

TRUST_HINT = 'pass --trust-checkpoints only if you trust whoever wrote it'
# of those that never run what they read
NOTHING_RUNS = 'expected values and settings, and nothing that has to be run'


def _of_numpy(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f'numpy._core.{module}'), name)


def _by_both_names(module: str, name: str, found: Any) -> list[Any]:
    """NumPy's object by the names that NumPy 1 and NumPy 2 give it in pickles."""
    return [(found, f'numpy.{core}.{module}.{name}') for core in ('core', '_core')]


def _of_plain_dtype(module: str, name: str) -> list[Any]:
    """NumPy's function, for types whose elements are values."""
    make = _of_numpy(module, name)

    def checked(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, numpy.dtype):
                refuse_pointers(argument)
        return make(*arguments)

    return _by_both_names(module, name, checked)


# RNG states, loss figures and the like are stored as NumPy arrays and scalars.
_NUMPY: list[Any] = [
    *(getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__ if name.endswith('DType')),
    *_by_both_names('multiarray', '_reconstruct', _of_numpy('multiarray', '_reconstruct')),
    *_of_plain_dtype('multiarray', 'scalar'),
    *_of_plain_dtype('numeric', '_frombuffer'),  # in pickle protocol 5
]


# How protocol 2 writes none, and nothing that makes more bytes than it holds.
_BYTES: list[Any] = [(lambda: b'', 'builtins.bytes')]


def load_torch(
    source: str | Path | IO[bytes],
    *,
    trust: bool = False,
    mmap: bool = False,
    name: str | None = None,
    trust_hint: str = TRUST_HINT,
) -> Any:
    """What ``torch.save`` wrote, onto the CPU, running no code of its own.

    Args:
        source: file path, or an open binary file
        trust: load without restriction (``weights_only=False``)
        mmap: map tensors instead of reading them; for paths only
        name: what error messages call the source; default: its path
        trust_hint: the way out that the message names when a class is refused

    Raises:
        CheckpointError: missing, truncated or garbage; holds a class that isn't admitted (named
            in the message)
    """
    name = name or str(source)
    path = str(source) if isinstance(source, Path) else source
    try:
        # Leaving the block takes away what it added; what core has registered must stay.
        admitted = _not_registered([*_NUMPY, *_BYTES, *core_classes.admitted()])
        quiet = quiet_imports() if trust else nullcontext()  # trusted, a file may import core
        with torch.serialization.safe_globals(admitted), quiet:
            data = None if trust else _pickle_in(path)
            protocol = 2 if data is None else _protocol(data)
            if protocol < 2:
                raise CheckpointError(
                    f'{name}: its pickle is of protocol 0 or 1, or damaged; expected 2 to 5: save '
                    'it again with torch.save as it is called by default'
                )
            restricted = protocol > 2  # by the same unpickler: weights_only takes no other protocol
            value = torch.load(
                path,
                map_location='cpu',
                mmap=mmap,
                weights_only=not (trust or restricted),
                pickle_module=_Protocol2 if restricted else None,
            )
        if not trust:
            refuse_forged_arrays(value)
            refuse_endless(value)
        return value
    except CheckpointError:
        raise
    except Endless as error:
        raise CheckpointError(f'{name}: {error}; the file is damaged') from error
    except FileNotFoundError as error:
        raise CheckpointError(f'{name}: no such file') from error
    except OSError as error:
        raise CheckpointError(f"{name}: can't be read: {error.strerror or error}") from error
    except Exception as error:
        reason = why_not_loaded(error, _refused_global(error), trust_hint)
        reason = reason or f'no torch.save file, truncated or damaged ({_cause(error)})'
        raise CheckpointError(f'{name}: {reason}') from error


class _Protocol2:
    """For ``torch.load``: its own restricted unpickler, told any protocol in protocol 2."""

    class Unpickler(torch._weights_only_unpickler.Unpickler):  # noqa: D106
        def __init__(self, file: IO[bytes], *, encoding: str = 'bytes') -> None:
            super().__init__(io.BytesIO(as_protocol_2(file.read())), encoding=encoding)


def unsafe_globals(source: str | IO[bytes]) -> list[str]:
    """Full names of what a ``torch.save`` file of any protocol asks for and torch doesn't admit.

    Raises:
        Exception: of any kind; it is no such file, as loading it will say
    """
    data = _pickle_in(source) or b''
    if _protocol(data) > 2:
        data = as_protocol_2(data)
    unpickler = torch._weights_only_unpickler
    admitted = unpickler._get_allowed_globals().keys() | unpickler._get_user_allowed_globals()
    return sorted(unpickler.get_globals_in_pkl(io.BytesIO(data)) - admitted)


def _protocol(data: bytes) -> int:
    """Protocol of a pickle, 1 for 0 too; 2 where it can't be told."""
    if len(data) < 2:
        return 2
    return data[1] if data[:1] == pickle.PROTO else 1


def _pickle_in(source: str | IO[bytes]) -> bytes | None:
    """The pickle of what ``torch.save`` wrote; None where there is none."""
    if isinstance(source, str):  # of any bytes, which torch's own reader doesn't open by name
        with open(source, 'rb') as file:
            return _pickle_in(file)
    at = source.tell()
    try:
        archive = torch._C.PyTorchFileReader(source)
        # TorchScript is code
        return None if archive.has_record('constants.pkl') else archive.get_record('data.pkl')
    except RuntimeError:  # no zip file: torch.load says what is wrong
        return None
    finally:
        source.seek(at)


def _not_registered(entries: list[Any]) -> list[Any]:
    registered = set(map(_pickled_name, torch.serialization.get_safe_globals()))
    return [entry for entry in entries if _pickled_name(entry) not in registered]


def _pickled_name(entry: Any) -> str:
    """What a safe global is called in pickles."""
    if isinstance(entry, tuple):
        return entry[1]
    return f'{entry.__module__}.{entry.__qualname__}'


_REFUSALS = (
    r'GLOBAL (\S+) (?:was not an allowed global|whose module)',
    r'Can only (?:create new object|build).* but got <class \'(.+?)\'>',
    r'Trying to call reduce for unrecognized function (\S+)',
)


def _refused_global(error: Exception) -> str | None:
    found = (re.search(pattern, str(error)) for pattern in _REFUSALS)
    return next((match.group(1) for match in found if match), None)


def why_not_loaded(error: Exception, refused: str | None, trust_hint: str) -> str | None:
    """What keeps a file from being loaded that need not be damaged; None for any other error.

    Args:
        refused: full name of a class that isn't admitted
        trust_hint: the way out then
    """
    return _refusal(refused, trust_hint) if refused else _missing_code(error)


def _refusal(name: str, trust_hint: str) -> str:
    module = name.rpartition('.')[0]
    package = IMPORT_MAPPING.get(module, module).partition('.')[0]
    if not package or package in sys.modules or find_spec(package) is not None:
        return f'refused class {name}; {trust_hint}'
    return (
        f'refused class {name}, whose package {package} is not installed here: trusting the file '
        'would not load it either'
    )


def _missing_code(error: Exception) -> str | None:
    """What a trusted file needs of other code and doesn't find; None for any other error."""
    if isinstance(error, ImportError):
        missing = f'module {error.name}' if error.name else one_line(error)
    elif isinstance(error, AttributeError) and one_line(error).startswith("Can't get attribute"):
        missing = one_line(error)
    else:
        return None
    return (
        f'needs what is not installed here ({missing}); run in the Python environment that saved it'
    )


def _cause(error: BaseException) -> str:
    """The telling line of a ``torch.load`` error, which wraps its cause in advice."""
    for line in str(error).splitlines():
        match = re.search(r'WeightsUnpickler error: (.+)', line)
        if match:
            return match.group(1).strip()
    return one_line(error)
