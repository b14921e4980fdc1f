"""The finder over a tree that has megatron-core's shape and nothing in it, so that it is quick."""

import subprocess
import sys

import pytest

import megatron_overlay as overlay
from megatron_overlay._finder import OverlayFinder
from tests.unit_tests.overlay.conftest import REPOSITORY

NAME = 'megatron.core.optimizer.distrib_optimizer'
IMPORT = f'import {NAME} as module; print(module.__file__)'


@pytest.fixture
def tree(tmp_path):
    """Makes a tree in which the extended module is empty but for what the overlay needs of it."""

    def make(package_info):
        core = tmp_path / 'tree' / 'megatron' / 'core'
        (core / 'optimizer').mkdir(parents=True)
        for package in core, core / 'optimizer':
            (package / '__init__.py').touch()
        if package_info is not None:
            (core / 'package_info.py').write_text(package_info)
        (core / 'optimizer' / 'distrib_optimizer.py').write_text(
            'class DistributedOptimizer:\n    """Upstream\'s."""\n'
        )
        return core.parents[1]

    return make


def release(version, pre_release=''):
    numbers = zip(['MAJOR', 'MINOR', 'PATCH'], version.split('.'), strict=True)
    lines = [f'{name} = {number}' for name, number in numbers]
    return '\n'.join([*lines, f'PRE_RELEASE = {pre_release!r}  # as upstream has it', ''])


@pytest.mark.parametrize(
    ('package_info', 'shown'),
    [
        (release('0.17.1'), '0.17.1'),
        (release('0.20.0'), '0.20.0'),
        (release('1.19.0'), '1.19.0'),
        (release('0.1.9'), '0.1.9'),
        (release('0.190.0'), '0.190.0'),
        (release('0.17.0', 'rc0'), '0.17.0rc0'),
        (release('0.20.0', '.dev1'), '0.20.0.dev1'),
        ('VERSION = (0, 19, 2)\n', 'unknown'),
        (None, 'unknown'),
    ],
)
def test_other_versions_stay_stock_with_one_warning(without_core, tree, package_info, shown):
    directory = tree(package_info)
    code = f'{IMPORT}\nimport megatron.core.optimizer.optimizer'
    (directory / 'megatron' / 'core' / 'optimizer' / 'optimizer.py').touch()
    run = without_core.run('-c', code, path=directory)
    assert run.returncode == 0
    assert run.stdout.startswith(str(directory))
    (warning,) = [line for line in run.stderr.splitlines() if 'megatron_overlay' in line]
    assert warning.endswith(
        f'it supports megatron-core 0.18 and 0.19, and {directory}/megatron/core is version '
        f'{shown}. megatron-core runs unmodified.'
    )
    status = without_core.run('-m', 'megatron_overlay', path=directory)
    assert status.returncode == 1 and 'out: supported are releases' in status.stdout


def test_switched_off(without_core, tree):
    directory = tree(release('0.19.0'))
    run = without_core.run('-c', IMPORT, path=directory, MEGATRON_OVERLAY='0')
    assert run.stdout.startswith(str(directory)) and not run.stderr


def test_without_megatron_nothing_is_said(without_core):
    run = without_core.run('-c', 'import sys; print(sorted(sys.modules))')
    assert 'megatron_overlay' in run.stdout and 'torch' not in run.stdout and not run.stderr
    run = without_core.run('-c', 'import megatron.core')
    assert "No module named 'megatron'" in run.stderr and 'megatron_overlay' not in run.stderr


def test_activating_after_an_import_is_refused(stock, tree):
    directory = tree(release('0.19.0'))
    code = f'{IMPORT}\nimport megatron_overlay\nmegatron_overlay.activate()'
    run = stock.run('-c', code, path=f'{directory}:{REPOSITORY}')
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        f'RuntimeError: megatron_overlay.activate() was called after {NAME} had been imported; '
        f'call it before the first import of megatron.'
    )


def test_activating_again_changes_nothing(stock, tree):
    code = (
        'import sys, megatron_overlay as overlay\n'
        'assert overlay.activate() and overlay.activate()\n'
        'assert sys.meta_path.count(overlay.finder) == 1 and sys.meta_path[0] is overlay.finder\n'
        'import megatron.core.optimizer; assert overlay.activate()'
    )
    run = stock.run('-c', code, path=f'{tree(release("0.18.3"))}:{REPOSITORY}')
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ('version', 'supported'),
    [
        ('0.18.0', True),
        ('0.18.0rc3', True),
        ('0.19.0.dev1', True),
        ('0.19.0+1a2b3c4', True),
        ('0.19.7', True),
        ('0.20.0.dev1', False),
        ('0.1.9', False),
        ('0', False),
        ('', False),
    ],
)
def test_versions(version, supported):
    assert OverlayFinder('', ('0.18', '0.19')).supports(version) is supported


def test_names_outside_the_tree_are_left_alone(tmp_path):
    (tmp_path / 'megatron' / 'core').mkdir(parents=True)
    (tmp_path / 'megatron' / 'core' / 'added.py').touch()
    finder = OverlayFinder(str(tmp_path), ('0.18', '0.19'))
    assert finder.files == {'megatron.core.added': str(tmp_path / 'megatron/core/added.py')}
    for name in 'megatron', 'megatron.core', 'megatron.core.other', 'megatronic', 'torch':
        assert finder.find_spec(name) is None
    assert finder.find_spec('megatron.core.added').origin == finder.files['megatron.core.added']


class AsksAll:
    """A finder that wraps what the others find."""

    asked = 0

    def find_spec(self, name, path=None, target=None):
        self.asked += 1
        for finder in sys.meta_path:
            spec = finder is not self and finder.find_spec(name, path, target)
            if spec:
                return spec


def test_another_finder_that_asks_this_one(monkeypatch):
    finder, other = OverlayFinder(overlay.finder.tree, ('0.18', '0.19')), AsksAll()
    others = [each for each in sys.meta_path if each is not overlay.finder]
    monkeypatch.setattr(sys, 'meta_path', [other, finder, *others])
    assert finder.left_out() == {} and other.asked


def test_what_cannot_be_looked_at_stays_out(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name.startswith('megatron.core.'):
                raise OSError('no such device')

    finder = OverlayFinder(overlay.finder.tree, ('0.18', '0.19'))
    monkeypatch.setattr(sys, 'meta_path', [*sys.meta_path[:1], Broken(), *sys.meta_path[1:]])
    with pytest.warns(UserWarning, match='OSError: no such device'):
        assert finder.find_spec(NAME) is None


FAILS = """
import sys
from megatron_overlay._finder import OverlayFinder
sys.path.insert(0, sys.argv[1] + '/upstream')
sys.meta_path.insert(0, OverlayFinder(sys.argv[1] + '/overlay', ('0.19',)))
import megatron.core.amended
import megatron.core.replaced
print(megatron.core.amended.__file__, vars(megatron.core.amended).get('own'))
print(megatron.core.replaced.__file__)
try:
    import megatron.core.broken
except ImportError as error:
    print(error)
"""


def test_a_module_of_the_overlay_that_fails_leaves_upstream_s(tmp_path):
    for file, text in {
        'upstream/megatron/core/__init__.py': '',
        'upstream/megatron/core/package_info.py': release('0.19.0'),
        'upstream/megatron/core/amended.py': 'from . import replaced',
        'upstream/megatron/core/replaced.py': '',
        'upstream/megatron/core/broken.py': 'import not_there_for_upstream',
        'overlay/megatron/core/amended.py': 'own = 1\nimport not_there',
        'overlay/megatron/core/replaced.py': '',
        'overlay/megatron/core/broken.py': 'import not_there',
    }.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    run = subprocess.run(
        [sys.executable, '-S', '-c', FAILS, tmp_path],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert run.stdout.splitlines() == [
        f'{tmp_path}/upstream/megatron/core/amended.py None',
        f'{tmp_path}/overlay/megatron/core/replaced.py',
        "No module named 'not_there_for_upstream'",
    ], run.stderr
    (warning,) = [line for line in run.stderr.splitlines() if 'stays out' in line]
    assert (
        'megatron_overlay stays out of megatron.core.amended: ModuleNotFoundError: No module named '
        "'not_there' in megatron-core 0.19.0" in warning
    )
