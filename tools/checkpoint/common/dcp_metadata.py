"""DCP's ``.metadata``, a plain pickle, read by an unpickler that knows DCP's classes only."""

import importlib
import io
import os
import pickle
import re
from _compat_pickle import IMPORT_MAPPING
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

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
from .paths import METADATA_NAME
from .pickle_scan import refuse_memory_request
from .safe_load import TRUST_HINT, why_not_loaded

_DCP = 'torch.distributed.checkpoint'
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
    'torch': {'Size'},
    'torch.serialization': {'_get_layout'},
    'collections': {'OrderedDict'},
    'builtins': {'object', 'set', 'frozenset'},
    'pathlib': _PATHS,
    'pathlib._local': _PATHS,  # Python 3.13 and later
}
# Subclasses that core 0.14 and 0.15 wrote -> what they add a field or two to.
_CORE = 'megatron.core.dist_checkpointing.strategies.torch'
_OF_CORE = {
    (_CORE, 'MCoreMetadata'): (f'{_DCP}.metadata', 'Metadata'),
    (_CORE, 'MCoreSavePlan'): (f'{_DCP}.planner', 'SavePlan'),
}


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
        module, name = _OF_CORE.get((module, name), (module, name))
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


def load_dcp_metadata(
    directory: Path, *, trust: bool = False, trust_hint: str = TRUST_HINT
) -> Metadata:
    """DCP metadata of a checkpoint.

    Args:
        trust: unpickle without restriction
        trust_hint: the way out that the message names when a class is refused

    Raises:
        CheckpointError: missing, truncated or garbage; holds a class that isn't DCP metadata
            (named in the message), or an entry whose fields aren't of their types
    """
    file = directory / METADATA_NAME
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
        reason = why_not_loaded(error, found and found[1], trust_hint)
        reason = reason or f'not DCP metadata, truncated or damaged ({one_line(error)})'
        raise CheckpointError(f'{file}: {reason}') from error
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
            _is_shape(getattr(chunk, name, None))
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


def _is_shape(value: Any) -> bool:
    """Whether these are offsets or sizes; Megatron-FSDP writes them as plain tuples."""
    if type(value) is tuple:
        return all(map(_is_size, value))
    return isinstance(value, torch.Size)


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
