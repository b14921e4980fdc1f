"""Which checkpoint a path means, in which format, and what ``--load`` makes of it.

``--load PATH`` looks for a tracker in PATH and for nothing else: given one iteration's directory it
finds none, and the run starts from random weights.
"""

import os
import re
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CheckpointError, one_line
from .exchange import UNPUBLISHED
from .paths import (
    COMMON_FILE,
    CONFIG_NAME,
    METADATA_NAME,
    RELEASE,
    TRACKER_NAME,
    describe_foreign,
    parse_iteration_dirname,
    read_tracker,
    real_path,
    refuse_url,
    tracker_target,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata

LEGACY, DISTRIBUTED, FSDP, DCP = 'torch', 'torch_dist', 'fsdp_dtensor', 'torch_dcp'


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that was finished, as far as its files tell.

    Attributes:
        directory: of the iteration.
        format: as ``--ckpt-format`` names it.
        metadata: of a checkpoint that DCP wrote; None for a legacy one.
        load: arguments with which a run loads it; empty where none do.
        given_to_load: the path that was looked at is what ``--load`` takes.
    """

    directory: Path
    format: str
    metadata: 'Metadata | None'
    load: str
    given_to_load: bool

    @property
    def release(self) -> bool:
        """Whether a run takes nothing but the weights."""
        return self.directory.name == RELEASE


def find_checkpoint(path: str | Path) -> FoundCheckpoint:
    """The checkpoint that ``--load path`` loads, or the one that ``path`` itself is.

    Raises:
        CheckpointError: there is none, or one that was not finished; the message says what was
            found instead.
    """
    refuse_url(path)
    path = Path(path)
    try:
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: doesn't exist") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: can't be read: {one_line(error)}") from error
    if not is_directory:
        raise CheckpointError(f'{path}: is a file, expected a directory')
    given_to_load = os.path.isfile(path / TRACKER_NAME)
    directory = tracker_target(path) if given_to_load else path
    format_, metadata = _format(directory)
    load = f'--load {shlex.quote(str(path))}' if given_to_load else _way_in(directory)
    return FoundCheckpoint(directory, format_, metadata, load, given_to_load)


def _format(directory: Path) -> 'tuple[str, Metadata | None]':
    # In the order in which megatron looks.
    try:
        names = {entry.name for entry in directory.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{directory}: can't be read: {one_line(error)}") from error
    if UNPUBLISHED in names:
        raise CheckpointError(
            f'{directory}: marked {UNPUBLISHED}: one side of a conversion that was killed before '
            'the other was in place; run that conversion again'
        )
    if CONFIG_NAME not in names and any(name.startswith('mp_rank_') for name in names):
        return LEGACY, None
    # Half a second, which legacy checkpoints needn't take.
    from megatron_overlay.standalone.dist_checkpointing.checkpoint_layout import is_of_fsdp

    from .dcp_metadata import load_dcp_metadata

    if CONFIG_NAME in names:
        return DISTRIBUTED, load_dcp_metadata(directory)
    if METADATA_NAME not in names:
        raise CheckpointError(
            f'{directory}: {describe_foreign(directory, "one that Megatron saved")}'
        )
    metadata = load_dcp_metadata(directory)
    keys = metadata.state_dict_metadata
    if is_of_fsdp(keys):
        return FSDP, metadata
    embedded = any(key.startswith('common_state/') for key in keys)
    if embedded or COMMON_FILE in names or not any(re.match(r'model\d*\.', key) for key in keys):
        raise CheckpointError(
            f'{directory}: no {CONFIG_NAME}: an unfinished checkpoint, its save was cut short'
        )
    return DCP, metadata


def _way_in(directory: Path) -> str:
    """Arguments that load the iteration in ``directory``; empty where there are none."""
    directory = real_path(directory)
    root, iteration = directory.parent, parse_iteration_dirname(directory.name)
    load = f'--load {shlex.quote(str(root))}'
    try:
        latest = read_tracker(root)
    except CheckpointError:
        latest = None
    if latest is not None and latest == (RELEASE if directory.name == RELEASE else iteration):
        return load
    # A tracker that says `release` counts for more than the step does, and step 0 for none.
    return f'{load} --ckpt-step {iteration}' if iteration and latest != RELEASE else ''
