"""Which checkpoint a path means, and in which format it is."""

import re
from pathlib import Path

from torch.distributed.checkpoint import Metadata

from ..common.errors import CheckpointError
from ..common.paths import CONFIG_NAME, TRACKER_NAME, describe_foreign, refuse_url, tracker_target
from ..common.safe_load import METADATA_NAME
from ..common.stored import COMMON_FILE
from ..merge.source import FORMAT, read_config

LEGACY, DISTRIBUTED, FSDP, DCP = 'torch', FORMAT, 'fsdp_dtensor', 'torch_dcp'


def locate(path: str | Path) -> tuple[Path, str]:
    """The directory of one iteration, and its format.

    Args:
        path: that directory, or a root with a tracker

    Returns:
        directory and format; ``torch_dcp`` stands for every format of DCP without
        ``metadata.json``, which only the keys tell apart

    Raises:
        CheckpointError: no checkpoint there; the message says what was found instead
    """
    refuse_url(path)
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            f'{path}: ' + ('is a file, expected a directory' if path.exists() else "doesn't exist")
        )
    if not (path / CONFIG_NAME).exists() and (path / TRACKER_NAME).exists():
        path = tracker_target(path)
    names = {entry.name for entry in path.iterdir()}
    if CONFIG_NAME in names:
        read_config(path)
        return path, DISTRIBUTED
    if any(name.startswith('mp_rank_') for name in names):
        return path, LEGACY
    if METADATA_NAME in names:
        return path, DCP
    raise CheckpointError(f'{path}: {describe_foreign(path)}')


def dcp_format(directory: Path, metadata: Metadata) -> str:
    """The format of a DCP checkpoint without ``metadata.json``.

    Raises:
        CheckpointError: it is one of ``torch_dist`` that wasn't finished
    """
    keys = metadata.state_dict_metadata
    if any(re.match(r'model\d*\.module\.', key) for key in keys):
        return FSDP
    embedded = any(key.startswith('common_state/') for key in keys)
    if (
        embedded
        or (directory / COMMON_FILE).exists()
        or not any(re.match(r'model\d*\.', key) for key in keys)
    ):
        raise CheckpointError(
            f'{directory}: no {CONFIG_NAME}: an unfinished checkpoint, its save was cut short'
        )
    return DCP
