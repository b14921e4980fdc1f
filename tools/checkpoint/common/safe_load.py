"""Reading checkpoint files without running what they hold.

``torch.save`` files go through ``torch.load(weights_only=True)`` with the safe globals that core
registers and a few that Megatron stores besides; DCP's ``.metadata``, a plain pickle, goes through
an unpickler that knows DCP's metadata classes and nothing else.
"""

import importlib
import io
import os
import pickle
import re
import sys
from _compat_pickle import IMPORT_MAPPING
from importlib.util import find_spec
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .errors import CheckpointError, one_line, shown
from .forged_arrays import refuse_forged_arrays, refuse_pointers
from .nesting import Endless, refuse_endless
from .pickle_protocol import as_protocol_2
from .pickle_scan import refuse_memory_request

METADATA_NAME = '.metadata'
TRUST_HINT = 'pass --trust-checkpoints only if you trust whoever wrote it'

_DCP = 'torch.distributed.checkpoint'
_CORE = 'megatron.core.dist_checkpointing.strategies.torch'
_PATHS = {'Path', 'PosixPath', 'PurePath', 'PurePosixPath'}
_METADATA_GLOBALS: dict[str, set[str]] = {
    f'{_DCP}.metadata': {
        '_MEM_FORMAT_ENCODING',
        'BytesStorageMetadata',
        'ChunkStorageMetadata',
        'Metadata',
        'MetadataIndex',
        'StorageMeta',
        'TensorProperties',
        'TensorStorageMetadata',
    },
    f'{_DCP}.filesystem': {'_StorageInfo', '_StoragePrefix'},
    f'{_DCP}.planner': {  # core keeps the ranks' plans in the metadata
        'BytesIOWriteData',
        'SavePlan',
        'TensorWriteData',
        'WriteItem',
        'WriteItemType',
    },
    _CORE: {'MCoreMetadata', 'MCoreSavePlan'},  # written by core 0.14 and 0.15
    'torch': {'Size'},
    'torch.serialization': {'_get_layout'},
    'collections': {'OrderedDict'},
    'builtins': {'object', 'set', 'frozenset'},
    'pathlib': _PATHS,
    'pathlib._local': _PATHS,  # Python 3.13 and later
}

# RNG states, loss figures and the like are stored as NumPy arrays and scalars, by NumPy 1 under
# `numpy.core` and since then under `numpy._core`.
_NUMPY: list[Any] = [
    *(getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__ if name.endswith('DType')),
    *(
        (
            getattr(importlib.import_module(f'numpy._core.{module}'), name),
            f'numpy.{core}.{module}.{name}',
        )
        for module, name in (('multiarray', '_reconstruct'),)
        for core in ('core', '_core')
    ),
]


def _of_plain_dtype(module: str, name: str) -> list[Any]:
    """NumPy's function, for types whose elements are values; by its names of NumPy 1 and 2."""
    make = getattr(importlib.import_module(f'numpy._core.{module}'), name)

    def checked(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, numpy.dtype):
                refuse_pointers(argument)
        return make(*arguments)

    return [(checked, f'numpy.{core}.{module}.{name}') for core in ('core', '_core')]


_NUMPY += [
    *_of_plain_dtype('multiarray', 'scalar'),
    *_of_plain_dtype('numeric', '_frombuffer'),  # in pickle protocol 5
]


def _no_bytes() -> bytes:
    return b''


# How protocol 2 writes them, and nothing that makes more bytes than it holds.
_BYTES: list[Any] = [(_no_bytes, 'builtins.bytes')]


class _MetadataUnpickler(pickle.Unpickler):
    """Knows DCP's metadata classes, sizes, dtypes and paths; refuses any other global.

    A pickle can set attributes on whatever it can name: ``restore`` takes that back from classes,
    and of functions it gets one of its own.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._before: dict[type, dict[str, Any]] = {}

    def restore(self) -> None:
        """Put admitted classes back to what they were.

        Raises:
            pickle.UnpicklingError: one was changed
        """
        for cls, attributes in self._before.items():
            _restore(cls, attributes)

    def find_class(self, module: str, name: str) -> Any:
        """The class itself, if it is one of those.

        Raises:
            pickle.UnpicklingError: for every other global, naming it
        """
        module = IMPORT_MAPPING.get(module, module)  # protocols 0 to 2 have Python 2's names
        if (module, name) == ('copyreg', '_reconstructor'):
            return lambda *arguments: _new_object(*arguments)
        if module == 'torch' and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in _METADATA_GLOBALS.get(module, ()):
            raise pickle.UnpicklingError(f'refused class {module}.{name}')
        if module == 'pathlib._local':
            module = 'pathlib'
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, type):
            self._before.setdefault(found, dict(vars(found)))
            return found
        return (lambda *arguments: found(*arguments)) if callable(found) else found


def _new_object(cls: Any, base: object, state: object) -> Any:
    """How protocols 0 and 1 make an object; its attributes follow."""
    if base is not object or state is not None:
        raise pickle.UnpicklingError(f'refused class {shown(cls)} made of {shown(base)}')
    return object.__new__(cls)


def load_dcp_metadata(path: str | Path, *, trust: bool = False) -> Metadata:
    """DCP metadata of a checkpoint.

    Args:
        path: checkpoint directory, or its ``.metadata`` file
        trust: unpickle without restriction

    Raises:
        CheckpointError: missing, truncated or garbage; holds a class that isn't DCP metadata
            (named in the message), or an entry whose fields aren't of their types
    """
    path = Path(path)
    file = path / METADATA_NAME if path.is_dir() else path
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(
            f'{file}: no such file; the save of this checkpoint was not finished'
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file}: can't be read: {error.strerror}") from error
    try:
        metadata = pickle.loads(data) if trust else _restricted_loads(data)
    except Exception as error:
        found = re.match(r'refused class (.+)', str(error))
        raise CheckpointError(
            f'{file}: '
            + (
                _refusal(found.group(1), TRUST_HINT)
                if found
                else _missing_code(error)
                or f'not DCP metadata, truncated or damaged ({one_line(error)})'
            )
        ) from error
    if not isinstance(getattr(metadata, 'state_dict_metadata', None), dict) or not isinstance(
        getattr(metadata, 'storage_data', None), dict
    ):
        raise CheckpointError(f'{file}: holds {type(metadata).__name__}, expected DCP metadata')
    for key, entry in metadata.state_dict_metadata.items():
        if not (isinstance(key, str) and _is_entry(entry)):
            raise CheckpointError(f'{file}: not DCP metadata, or damaged (entry {shown(key)})')
    for index, place in metadata.storage_data.items():
        if not _is_place(index, place):
            raise CheckpointError(
                f'{file}: not DCP metadata, or damaged (storage of {shown(index)})'
            )
    _refuse_shared_bytes(file, metadata.storage_data)
    return metadata


def _refuse_shared_bytes(file: Path, storage: dict[MetadataIndex, _StorageInfo]) -> None:
    """Every writer of DCP appends an entry to what its file holds, copies included.

    Names count, not what they lead to: equal files may be links to one.
    """
    files: dict[str, list[tuple[int, int, MetadataIndex]]] = {}
    for index, at in storage.items():
        if at.length:
            files.setdefault(at.relative_path, []).append((at.offset, at.length, index))
    places: dict[str, list[tuple[int, int, MetadataIndex]]] = {}
    for name, found in files.items():
        places.setdefault(os.path.normpath(name), []).extend(found)
    for name, found in places.items():
        found.sort(key=itemgetter(0))
        for (start, length, index), (next_start, _, other) in pairwise(found):
            if next_start < start + length:
                raise CheckpointError(
                    f'{file}: {entry_name(index)} and {entry_name(other)} are stored at the same '
                    f'bytes of {name} (from {next_start} on), expected bytes of their own; the '
                    'metadata is damaged'
                )


def entry_name(index: MetadataIndex) -> str:
    """A stored entry as messages name it: its key, and of a chunk where it begins."""
    return index.fqn if index.offset is None else f'{index.fqn} at {tuple(index.offset)}'


def _is_entry(entry: Any) -> bool:
    """Whether every field that is read of an entry has its type: a pickle can leave any out."""
    if isinstance(entry, BytesStorageMetadata):
        return True
    properties = getattr(entry, 'properties', None)
    chunks = getattr(entry, 'chunks', None)
    return (
        isinstance(entry, TensorStorageMetadata)
        and isinstance(properties, TensorProperties)
        and isinstance(getattr(properties, 'dtype', None), torch.dtype)
        and isinstance(getattr(entry, 'size', None), torch.Size)
        and isinstance(chunks, list)
        and all(
            isinstance(getattr(chunk, name, None), torch.Size)
            for chunk in chunks
            for name in ('offsets', 'sizes')
        )
    )


def _is_place(index: Any, place: Any) -> bool:
    return (
        isinstance(index, MetadataIndex)
        and isinstance(getattr(index, 'fqn', None), str)
        and isinstance(getattr(index, 'offset', None), torch.Size | None)
        and isinstance(place, _StorageInfo)
        and isinstance(getattr(place, 'relative_path', None), str)
        and all(_is_size(getattr(place, name, None)) for name in ('offset', 'length'))
    )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _restricted_loads(data: bytes) -> Any:
    """Unpickle, and refuse a pickle that changes one of the admitted classes."""
    refuse_memory_request(data)
    unpickler = _MetadataUnpickler(io.BytesIO(data))
    try:
        return unpickler.load()
    finally:
        unpickler.restore()


def _restore(cls: type, attributes: dict[str, Any]) -> None:
    now, absent = dict(vars(cls)), object()
    changed = {
        name
        for name in now.keys() | attributes.keys()
        if name not in ('__annotations__', '__weakref__', '__dict__')
        and now.get(name, absent) is not attributes.get(name, absent)
    }
    for name in changed:
        if name in attributes:
            setattr(cls, name, attributes[name])
        else:
            delattr(cls, name)
    if changed:
        raise pickle.UnpicklingError(f'refused class {cls.__name__} with changed attributes')


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
        with torch.serialization.safe_globals(_not_registered([*_NUMPY, *_BYTES])):
            protocol = 2 if trust else _protocol(path)
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
    except pickle.UnpicklingError as error:
        refused = _refused_global(str(error))
        raise CheckpointError(
            f'{name}: '
            + (
                _refusal(refused, trust_hint)
                if refused
                else f'no torch.save file, truncated or damaged ({_cause(error)})'
            )
        ) from error
    except OSError as error:
        raise CheckpointError(f"{name}: can't be read: {error.strerror or error}") from error
    except Exception as error:
        raise CheckpointError(
            f'{name}: '
            + (
                _missing_code(error)
                or f'no torch.save file, truncated or damaged ({_cause(error)})'
            )
        ) from error


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
    if _protocol_of(data) > 2:
        data = as_protocol_2(data)
    unpickler = torch._weights_only_unpickler
    admitted = unpickler._get_allowed_globals().keys() | unpickler._get_user_allowed_globals()
    return sorted(unpickler.get_globals_in_pkl(io.BytesIO(data)) - admitted)


def _protocol(source: str | IO[bytes]) -> int:
    """Pickle protocol of what ``torch.save`` wrote, 1 for 0 too; 2 where it can't be told."""
    data = _pickle_in(source)
    return 2 if data is None else _protocol_of(data)


def _protocol_of(data: bytes) -> int:
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
    registered = torch.serialization.get_safe_globals()
    return [entry for entry in entries if entry not in registered]


_REFUSALS = (
    r'GLOBAL (\S+) (?:was not an allowed global|whose module)',
    r'Can only (?:create new object|build).* but got <class \'(.+?)\'>',
    r'Trying to call reduce for unrecognized function (\S+)',
)


def _refused_global(message: str) -> str | None:
    for pattern in _REFUSALS:
        match = re.search(pattern, message)
        if match:
            return match.group(1)
    return None


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
