"""What a ``torch_dist`` checkpoint holds and where, from its DCP metadata alone."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import (
    COMMON,
    MODEL,
    TRAINING,
    is_extra_state,
    kind_of,
)
from megatron_overlay.standalone.dist_checkpointing.format_names import TORCH_DIST
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ..common.dcp_metadata import entry_name, load_dcp_metadata
from ..common.errors import CheckpointError, one_line, reading, shown, some
from ..common.paths import COMMON_FILE, CONFIG_NAME, METADATA_NAME
from ..common.stored import COMMON_KEY, Slice, check_files, stored_file
from ..common.tensors import dtype_name
from .geometry import Box, tiling_fault

FLOAT8_DTYPES = {torch.float8_e4m3fn, torch.float8_e5m2}
_AVERAGED_DTYPES = {torch.bfloat16, torch.float16, torch.float32, torch.float64} | FLOAT8_DTYPES


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One global tensor: shape, dtype, and the bytes of each chunk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: dict[Box, Slice]

    @property
    def layout(self) -> frozenset[Box]:
        """The chunks as a set: their order means nothing."""
        return frozenset(self.chunks)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk as one checkpoint stores it."""

    path: Path
    piece: Slice
    box: Box
    dtype: torch.dtype


@dataclass
class Content:
    """What a checkpoint holds.

    Attributes:
        directory: checkpoint directory
        config: what ``metadata.json`` says
        reshaped: core's record of tensors stored under another global shape (core 0.14)
    """

    directory: Path
    config: dict[str, object]
    reshaped: dict[str, object] = field(default_factory=dict, kw_only=True)
    _files: dict[str, Path] = field(default_factory=dict, repr=False, kw_only=True)

    def file(self, name: str) -> Path:
        """The file of a slice; one object for each, of which a plan has many."""
        if name not in self._files:
            self._files[name] = self.directory / name
        return self._files[name]


def stored_chunk(content: Content, entry: TensorEntry, box: Box) -> StoredChunk:
    """A chunk of a stored tensor as a plan refers to it."""
    piece = entry.chunks[box]
    return StoredChunk(content.file(piece.file), piece, box, entry.dtype)


@dataclass
class Source(Content):
    """The mergeable content of one checkpoint.

    Attributes:
        tensors: floating model tensors by FQN
        extra_states: entries ``…_extra_state`` by FQN, as they stand in the metadata: bytes, or
            tensors of any dtype
        embedded_common: bytes of the common state stored as a DCP entry, if any
        left_out: training state that ``model_only`` leaves unread
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    extra_states: dict[str, Slice | TensorEntry] = field(default_factory=dict)
    embedded_common: Slice | None = None
    left_out: list[str] = field(default_factory=list)

    @property
    def tensor_config(self) -> dict[str, object]:
        """What ``metadata.json`` says of tensors.

        Of common state core 0.18 records the form there, 0.19 no longer does, and the checkpoint
        itself shows it.
        """
        return {key: self.config[key] for key in self.config if not key.startswith('common_')}


def read_source(directory: Path, *, model_only: bool = False, trust: bool = False) -> Source:
    """Read and check one checkpoint's metadata; no tensor is read.

    Args:
        directory: checkpoint directory
        model_only: leave training state (optimizer, RNG) unread instead of refusing it
        trust: unpickle ``.metadata`` without restriction

    Raises:
        CheckpointError: another format, or content that can't be merged; see the contract's list
    """
    source = Source(directory, read_config(directory))
    metadata = load_dcp_metadata(directory, trust=trust)
    with reading(directory / METADATA_NAME, 'metadata of torch_dist'):  # fields of any type
        _take_entries(source, metadata, model_only)
    common = [] if source.embedded_common is None else [source.embedded_common]
    check_entries(directory, [*source.tensors.values(), *source.extra_states.values(), *common])
    return source


def check_entries(directory: Path, entries: Iterable[TensorEntry | Slice]) -> None:
    """Refuse entries whose file is missing or ends before they do."""
    file = cache(directory.joinpath)
    check_files(
        (file(piece.file), piece.end)
        for entry in entries
        for piece in (entry.chunks.values() if isinstance(entry, TensorEntry) else (entry,))
    )


def _take_entries(source: Source, metadata: Metadata, model_only: bool) -> None:
    places = Places(source.directory, metadata)
    foreign: list[str] = []
    for key, entry in metadata.state_dict_metadata.items():
        kind = kind_of(key)
        if kind in TRAINING:
            source.left_out.append(key)
        elif kind == COMMON:
            _take_common(source, key, entry, places)
        elif kind != MODEL:
            foreign.append(key)
        elif isinstance(entry, TensorStorageMetadata):
            taken = tensor_entry(key, entry, places)
            if is_extra_state(key):
                source.extra_states[key] = taken
            else:
                _check_averaged(source.directory, key, taken.dtype)
                source.tensors[key] = taken
        elif is_extra_state(key):
            source.extra_states[key] = places.slice(MetadataIndex(key))
        else:
            raise CheckpointError(
                f'{source.directory}: {key}: bytes, expected a tensor or the bytes of an '
                '_extra_state'
            )
    _refuse_foreign(source, foreign, model_only)
    if source.embedded_common is not None and (source.directory / COMMON_FILE).exists():
        raise CheckpointError(
            f'{source.directory}: common state both in {COMMON_FILE} and as {COMMON_KEY}, expected '
            'one; remove the one that is stale'
        )
    if not source.tensors:
        raise CheckpointError(
            f'{source.directory}: no model tensors; keys start with none of '
            'model., decoder., embedding., output_layer., mtp.'
        )
    reshaped = getattr(metadata, 'mcore_data', None) or {}
    source.reshaped = {key: reshaped[key] for key in source.tensors if key in reshaped}


def read_config(directory: Path) -> dict[str, object]:
    """What ``metadata.json`` says.

    Raises:
        CheckpointError: missing, no JSON object, or another format than ``torch_dist``, version 1
    """
    file = directory / CONFIG_NAME
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f'{file}: no such file; the save was not finished') from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f'{file}: no readable JSON: {one_line(error)}') from error
    found = config.get('sharded_backend') if isinstance(config, dict) else None
    if found != TORCH_DIST:
        raise CheckpointError(f'{file}: format {shown(found)}, expected {TORCH_DIST!r}')
    version = config.get('sharded_backend_version', 1)
    if isinstance(version, bool) or version != 1:
        raise CheckpointError(
            f'{file}: sharded_backend_version {shown(version)}, expected 1; what another one means '
            'is not known here'
        )
    return config


def _take_common(source: Source, key: str, entry: object, places: 'Places') -> None:
    kind = 'bytes' if isinstance(entry, BytesStorageMetadata) else 'a tensor'
    if (key, kind) != (COMMON_KEY, 'bytes'):
        raise CheckpointError(
            f'{source.directory}: common state stored as {key} ({kind}), expected one '
            f'byte entry {COMMON_KEY}'
        )
    source.embedded_common = places.slice(MetadataIndex(key))


def _check_averaged(directory: Path, key: str, dtype: torch.dtype) -> None:
    if dtype not in _AVERAGED_DTYPES:
        raise CheckpointError(
            f"{directory}: {key}: dtype {dtype_name(dtype)} can't be averaged, expected one of "
            + ', '.join(sorted(map(dtype_name, _AVERAGED_DTYPES)))
        )


def tensor_entry(key: str, entry: TensorStorageMetadata, places: 'Places') -> TensorEntry:
    """A stored tensor with its chunks.

    Raises:
        CheckpointError: they don't tile it, or one isn't stored
    """
    directory = places.directory
    dtype, shape = entry.properties.dtype, tuple(entry.size)
    chunks: dict[Box, Slice] = {}
    for chunk in entry.chunks:
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if box in chunks:
            raise CheckpointError(f'{directory}: {key}: chunk at {box.offsets} stored twice')
        piece = places.slice(MetadataIndex(key, chunk.offsets))
        if piece.length < box.numel * dtype.itemsize:
            raise CheckpointError(
                f'{directory}: {key} at {box.offsets}: {piece.length} bytes are stored, fewer than '
                f'{box.numel} elements of {dtype_name(dtype)} take; the metadata is damaged'
            )
        chunks[box] = piece
    fault = tiling_fault(shape, list(chunks))
    if fault:
        raise CheckpointError(f'{directory}: {key}: {fault}')
    return TensorEntry(shape, dtype, chunks)


class Places:
    """Where a checkpoint's metadata says that its entries are stored."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        self.directory = directory
        self._storage = metadata.storage_data
        self._names: dict[str, str] = {}

    def slice(self, index: MetadataIndex) -> Slice:
        """The bytes of an entry.

        Raises:
            CheckpointError: there are none, they lie outside the checkpoint, or are transformed
        """
        info = self._storage.get(index)
        if info is None:
            raise CheckpointError(
                f'{self.directory / METADATA_NAME}: no storage for {entry_name(index)}'
            )
        name = self._names.get(info.relative_path)
        if name is None:
            file = stored_file(self.directory, info.relative_path)
            name = str(file.relative_to(self.directory))
            self._names[info.relative_path] = name
        if getattr(info, 'transform_descriptors', None):
            raise CheckpointError(
                f'{self.directory}: {entry_name(index)}: stored through '
                f'{info.transform_descriptors}, expected plain'
            )
        return Slice(name, info.offset, info.length)


def _refuse_foreign(source: Source, foreign: list[str], model_only: bool) -> None:
    if foreign:
        raise CheckpointError(
            f'{source.directory}: {some(foreign)}: outside the model (model., model<N>., '
            "decoder., embedding., output_layer., mtp.) and no training state; can't be merged"
        )
    if source.left_out and not model_only:
        raise CheckpointError(
            f'{source.directory}: holds training state ({some(source.left_out)}), as an ordinary '
            "training checkpoint does; optimizer and RNG state can't be averaged: pass "
            '--model-only to leave them unread'
        )
