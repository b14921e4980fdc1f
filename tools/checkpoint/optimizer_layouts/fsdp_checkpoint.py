"""What an ``fsdp_dtensor`` checkpoint holds and where, from its metadata and small objects.

DCP flattened the state dict: ``model.module.<parameter>``, ``optimizer.state.module.….<parameter>.
exp_avg``, ``optimizer.param_to_group_meta.module.….<parameter>.lr``, and one entry for each object
of what other formats keep as common state.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import (
    MODEL,
    OPTIMIZER,
    RNG,
    kind_of,
    parse_key,
)
from megatron_overlay.standalone.dist_checkpointing.checkpoint_layout import layout_from_metadata
from megatron_overlay.standalone.dist_checkpointing.format_names import FSDP_DTENSOR, TORCH_DIST
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ..common.dcp_metadata import load_dcp_metadata
from ..common.errors import CheckpointError, reading
from ..common.paths import METADATA_NAME
from ..common.stored import read_object
from ..merge.common_state import CommonState
from ..merge.source import Places, Slice, TensorEntry, tensor_entry
from .checkpoint import Checkpoint, check_entries

_COMMON = re.compile(r'(?:(opt_param_scheduler)\.)?([^.]+)')
STATES = ('exp_avg', 'exp_avg_sq')
STEP = 'step'


@dataclass
class FsdpCheckpoint(Checkpoint):
    """The content of an ``fsdp_dtensor`` checkpoint; weights by their modules' names.

    Attributes:
        states: by parameter's name the moments, and the step where it is stored with them
        settings: by parameter's name the places of its group's settings
        random: random state, by key
    """

    states: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)
    settings: dict[str, dict[str, Slice]] = field(default_factory=dict)
    random: dict[str, TensorEntry | Slice] = field(default_factory=dict)


def read_fsdp_checkpoint(directory: Path, *, trust: bool = False) -> FsdpCheckpoint:
    """Read one checkpoint's metadata and common state.

    Raises:
        CheckpointError: damaged, or it holds what isn't known
    """
    metadata = load_dcp_metadata(directory, trust=trust)
    checkpoint = FsdpCheckpoint(
        directory,
        {'sharded_backend': TORCH_DIST, 'sharded_backend_version': 1},
        CommonState({}, directory),
        format=FSDP_DTENSOR,
    )
    common: dict[str, Slice] = {}
    with reading(directory / METADATA_NAME, 'metadata of fsdp_dtensor'):  # fields of any type
        checkpoint.layout = layout_from_metadata(metadata)
        _take_entries(checkpoint, metadata, common)
    check_entries(
        directory,
        [
            *checkpoint.weights.values(),
            *(entry for entries in checkpoint.states.values() for entry in entries.values()),
            *(piece for pieces in checkpoint.settings.values() for piece in pieces.values()),
            *checkpoint.random.values(),
            *common.values(),
        ],
    )
    for key, piece in common.items():
        scope, _, name = key.rpartition('.')
        state = checkpoint.common.state
        inner: dict[str, Any] = state.setdefault(scope, {}) if scope else state
        inner[name] = read_object(directory, piece, key, trust=trust)
    return checkpoint


def _take_entries(checkpoint: FsdpCheckpoint, metadata: Metadata, common: dict[str, Slice]) -> None:
    places = Places(checkpoint.directory, metadata)
    for key, entry in metadata.state_dict_metadata.items():
        taken: TensorEntry | Slice
        if isinstance(entry, TensorStorageMetadata):
            taken = tensor_entry(key, entry, places)
        elif isinstance(entry, BytesStorageMetadata):
            taken = places.slice(MetadataIndex(key))
        else:
            raise CheckpointError(
                f'{checkpoint.directory}: {key}: {type(entry).__name__}, expected an entry'
            )
        if not _take(checkpoint, key, taken, common):
            what = 'a tensor' if isinstance(taken, TensorEntry) else 'an object'
            raise CheckpointError(
                f'{checkpoint.directory}: {key}: {what} that a run with Megatron-FSDP does not '
                'store; what it is in torch_dist is not known here'
            )


def _take(
    checkpoint: FsdpCheckpoint, key: str, taken: TensorEntry | Slice, common: dict[str, Slice]
) -> bool:
    """Put an entry where it belongs; False where that isn't known."""
    kind, parsed = kind_of(key), parse_key(key)
    if kind == OPTIMIZER:
        name, _, last = parsed.name.rpartition('.')
        of_group = '.param_to_group_meta.' in parsed.prefix
        if isinstance(taken, TensorEntry) and not of_group and last in (*STATES, STEP):
            _once(checkpoint, key, checkpoint.states.setdefault(name, {}), last, taken)
        elif isinstance(taken, Slice) and of_group:
            _once(checkpoint, key, checkpoint.settings.setdefault(name, {}), last, taken)
        else:
            return False
    elif kind == MODEL:
        if not isinstance(taken, TensorEntry) or not parsed.prefix.startswith('model.'):
            return False
        _once(checkpoint, key, checkpoint.weights, parsed.name, taken)
    elif kind == RNG:
        checkpoint.random[key] = taken
    elif _COMMON.fullmatch(key) and isinstance(taken, Slice):
        common[key] = taken
    else:
        return False
    return True


def _once(checkpoint: Checkpoint, key: str, taken: dict[str, Any], name: str, entry: Any) -> None:
    if name in taken:
        raise CheckpointError(
            f'{checkpoint.directory}: {key}: {parse_key(key).name} is stored under several '
            'prefixes, and only one can be meant'
        )
    taken[name] = entry
