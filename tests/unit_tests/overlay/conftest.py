"""Throw-away virtual environments with the real megatron-core, made without a network.

Each takes torch and all else from the running environment, by links that come after its own
site-packages; megatron-core and the overlay's wheel are its own.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_overlay._finder import core_version

REPOSITORY = Path(__file__).resolve().parents[3]
WHEEL_SOURCES = ['megatron', 'megatron_overlay', 'tools', 'setup.py', 'pyproject.toml', 'README.md']
WHEEL_SOURCES += ['LICENSE']


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / 'bin' / 'python'

    @property
    def site_packages(self) -> Path:
        return self.root / 'lib' / f'python{sysconfig.get_python_version()}' / 'site-packages'

    def run(self, *arguments, path=None, **variables) -> subprocess.CompletedProcess:
        """``python arguments``, in an environment without this process's Python settings.

        Args:
            arguments: of the interpreter, or the path of a console command first.
            path: PYTHONPATH.
            variables: more of the environment.
        """
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(('PYTHON', 'MEGATRON', 'CPU_MEGATRON', 'COV_'))
        }
        if path is not None:
            clean['PYTHONPATH'] = str(path)
        command = [str(argument) for argument in (self.python, *arguments)]
        return subprocess.run(
            command,
            env=clean | variables,
            cwd=self.root,
            text=True,
            capture_output=True,
            timeout=1200,
        )

    def pip(self, *arguments) -> None:
        """The running environment's pip, at work in this one."""
        command = [sys.executable, '-m', 'pip', '--python', str(self.python), *arguments]
        subprocess.run(
            [*command, '--disable-pip-version-check'], check=True, stdout=subprocess.PIPE
        )


def core_directory() -> Path:
    """``megatron`` of the megatron-core under test."""
    return Path(core_version()[1]).parent


@pytest.fixture(scope='session')
def other_packages(tmp_path_factory) -> Path:
    """Links to all packages of the running environment but megatron-core and the overlay."""
    links = tmp_path_factory.mktemp('other_packages')
    for entry in Path(sysconfig.get_path('purelib')).iterdir():
        if not entry.name.startswith(('megatron', '__editable__')):
            (links / entry.name).symlink_to(entry)
    return links


@pytest.fixture(scope='session')
def sources(tmp_path_factory) -> Path:
    """A copy of what wheels are made of, with what an older build has left behind."""
    sources = tmp_path_factory.mktemp('sources')
    stale = (
        sources / 'build' / 'lib' / 'megatron_overlay' / 'tree' / 'megatron' / 'core' / 'left.py'
    )
    stale.parent.mkdir(parents=True)
    stale.touch()
    for name in WHEEL_SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, sources / name, ignore=shutil.ignore_patterns('__pycache__'))
        elif source.exists():
            shutil.copy(source, sources / name)
    return sources


@pytest.fixture(scope='session')
def wheel(tmp_path_factory, sources) -> Path:
    """The overlay's wheel."""
    directory = tmp_path_factory.mktemp('wheel')
    subprocess.run(
        [sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-build-isolation']
        + ['--no-index', '--disable-pip-version-check', '-w', directory, sources],
        check=True,
        stdout=subprocess.PIPE,
    )
    (built,) = directory.glob('*.whl')
    return built


@pytest.fixture(scope='session')
def stock(tmp_path_factory, other_packages) -> Environment:
    """megatron-core as it comes."""
    environment = make_environment(tmp_path_factory.mktemp('stock'), other_packages)
    core = core_directory()
    shutil.copytree(core, environment.site_packages / 'megatron')
    for distribution in importlib.metadata.distributions(name='megatron-core'):
        info = Path(str(distribution.locate_file('.'))) / (
            f'megatron_core-{distribution.version}.dist-info'
        )
        if info.is_dir() and info.parent == core.parent:
            shutil.copytree(info, environment.site_packages / info.name)
    return environment


@pytest.fixture(scope='session')
def installed(tmp_path_factory, stock, wheel) -> Environment:
    """megatron-core and, installed by pip, the overlay."""
    environment = copy_environment(stock, tmp_path_factory.mktemp('installed'))
    environment.pip('install', '--no-deps', '--no-index', str(wheel))
    return environment


@pytest.fixture(scope='session')
def without_core(tmp_path_factory, installed) -> Environment:
    """The overlay without megatron-core, which then has to come from ``PYTHONPATH``."""
    return copy_environment(
        installed, tmp_path_factory.mktemp('without_core'), 'megatron', 'megatron_core-*'
    )


@pytest.fixture
def source_tree(tmp_path):
    """Makes a source tree of megatron-core, with other version numbers if wanted."""

    def make(**numbers) -> Path:
        tree = tmp_path / 'Megatron-LM'
        core = tree / 'megatron' / 'core'
        core.mkdir(parents=True)
        for entry in core_directory().iterdir():
            if entry.name not in ('core', '__pycache__'):
                (tree / 'megatron' / entry.name).symlink_to(entry)
        for entry in (core_directory() / 'core').iterdir():
            if entry.name not in ('package_info.py', '__pycache__'):
                (core / entry.name).symlink_to(entry)
        lines = (core_directory() / 'core' / 'package_info.py').read_text().splitlines()
        for index, line in enumerate(lines):
            name = line.partition(' = ')[0]
            if name in numbers:
                lines[index] = f'{name} = {numbers[name]!r}'
        (core / 'package_info.py').write_text('\n'.join(lines))
        return tree

    return make


def make_environment(root: Path, other_packages: Path) -> Environment:
    venv.create(root, with_pip=False, symlinks=True)
    environment = Environment(root)
    (environment.site_packages / 'zz_other_packages.pth').write_text(f'{other_packages}\n')
    return environment


def copy_environment(source: Environment, root: Path, *without: str) -> Environment:
    """A copy of an environment, without the entries of those names in its site-packages."""

    def ignore(directory, names):
        if Path(directory) != source.site_packages:
            return []
        return [name for name in names if any(Path(name).match(pattern) for pattern in without)]

    shutil.copytree(source.root, root, symlinks=True, ignore=ignore, dirs_exist_ok=True)
    return Environment(root)
