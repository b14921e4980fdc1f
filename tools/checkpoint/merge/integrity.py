"""SHA-256 manifests (``integrity.json``), in the format of core 0.19 and on any core.

Core hashes on one rank; here the files are shared out over the ranks, since hashing is slower than
merging.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from ..common.errors import CheckpointError, shown
from .ranks import Ranks

MANIFEST = 'integrity.json'
_ALGORITHM = 'sha256'


def read_manifest(directory: Path) -> dict[str, str] | None:
    """File name to hex digest, or None where a checkpoint carries no manifest.

    Raises:
        CheckpointError: the manifest is damaged or of another kind
    """
    file = directory / MANIFEST
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text())
        algorithm, files = content.get('algorithm', _ALGORITHM), dict(content['files'].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f'{file}: no integrity manifest: {shown(error)}') from error
    if algorithm != _ALGORITHM:
        raise CheckpointError(f'{file}: algorithm {shown(algorithm)}, expected {_ALGORITHM!r}')
    for name in files:
        if not name.isprintable() or '/' in name or name in ('', '..'):
            raise CheckpointError(f'{file}: names {shown(name)}, expected a file of the checkpoint')
    return files


def verify_manifests(directories: Sequence[Path] | None, ranks: Ranks) -> None:
    """Check every file of the checkpoints that carry a manifest; collective.

    Args:
        directories: known on rank 0

    Raises:
        CheckpointError: a file is missing, or its digest differs
    """

    def listed() -> list[tuple[Path, str]]:
        return [
            (directory / name, digest)
            for directory in directories or ()
            for name, digest in (read_manifest(directory) or {}).items()
        ]

    files = ranks.scatter_evenly(ranks.agree(listed, root_only=True))

    def check() -> None:
        for path, expected in files:
            found = _digest(path)
            if found != expected:
                raise CheckpointError(
                    f'{path}: SHA-256 {found}, {MANIFEST} says {expected}; the file has changed'
                )

    ranks.agree(check)


def write_manifest(directory: Path, ranks: Ranks) -> None:
    """Hash every file of a checkpoint and write its manifest; collective.

    Raises:
        CheckpointError: a file can't be read, or the manifest not be written
    """

    def listed() -> list[str]:
        return sorted(path.name for path in directory.iterdir() if path.is_file())

    names = ranks.scatter_evenly(ranks.agree(listed, root_only=True))
    own = ranks.agree(lambda: [(name, _digest(directory / name)) for name in names])
    found = ranks.gather(own or [])

    def write() -> None:
        digests = dict(sorted(pair for part in found or [] for pair in part))
        content = {'algorithm': _ALGORITHM, 'files': digests}
        (directory / MANIFEST).write_text(json.dumps(content, indent=2))

    ranks.agree(write, root_only=True)


def _digest(path: Path) -> str:
    try:
        with open(path, 'rb') as file:
            return hashlib.file_digest(file, _ALGORITHM).hexdigest()
    except OSError as error:
        raise CheckpointError(f'{path}: {error.strerror}') from error
