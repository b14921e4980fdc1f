"""Where an output goes, and what keeps it from there."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from ..common.errors import CheckpointError
from ..common.paths import (
    TRACKER_NAME,
    existing_parent,
    iteration_dirname,
    parse_iteration_dirname,
    read_tracker,
    real_path,
    refuse_tracker_directory,
    refuse_unreachable,
    refuse_url,
)
from ..common.progress import format_bytes
from ..common.publish import recover, refuse_existing


def output_target(output_dir: Path, iteration: int | None) -> tuple[Path, dict[Path, str]]:
    """The directory that is written, ``output_dir`` or its ``iter_XXXXXXX``, and its tracker.

    Returns:
        the directory, and the tracker's root and text; none without iteration

    Raises:
        CheckpointError: a URL, or the directory of another iteration
    """
    refuse_url(output_dir)
    target = output_dir.absolute()
    if iteration is None:
        return target, {}
    if iteration < 0:
        raise CheckpointError(f'--output-iteration {iteration}: expected 0 or more')
    name = iteration_dirname(iteration)
    if target.name != name:
        if parse_iteration_dirname(target.name) is not None:
            raise CheckpointError(
                f'{target}: the directory of another iteration, expected {name} or a root'
            )
        target /= name
    return target, {target.parent: str(iteration)}


def refuse_target(
    target: Path,
    trackers: Mapping[Path, str],
    dry_run: bool,
    given: str = '--output-iteration',
    way_out: str = 'give another --merge-output',
) -> None:
    """Raise where no output can be made, or its tracker names a later iteration.

    Training that resumes there would silently start from the earlier one. A tracker that says
    nothing (missing, damaged, ``release``) is replaced. What a killed run left is put in order.

    Args:
        trackers: root and text, see ``output_target``
        given, way_out: what the message calls the iteration, and what it says to do
    """
    refuse_existing(target, not dry_run and recover([target], trackers))
    refuse_unreachable(target)
    for root, iteration in trackers.items():
        refuse_tracker_directory(root)
        try:
            found = read_tracker(root)
        except CheckpointError:
            continue
        if isinstance(found, int) and found > int(iteration):
            raise CheckpointError(
                f'{root / TRACKER_NAME}: names {found}, later than {given} {iteration}, '
                f'which it would name instead; {way_out}'
            )


def refuse_inside(target: Path, read_from: Mapping[Path, str]) -> None:
    """Raise where the output lies in a checkpoint that is read, by what that is called."""
    for directory, name in read_from.items():
        if real_path(target).is_relative_to(real_path(directory)):
            raise CheckpointError(f'{target}: lies inside {name}')


def space_warnings(target: Path, content_bytes: int) -> list[str]:
    """What to say where that much doesn't seem to fit."""
    try:
        disk = shutil.disk_usage(existing_parent(target))
    except OSError:
        return []
    # some file systems don't say, and some compress
    if not disk.total or disk.free >= content_bytes:
        return []
    return [
        f'{format_bytes(content_bytes)} are to be written to {target}, where '
        f'{format_bytes(disk.free)} are free'
    ]
