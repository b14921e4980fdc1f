"""What the overlay applies to in branches and tags of Megatron-LM, whatever their version.

    python -m tests.upstream.guard GIT_DIRECTORY REF [REF ...]

prints a table in Markdown. Nothing of a checkout is run: it is asked what ``_guard.py`` asks.
"""

import argparse
import subprocess
import tarfile
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path

import megatron_overlay
from megatron_overlay._guard import left_out


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('repository', metavar='GIT_DIRECTORY')
    parser.add_argument('refs', nargs='+', metavar='REF')
    options = parser.parse_args(argv)
    modules = list(megatron_overlay.finder.files)
    print('| branch or tag | date | calls itself | applies | what is in the way |')
    print('|---|---|---|---|---|')
    for ref in options.refs:
        date = git(options.repository, 'log', '-1', '--format=%cs', ref).decode().strip()
        with tempfile.TemporaryDirectory() as directory:
            unpack(options.repository, ref, directory)
            out = left_out(
                modules, lambda name, path: PathFinder.find_spec(name, path or [directory])
            )
            version = version_in(Path(directory, 'megatron/core/package_info.py'))
        reasons = sorted({reason for reason in out.values() if not reason.startswith('depends ')})
        print(
            f'| {ref} | {date} | {version} | {len(modules) - len(out)} of {len(modules)} '
            f'| {"; ".join(reasons)} |',
            flush=True,
        )


def unpack(repository: str, ref: str, directory: str) -> None:
    """Write the ``megatron`` folder of a commit."""
    archive = Path(directory, 'archive.tar')
    archive.write_bytes(git(repository, 'archive', ref, 'megatron'))
    with tarfile.open(archive) as files:
        files.extractall(directory, filter='data')


def version_in(package_info: Path) -> str:
    """The version in a ``package_info.py``."""
    scope: dict[str, object] = {}
    lines = package_info.read_text(encoding='utf-8').splitlines()
    exec(
        '\n'.join(line for line in lines if line[:5] in ('MAJOR', 'MINOR', 'PATCH', 'PRE_R')), scope
    )
    return '{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}'.format(**scope)


def git(repository: str, *arguments: str) -> bytes:
    """What a git command prints."""
    return subprocess.run(
        ['git', '-C', repository, *arguments], check=True, capture_output=True
    ).stdout


if __name__ == '__main__':
    main()
