"""Which checkpoint a path means, in which format, and what ``--load`` makes of it.

``--load PATH`` looks for a tracker in PATH and for nothing else: given one iteration's directory it
finds none, and the run starts from random weights.
"""

import os
import shlex
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import (
    COMMON,
    is_of_fsdp,
    kind_of,
    parse_key,
)
from megatron_overlay.standalone.dist_checkpointing.format_names import (
    FSDP_DTENSOR,
    LEGACY,
    TORCH_DCP,
    TORCH_DIST,
)

from .errors import CheckpointError, one_line
from .exchange import UNPUBLISHED
from .paths import (
    COMMON_FILE,
    CONFIG_NAME,
    METADATA_NAME,
    RELEASE,
    TRACKER_NAME,
    describe_foreign,
    is_rank_dirname,
    iteration_dir,
    named_path,
    parse_iteration_dirname,
    read_tracker,
    real_path,
    refuse_no_directory,
    refuse_url,
    tracker_target,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that was finished, as far as its files tell.

    Attributes:
        directory: of the iteration.
        format: as ``--ckpt-format`` names it.
        load: arguments with which a run loads it; empty where none do.
        given_to_load: the path that was looked at is what ``--load`` takes.
    """

    directory: Path
    format: str
    load: str
    given_to_load: bool
    _metadata: 'Metadata | None' = field(repr=False)

    @cached_property
    def metadata(self) -> 'Metadata':
        """Of a checkpoint that DCP wrote, which no legacy one is.

        Raises:
            CheckpointError: it can't be read
        """
        return self._metadata or _read_metadata(self.directory)

    @property
    def release(self) -> bool:
        """Whether a run takes nothing but the weights."""
        return self.directory.name == RELEASE


def find_checkpoint(path: str | Path, step: int | None = None) -> FoundCheckpoint:
    """The checkpoint that ``--load path`` loads, or the one that ``path`` itself is.

    Args:
        path: of either
        step: of ``--ckpt-step``; 0 and None choose none

    Raises:
        CheckpointError: there is none, or one that was not finished; the message says what was
            found instead.
    """
    refuse_url(path)
    path = Path(path)
    refuse_no_directory(path)
    has_tracker = os.path.isfile(path / TRACKER_NAME)
    given_to_load = has_tracker or bool(step)
    # A tracker that says `release` counts for more than the step does.
    if step and not (has_tracker and read_tracker(path) == RELEASE):
        directory = iteration_dir(path, step)
    else:
        directory = tracker_target(path) if has_tracker else named_path(path)
    format_, metadata = _format(directory)
    chosen = f' --ckpt-step {step}' if step else ''
    load = f'--load {shlex.quote(str(path))}{chosen}' if given_to_load else _way_in(directory)
    return FoundCheckpoint(directory, format_, load, given_to_load, metadata)


def resolve_checkpoint(path: str | Path) -> Path:
    """Directory of the ``torch_dist`` checkpoint that ``path`` is, or that its tracker names.

    Raises:
        CheckpointError: there is none; the message says what was found instead
    """
    return find_checkpoint_of(path, TORCH_DIST).directory


def find_checkpoint_of(path: str | Path, *formats: str) -> FoundCheckpoint:
    """The same of any of these formats.

    Raises:
        CheckpointError: as above
    """
    found = find_checkpoint(path)
    if found.format not in formats:
        raise CheckpointError(f'{found.directory}: {describe_foreign(found.directory)}')
    return found


def _format(directory: Path) -> 'tuple[str, Metadata | None]':
    """The format, and the metadata where that had to be read to tell."""
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
    if CONFIG_NAME in names:
        return TORCH_DIST, None
    if any(map(is_rank_dirname, names)):
        return LEGACY, None
    if METADATA_NAME not in names:
        raise CheckpointError(
            f'{directory}: {describe_foreign(directory, "one that Megatron saved")}'
        )
    metadata = _read_metadata(directory)
    keys = metadata.state_dict_metadata
    if is_of_fsdp(keys):
        return FSDP_DTENSOR, metadata
    wrappers = {parse_key(key).prefix for key in keys if key.startswith('model')}
    embedded = any(kind_of(key) == COMMON for key in keys)
    if embedded or COMMON_FILE in names or not any(wrappers):
        raise CheckpointError(
            f'{directory}: no {CONFIG_NAME}: an unfinished checkpoint, its save was cut short'
        )
    return TORCH_DCP, metadata


def _read_metadata(directory: Path) -> 'Metadata':
    # half a second, which not all need
    from .dcp_metadata import load_dcp_metadata
    from .safe_load import NOTHING_RUNS

    return load_dcp_metadata(directory, trust_hint=NOTHING_RUNS)


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
    # Step 0 chooses none.
    return f'{load} --ckpt-step {iteration}' if iteration and latest != RELEASE else ''
