"""What the input holds and where, from its metadata and common state; no tensor is read."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import (
    COMMON,
    OPTIMIZER,
    TRAINING,
    is_extra_state,
    kind_of,
)
from megatron_overlay.standalone.dist_checkpointing.checkpoint_layout import (
    CheckpointLayout,
    layout_from_metadata,
)
from megatron_overlay.standalone.dist_checkpointing.load_plan import (
    StoredCheckpoint,
    stored_optimizer_format,
)
from megatron_overlay.standalone.dist_checkpointing.saved_arguments import arguments_in
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ..common.dcp_metadata import load_dcp_metadata
from ..common.errors import CheckpointError, reading
from ..common.paths import METADATA_NAME
from ..common.stored import common_state_slice, read_common_state
from ..merge.common_state import CommonState
from ..merge.source import (
    Content,
    Places,
    Slice,
    TensorEntry,
    check_entries,
    read_config,
    tensor_entry,
)

_FLATTENED_FROM = 'nd_reformulated_orig_global_shape'


@dataclass
class Checkpoint(Content):
    """The content of one checkpoint.

    Attributes:
        common: its common state
        format: of the optimizer's state, as ``stored_optimizer_format`` names it
        optimizer: the optimizer's tensors by FQN
        optimizer_objects: its other entries
        weights: the model's tensors by FQN
        copied: all that isn't the optimizer's, as it is taken over; weights among it
        layout: of the model, as the keys tell
    """

    common: CommonState
    format: str = ''
    optimizer: dict[str, TensorEntry] = field(default_factory=dict)
    optimizer_objects: dict[str, Slice] = field(default_factory=dict)
    weights: dict[str, TensorEntry] = field(default_factory=dict)
    copied: dict[str, TensorEntry | Slice] = field(default_factory=dict)
    layout: CheckpointLayout | None = None

    @property
    def args(self) -> object:
        """Saved arguments; an object without any where there are none."""
        return arguments_in(self.common.state)

    def flattened_from(self, key: str) -> object:
        """Shape that core recorded of a tensor whose shards it flattened; None where it didn't."""
        record = self.reshaped.get(key)
        return record.get(_FLATTENED_FROM) if isinstance(record, Mapping) else None


def read_checkpoint(directory: Path, *, trust: bool = False) -> Checkpoint:
    """Read one checkpoint's metadata and common state.

    Raises:
        CheckpointError: another format than ``torch_dist``, damaged, or a file is too short
    """
    config = read_config(directory)
    metadata = load_dcp_metadata(directory, trust=trust)
    state = read_common_state(directory, common_state_slice(metadata), trust=trust)
    if state is None:
        raise CheckpointError(f'{directory}: no common state, expected one of a training run')
    checkpoint = Checkpoint(directory, config, CommonState(state, directory))
    with reading(directory / METADATA_NAME, 'metadata of torch_dist'):  # fields of any type
        checkpoint.layout = layout_from_metadata(metadata)
        checkpoint.format = stored_optimizer_format(StoredCheckpoint(checkpoint.layout, state))
        _take_entries(checkpoint, metadata)
    parts = (checkpoint.copied, checkpoint.optimizer, checkpoint.optimizer_objects)
    check_entries(directory, itertools.chain.from_iterable(part.values() for part in parts))
    return checkpoint


def _take_entries(checkpoint: Checkpoint, metadata: Metadata) -> None:
    places = Places(checkpoint.directory, metadata)
    for key, entry in metadata.state_dict_metadata.items():
        kind = kind_of(key)
        if kind == COMMON:
            continue
        of_optimizer = kind == OPTIMIZER
        if isinstance(entry, TensorStorageMetadata):
            tensor = tensor_entry(key, entry, places)
            if of_optimizer:
                checkpoint.optimizer[key] = tensor
                continue
            checkpoint.copied[key] = tensor
            if kind not in TRAINING and not is_extra_state(key):
                checkpoint.weights[key] = tensor
        else:
            piece = places.slice(MetadataIndex(key))
            (checkpoint.optimizer_objects if of_optimizer else checkpoint.copied)[key] = piece
    checkpoint.reshaped = dict(getattr(metadata, 'mcore_data', None) or {})
