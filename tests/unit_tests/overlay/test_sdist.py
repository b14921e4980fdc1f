"""The source distribution is the repository: what tests, documents and benchmarks need included."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.unit_tests.overlay.conftest import REPOSITORY

BUILD = 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])'


@pytest.fixture(scope='module')
def tracked():
    """Files under version control, present in the working tree."""
    listed = subprocess.run(
        ['git', 'ls-files', '-z'], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip(f'no checkout, as an unpacked source distribution: {listed.stderr.strip()}')
    return {name for name in listed.stdout.split('\0') if name and (REPOSITORY / name).exists()}


def test_sdist_holds_every_file_under_version_control(tracked, tmp_path):
    sources = tmp_path / 'sources'
    for name in tracked:
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_bytes((REPOSITORY / name).read_bytes())
    (sources / 'tools/checkpoint/__pycache__').mkdir()
    (sources / 'tools/checkpoint/__pycache__/x.pyc').write_bytes(b'')
    subprocess.run(
        [sys.executable, '-c', BUILD, tmp_path], cwd=sources, check=True, capture_output=True
    )
    (built,) = tmp_path.glob('*.tar.gz')
    with tarfile.open(built) as archive:
        found = {str(Path(*Path(member.name).parts[1:])) for member in archive if member.isfile()}
    made = {name for name in found if '.egg-info' in name or name in ('PKG-INFO', 'setup.cfg')}
    assert found - made == tracked
