"""Where a merged checkpoint comes from, as recorded in its common state."""

import subprocess
from pathlib import Path

IMPLEMENTATION = 'dcp-metadata-same-layout'


def make_provenance(
    *,
    directories: list[Path],
    iterations: list[int | None],
    weights: list[float],
    normalized: bool,
    style: str | None,
    save_dtype: str,
    common_state_source: Path | None,
    extra_state_source: Path,
    balanced: bool,
) -> dict[str, object]:
    """Plain containers, strings and numbers, so that any reader of the common state loads them."""
    return {
        'inputs': [str(directory.absolute()) for directory in directories],
        'iterations': iterations,
        'weights': weights,
        'normalized': normalized,
        'merge_style': style,
        'save_dtype': save_dtype,
        'common_state_source': common_state_source and str(common_state_source.absolute()),
        'extra_state_source': str(extra_state_source.absolute()),
        'implementation': IMPLEMENTATION,
        'balance_rank_work': balanced,
        'git_revision': git_revision(),
    }


def git_revision() -> str | None:
    """Commit of the repository that tracks this file; None where none does."""
    file = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        return subprocess.run(
            ['git', '-C', str(file.parent), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()

    try:
        git('ls-files', '--error-unmatch', file.name)
        return git('rev-parse', 'HEAD')
    except (OSError, subprocess.SubprocessError):
        return None
