"""Checkpoint paths: ``iter_XXXXXXX`` directories and ``latest_checkpointed_iteration.txt``.

All of Megatron's formats share this layout: a root that holds one directory per saved iteration
(or ``release/``) and a tracker file that names the one to load.
"""

import os
import re
import stat
from pathlib import Path
from typing import Literal

from megatron_overlay.standalone.dist_checkpointing.key_arguments import LEGACY_WAY_OUT

from .arguments import why_not_local
from .errors import CheckpointError, one_line
from .staging import staging_path

TRACKER_NAME = 'latest_checkpointed_iteration.txt'
CONFIG_NAME = 'metadata.json'
METADATA_NAME = '.metadata'
COMMON_FILE = 'common.pt'
RELEASE = 'release'

_ITER_DIR = re.compile(r'iter_(\d{7}|[1-9]\d{7,})', re.ASCII)
_ITERATION = re.compile(r'\d{1,100}', re.ASCII)


def real_path(path: str | Path) -> Path:
    """The path without symlinks, as far as it exists; one that loops is left as it is."""
    return Path(os.path.realpath(path))


def named_path(path: Path) -> Path:
    """The path, absolute where it doesn't end with the directory's name, as ``.`` and ``..``."""
    return path if path.name not in ('', '..') else Path(os.path.abspath(path))


def refuse_url(path: str | Path) -> None:
    """Raise where a URL is given for a path."""
    reason = why_not_local(path)
    if reason:
        raise CheckpointError(reason)


def refuse_no_directory(path: str | Path) -> None:
    """Raise where there is no directory at a path that is to be read.

    Raises:
        CheckpointError: nothing is there, or a file, or it can't be looked at
    """
    try:
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: doesn't exist") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: can't be read: {one_line(error)}") from error
    if not is_directory:
        raise CheckpointError(f'{path}: is a file, expected a directory')


def iteration_dirname(iteration: int | str) -> str:
    """``iter_0000100`` for 100, ``release`` for ``'release'``."""
    return RELEASE if iteration == RELEASE else f'iter_{int(iteration):07d}'


def parse_iteration_dirname(name: str) -> int | None:
    """The iteration in a directory name such as ``iter_0000100``; None for any other name."""
    match = _ITER_DIR.fullmatch(name)
    return int(match.group(1)) if match else None


def is_rank_dirname(name: str) -> bool:
    """Whether a name is meant for the directory of one rank's file, as legacy checkpoints have."""
    return name.startswith('mp_rank')


def list_iterations(root: str | Path) -> dict[int, Path]:
    """Every ``iter_XXXXXXX`` directory directly under ``root``, by iteration, in rising order.

    Raises:
        CheckpointError: ``root`` is no directory that can be read
    """
    refuse_url(root)
    refuse_no_directory(root)
    try:
        found = {parse_iteration_dirname(entry.name): entry for entry in Path(root).iterdir()}
    except OSError as error:
        raise CheckpointError(f"{root}: can't list checkpoints: {error.strerror}") from error
    return {
        i: found[i] for i in sorted(k for k in found if k is not None) if os.path.isdir(found[i])
    }


def read_tracker(root: str | Path) -> int | Literal['release']:
    """What ``latest_checkpointed_iteration.txt`` in ``root`` names: an iteration or ``'release'``.

    Whitespace around the value (a final newline, CRLF) is allowed, as Megatron allows it; inside
    it is not.

    Raises:
        CheckpointError: the tracker is missing, unreadable, empty or holds anything else
    """
    tracker = Path(root) / TRACKER_NAME
    try:
        text = tracker.read_bytes().decode('utf-8', errors='replace').strip()
    except FileNotFoundError as error:
        raise CheckpointError(f'{tracker}: no such file; {root} is no checkpoint root') from error
    except OSError as error:
        raise CheckpointError(f"{tracker}: can't be read: {error.strerror}") from error
    if text == RELEASE:
        return 'release'
    if _ITERATION.fullmatch(text):
        return int(text)
    found = repr(text if len(text) <= 40 else text[:40] + '…') if text else 'nothing'
    raise CheckpointError(f'{tracker}: holds {found}, expected one integer or `{RELEASE}`')


def tracker_target(root: str | Path) -> Path:
    """The directory that the tracker in ``root`` points at.

    Raises:
        CheckpointError: the tracker is unusable, or the directory it names doesn't exist
    """
    iteration = read_tracker(root)
    target = Path(root) / iteration_dirname(iteration)
    if not os.path.isdir(target):
        raise CheckpointError(
            f'{Path(root) / TRACKER_NAME}: names {iteration}, but {target} is no directory; '
            f'iterations in {root}: {iterations_in(root)}'
        )
    return target


def iteration_dir(root: str | Path, iteration: int | str) -> Path:
    """Directory of one iteration (or ``'release'``) in ``root``.

    Raises:
        CheckpointError: it doesn't exist; the message lists what does
    """
    target = Path(root) / iteration_dirname(iteration)
    if not os.path.isdir(target):
        raise CheckpointError(
            f'{target}: no such directory; iterations in {root}: {iterations_in(root)}'
        )
    return target


def iterations_in(root: str | Path) -> str:
    """The iterations in a root as messages list them, ``release`` included; ``none`` without."""
    known = [*map(str, list_iterations(root))]
    known += [RELEASE] if os.path.isdir(Path(root) / RELEASE) else []
    return ', '.join(known) or 'none'


def refuse_unreachable(target: Path) -> None:
    """Raise where no directory can be made at ``target``, which a dry run should tell too.

    Raises:
        CheckpointError: a name or the whole path is too long, what would be a parent is no
            directory, or it can't be written
    """
    parent = existing_parent(target)
    _refuse_long_names(target, parent)
    refuse_unwritable(target, parent)


def existing_parent(target: Path) -> Path:
    """The directory nearest to ``target`` that exists, itself included.

    Raises:
        CheckpointError: there is something else in its way
    """
    for path in (target, *target.parents):
        try:
            if stat.S_ISDIR(os.stat(path).st_mode):
                return path
        except FileNotFoundError:
            if not os.path.lexists(path):
                continue
        except OSError as error:
            raise CheckpointError(
                f"{target}: can't be written: {error.strerror} ({path})"
            ) from error
        raise CheckpointError(f"{target}: can't be written: {path} is no directory")
    raise CheckpointError(f"{target}: can't be written: {target.anchor} is no directory")


def refuse_unwritable(target: Path, place: Path) -> None:
    """Raise where this process may not write a directory or file, as ``target`` needs."""
    mode = os.W_OK | os.X_OK if os.path.isdir(place) else os.W_OK
    if not os.access(place, mode, effective_ids=os.access in os.supports_effective_ids):
        raise CheckpointError(f"{target}: can't be written: this user may not write {place}")


def _refuse_long_names(target: Path, parent: Path) -> None:
    """Names below a directory that is missing: the file system hasn't looked at them."""
    # what is written lies deeper, and under a longer name until it is published
    deepest = staging_path(target, 'x' * 16) / ('x' * 40)
    if len(os.fsencode(deepest)) >= os.pathconf('/', 'PC_PATH_MAX'):
        raise CheckpointError(f"{target}: can't be written: the path is too long")
    try:
        longest = os.pathconf(parent, 'PC_NAME_MAX')
    except (OSError, ValueError):
        return
    for name in target.relative_to(parent).parts:
        if 0 < longest < len(os.fsencode(name)):
            raise CheckpointError(
                f"{target}: can't be written: File name too long ({len(os.fsencode(name))} bytes, "
                f'at most {longest})'
            )


def refuse_tracker_directory(root: Path) -> None:
    """Raise where a directory is in the way of ``latest_checkpointed_iteration.txt``."""
    tracker = root / TRACKER_NAME
    if os.path.isdir(tracker) and not os.path.islink(tracker):
        raise CheckpointError(f'{tracker}: a directory, expected a file; move it away')


def describe_foreign(directory: Path, expected: str = 'torch_dist') -> str:
    """One clause on what a directory without ``metadata.json`` is, and what was expected."""
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        return f"can't be read: {one_line(error)}"
    missing = f'no {CONFIG_NAME}'
    if any(map(is_rank_dirname, names)):
        return (
            f'{missing}: a legacy `torch` checkpoint (mp_rank_*), expected torch_dist; '
            f'{LEGACY_WAY_OUT}'
        )
    if any(name.endswith('.safetensors') for name in names) or 'config.json' in names:
        return f'{missing}: a Hugging Face checkpoint, expected {expected}'
    if any(parse_iteration_dirname(name) is not None for name in names):
        return f'{missing} and no {TRACKER_NAME}: a root; name one of its iter_* directories'
    if METADATA_NAME in names:
        return (
            f'{missing}: a torch_dcp or fsdp_dtensor checkpoint, or a torch_dist one that is '
            'unfinished because its save was cut short'
        )
    if any(name.endswith('.distcp') for name in names):
        return f'{missing}: an unfinished checkpoint, its save was cut short'
    return f'{missing} and no {TRACKER_NAME}: not a checkpoint'
