"""Objects that a DCP checkpoint stores besides tensors: one reader of common state for all tools.

Nothing of them is run. Classes that Megatron stores and that are of no use to a tool, such as those
of optimizers, are read as stand-ins, wherever they are defined.
"""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Self

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import (
    COMMON,
    COMMON_KEY,
    kind_of,
)
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_overlay.optimizer_classes import is_optimizer_class

from .errors import CheckpointError, one_line
from .paths import COMMON_FILE
from .safe_load import TRUST_HINT, load_torch, unsafe_globals


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes of one entry: ``length`` bytes from ``offset`` of ``file`` (relative, a .distcp)."""

    file: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Where the entry ends in its file."""
        return self.offset + self.length

    @classmethod
    def of(cls, info: _StorageInfo) -> Self:
        return cls(info.relative_path, info.offset, info.length)


class _StandIn:
    """What a class that isn't imported is read as; of the same name, and does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


def stored_file(directory: Path, name: str) -> Path:
    """The file of that name in a checkpoint; one that lies elsewhere is refused."""
    if PurePath(name).is_absolute() or '..' in PurePath(name).parts:
        raise CheckpointError(f'{directory}: file {name} lies outside the checkpoint')
    return directory / name


def check_file(file: Path, size: int) -> None:
    """Refuse a file that is missing or shorter than ``size`` bytes."""
    try:
        found = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f'{file}: {error.strerror or error}') from error
    except ValueError as error:  # characters that no file name has
        raise CheckpointError(f'{file}: {one_line(error)}') from error
    if found < size:
        raise CheckpointError(
            f'{file}: {found} bytes, the metadata says at least {size}; truncated'
        )


def check_files(needed: Iterable[tuple[Path, int]]) -> None:
    """Refuse files that are missing or end before what lies in them.

    Args:
        needed: of each part the file, and where in it the part ends
    """
    ends: dict[Path, int] = {}
    for file, end in needed:
        ends[file] = max(ends.get(file, 0), end)
    for file, end in ends.items():
        check_file(file, end)


def check_stored_files(directory: Path, metadata: Metadata) -> None:
    """Refuse a checkpoint whose files are missing or shorter than its metadata says."""
    slices = list(map(Slice.of, metadata.storage_data.values()))
    paths = {name: stored_file(directory, name) for name in {piece.file for piece in slices}}
    check_files((paths[piece.file], piece.end) for piece in slices)


def tensors_in(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """What is stored as tensors, by key."""
    return {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def common_state_slice(metadata: Metadata) -> Slice | None:
    """Where the common state is stored among the tensors (megatron-core 0.19); None if it isn't."""
    for index, info in metadata.storage_data.items():
        if kind_of(index.fqn) == COMMON:
            return Slice.of(info)
    return None


def read_common_state(
    directory: Path, embedded: Slice | None, *, trust: bool = False, trust_hint: str = TRUST_HINT
) -> dict[str, Any] | None:
    """Common state of a checkpoint, from ``common.pt`` or where it is stored among the tensors.

    Args:
        embedded: that place, see ``common_state_slice``
        trust: unpickle without restriction
        trust_hint: the way out that the message names when a class is refused

    Returns:
        the state dict, optimizers' classes in it as stand-ins; None where there is none

    Raises:
        CheckpointError: missing, damaged, no dict, or holds a class that isn't admitted
    """
    file = directory / COMMON_FILE
    if file.exists():
        name = str(file)
        state = _load(file, name, is_optimizer_class, trust, trust_hint)
    elif embedded is not None:
        name = f'{directory / embedded.file}: {COMMON_KEY}'
        state = read_object(directory, embedded, COMMON_KEY, trust=trust, trust_hint=trust_hint)
    else:
        return None
    if not isinstance(state, dict):
        raise CheckpointError(f'{name}: holds {type(state).__name__}, expected a dict')
    return state


def read_object(
    directory: Path,
    place: Slice,
    key: str,
    *,
    stand_in_for: Callable[[str], bool] = is_optimizer_class,
    trust: bool = False,
    trust_hint: str = TRUST_HINT,
) -> Any:
    """One stored object, read at its place.

    Args:
        key: what error messages call it
        stand_in_for: tells of a class's full name whether it is read as a stand-in

    Raises:
        CheckpointError: as ``read_common_state``
    """
    path = stored_file(directory, place.file)
    check_file(path, place.end)
    try:
        with path.open('rb') as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
    value = _load(content, f'{path}: {key}', stand_in_for, trust, trust_hint)
    # a sharded object is saved as a list
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _load(
    source: Path | io.BytesIO,
    name: str,
    stand_in_for: Callable[[str], bool],
    trust: bool,
    trust_hint: str,
) -> Any:
    try:
        stored = unsafe_globals(source if isinstance(source, io.BytesIO) else str(source))
    except Exception:
        stored = []  # no file that torch.save wrote, as loading it will say
    with torch.serialization.safe_globals(
        [(_stand_in(full), full) for full in stored if stand_in_for(full)]
    ):
        return load_torch(source, trust=trust, name=name, trust_hint=trust_hint)


def _stand_in(name: str) -> type:
    module, _, own = name.rpartition('.')
    return type(own, (_StandIn,), {'__module__': module})
