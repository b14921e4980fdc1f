"""Upstream's modules as they could be: what the overlay leaves to them, and that imports go on."""

import importlib.machinery
import json
import re
import subprocess
from types import SimpleNamespace

import pytest

from megatron_overlay._finder import core_version
from megatron_overlay._guard import left_out, takes
from megatron_overlay._needs import NEEDS
from tests.unit_tests.overlay.conftest import core_directory
from tests.unit_tests.overlay.needs import TABLE, Module, source, table
from tests.upstream import guard

ARGUMENTS = 'megatron.training.arguments'
CHECKPOINTING = 'megatron.training.checkpointing'
INTEROP = 'megatron.core.dist_checkpointing.gpt_checkpoint_interop'
DISTRIBUTED = 'megatron.core.optimizer.distrib_optimizer'
OFFLOADING = 'megatron.core.optimizer.cpu_offloading.hybrid_optimizer'
CHAINED = 'megatron.core.optimizer.optimizer'
PLANNER = 'megatron.core.dist_checkpointing.strategies.torch'
HYBRID = 'megatron.core.models.hybrid.hybrid_model'
EXTENDING = [name for name, needs in NEEDS.items() if 'extends' in needs]


def out(module=None, edit=None, root=None, needs=NEEDS):
    """What stays out of megatron-core when the source of one of its modules is edited.

    Args:
        module: the one.
        edit: old source -> new; None where the module isn't there.
        root: directory above ``megatron``; that of the megatron-core under test.
        needs: the overlay's modules.
    """

    def spec_of(name, path):
        if name == module and edit is None:
            return None
        path = path or [str(root or core_directory().parent)]
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and name == module:
            code = compile(edit(spec.loader.get_source(name)), spec.origin, 'exec')
            spec.loader = SimpleNamespace(get_code=lambda name: code)
        return spec

    return left_out(list(needs), spec_of)


def rename(name):
    return lambda text: re.sub(rf'\b{name}\b', f'another_{name}', text)


def replace(old, new):
    def edit(text):
        assert old in text
        return text.replace(old, new)

    return edit


def test_the_table_is_what_the_files_say():
    assert TABLE.read_text() == source(), 'run python -m tests.unit_tests.overlay.needs'
    assert {CHECKPOINTING, DISTRIBUTED, OFFLOADING, CHAINED, PLANNER} <= set(EXTENDING)


def test_supported_releases_have_all_that_is_needed():
    assert out() == {}


@pytest.mark.parametrize('module', EXTENDING)
def test_a_missing_name_keeps_its_module_out(module):
    for other, names in NEEDS[module]['names'].items():
        assert out(other, rename(names[-1]))[module] == f'{other} has no {names[-1]}'


@pytest.mark.parametrize('module', EXTENDING)
def test_a_missing_module_keeps_out_what_needs_it(module):
    for other in NEEDS[module]['names']:
        if any(name.startswith(f'{other}.') for name in NEEDS):
            continue  # the package that it lies in
        assert out(other)[module] == f'there is no module {other}'


@pytest.mark.parametrize(
    ('module', 'name'),
    [
        (OFFLOADING, 'HybridDeviceOptimizer.dummy_step'),
        (OFFLOADING, 'HybridDeviceOptimizer.sub_optimizers'),
        (DISTRIBUTED, 'DistributedOptimizer.get_parameter_state_dp_zero'),
        (DISTRIBUTED, 'DistributedOptimizer.gbuf_ranges'),
        (CHAINED, 'ChainedOptimizer.chained_optimizers'),
    ],
)
def test_a_missing_member_keeps_its_module_out(module, name):
    found = out(module, rename(name.partition('.')[2]))
    cls, _, member = name.partition('.')
    assert found[module] == f'{module}.{cls} has no {member}'


def test_an_inherited_member_is_there():
    # A base class has one, in a module of its own.
    assert out(DISTRIBUTED, replace('def state_dict(self', 'def another(self')) == {}


@pytest.mark.parametrize(
    ('module', 'old', 'new', 'function'),
    [
        (
            DISTRIBUTED,
            'def load_parameter_state_from_dp_reshardable(self, state_dict',
            'def load_parameter_state_from_dp_reshardable(self, states',
            'DistributedOptimizer.load_parameter_state_from_dp_reshardable',
        ),
        (
            OFFLOADING,
            'def dummy_step(self',
            'def dummy_step(self, step',
            'HybridDeviceOptimizer.dummy_step',
        ),
        (
            'megatron.core.dist_checkpointing.serialization',
            'def load_common_state_dict(checkpoint_dir',
            'def load_common_state_dict(strategy, checkpoint_dir',
            'load_common_state_dict',
        ),
    ],
)
def test_other_parameters_keep_a_module_out(module, old, new, function):
    found = out(module, replace(old, new))[module]
    assert found.startswith(f'{module}.{function} takes other parameters: ')


def test_what_depends_on_one_another_stays_out_together():
    # The loads between GPT and hybrid rely on the optimizers and the planner; not the reverse.
    alone = out(HYBRID)
    assert CHECKPOINTING in alone
    assert not {DISTRIBUTED, OFFLOADING, CHAINED, PLANNER} & alone.keys()
    reason = f'{OFFLOADING}.HybridDeviceOptimizer has no dummy_step'
    found = out(OFFLOADING, rename('dummy_step'))
    assert found[OFFLOADING] == reason
    for module in DISTRIBUTED, CHECKPOINTING:
        assert found[module] == f'depends on {OFFLOADING}: {reason}'
    assert not {CHAINED, PLANNER} & found.keys()
    assert CHECKPOINTING in out(PLANNER, rename('MCoreLoadPlanner'))


def test_a_module_that_upstream_has_goes_with_upstream_s_importer(tmp_path):
    core = core_directory()
    tree = tmp_path / 'megatron'
    tree.mkdir()
    (tree / 'training').symlink_to(core / 'training')
    folder = tree / 'core' / 'dist_checkpointing'
    folder.mkdir(parents=True)
    for entry in (core / 'core').iterdir():
        if entry.name != 'dist_checkpointing':
            (tree / 'core' / entry.name).symlink_to(entry)
    for entry in (core / 'core' / 'dist_checkpointing').iterdir():
        if entry.name != 'gpt_checkpoint_interop.py':
            (folder / entry.name).symlink_to(entry)
    edit = rename('check_checkpoint_args')
    assert INTEROP not in out(CHECKPOINTING, edit, tmp_path)
    (folder / 'gpt_checkpoint_interop.py').touch()
    assert out(CHECKPOINTING, edit, tmp_path)[INTEROP].startswith(f'depends on {CHECKPOINTING}: ')


def test_a_core_without_training(tmp_path):
    (tmp_path / 'megatron').mkdir()
    (tmp_path / 'megatron' / 'core').symlink_to(core_directory() / 'core')
    assert out(root=tmp_path) == {}


@pytest.mark.parametrize(
    ('own', 'upstreams', 'fits'),
    [
        ('a, b', 'a, b', True),
        ('a, b', 'b, a', False),
        ('a, b', 'a', False),
        ('a, b=', 'a', True),
        ('a', 'a, b=1', False),
        ('a, *rest', 'a, b=1', True),
        ('a, **more', 'a, b=1', True),
        ('a, **more', 'a, *b', False),
        ('a, *rest', 'a, *, b=1', False),
        ('a, *, b=', 'a, *, b=1', True),
        ('a, *rest, **more', 'a, /, b, *c, d, **e', True),
        ('a, *rest', 'a, **e', False),
        ('', '', True),
    ],
)
def test_parameters(own, upstreams, fits):
    scope: dict = {}
    exec(f'def f({upstreams}): pass', scope)
    assert takes(own, scope['f'].__code__) is fits


def test_needs_of_a_file(tmp_path):
    files = {
        'megatron.core.amended': """
from megatron.core.added import own
from megatron.core.there import used
import megatron_overlay
upstream = megatron_overlay.upstream(__name__)
if hasattr(upstream, 'sometimes'):
    upstream.sometimes()
try:
    from megatron.core.there import newer
except ImportError:
    newer = None
class Cls(upstream.Cls):
    declared: dict
    def m(self, a, b=1, *c, d, **e):
        super().m(self.declared, self.mine(), self.torchs, getattr(self, 'maybe', None))
    def mine(self): pass
def function(x):
    from megatron.core.there import later
    from megatron.core.package import module
    module.Named()
    return upstream.function(x)
if __name__ == '__main__':
    from megatron.core.there import program
""",
        'megatron.core.added': 'from megatron.core.amended import function, upstreams\nown = 1\n',
        'megatron.core.other': 'def f(x): x.mine()\n',
    }
    modules = {}
    for name, text in files.items():
        path = tmp_path / f'{name}.py'
        path.write_text(text)
        modules[name] = Module(name, path)
    upstream = SimpleNamespace(
        exists=lambda module: module == 'megatron.core.package.module',
        methods=lambda module, cls: {'m'},
        attributes=lambda module, cls: {'declared', 'maybe'},
    )
    needs = table(modules, upstream)
    assert needs['megatron.core.amended'] == {
        'extends': True,
        'overlay': ['.added', '.other'],
        'names': {
            'megatron.core.amended': ['Cls', 'function'],
            'megatron.core.package.module': ['Named'],
            'megatron.core.there': ['later', 'used'],
        },
        'methods': {'Cls': ['m']},
        'attributes': {'Cls': ['declared']},
        'functions': ['Cls.m(self, a, b=, *c, d, **e)', 'Cls.mine(self)', 'function(x)'],
    }
    assert needs['megatron.core.added'] == {
        'overlay': ['.amended'],
        'names': {'megatron.core.amended': ['upstreams']},
    }


def test_the_table_of_branches(tmp_path, capsys):
    for file, text in {
        'core/__init__.py': '',
        'core/package_info.py': "MAJOR = 0\nMINOR = 20\nPATCH = 1\nPRE_RELEASE = 'rc0'\n",
        'training/__init__.py': '',
        'training/arguments.py': 'def another(parser): pass',
    }.items():
        path = tmp_path / 'megatron' / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    name = ['-c', 'user.name=name', '-c', 'user.email=', '-C', tmp_path]
    for words in ['init', '-q'], ['add', '.'], ['commit', '-q', '-m', 'all', '--date=2026-01-02']:
        subprocess.run(['git', *name, *words], check=True)
    guard.main([str(tmp_path), 'HEAD'])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith('| HEAD | ') and ' | 0.20.1rc0 | ' in row
    assert f'{ARGUMENTS} has no add_megatron_arguments' in row


IMPORT_ALL = f"""
import importlib, json, sys
found = {{}}
for name in {sorted(NEEDS)}:
    try:
        found[name] = importlib.import_module(name).__file__
    except ModuleNotFoundError as error:
        found[name] = error.name
print('FOUND', json.dumps(found))
"""


@pytest.fixture
def doctored(tmp_path):
    """Makes a copy of megatron-core in which a word is another one everywhere, files included."""

    def copy(source, target, old, new):
        """Directories in which it isn't are linked, with what is compiled of them."""
        files = {file: file.read_text() for file in source.rglob('*.py')}
        if not any(old in text or old in str(file) for file, text in files.items()):
            target.symlink_to(source)
            return
        target.mkdir(parents=True)
        for entry in source.iterdir():
            if entry.is_dir() and entry.name != '__pycache__':
                copy(entry, target / entry.name.replace(old, new), old, new)
            elif entry in files:
                text = files[entry].replace(old, new)
                (target / entry.name.replace(old, new)).write_text(text)

    def make(old, new, pre_release=''):
        root, core = tmp_path / 'Megatron-LM', core_directory()
        copy(core, root / 'megatron', old, new)
        with (root / 'megatron' / 'core' / 'package_info.py').open('a') as file:
            file.write(f'PRE_RELEASE = {pre_release!r}\n')
        return root

    return make


@pytest.mark.parametrize(
    ('old', 'new', 'pre_release', 'stay_out', 'reason'),
    [
        (
            'hybrid_model',
            'hybrid_net',
            '.dev1+1a2b3c4',
            [CHECKPOINTING],
            f'there is no module {HYBRID}',
        ),
        (
            'def dummy_step(self)',
            'def dummy_step(self, steps=1)',
            'rc3',
            [ARGUMENTS, CHECKPOINTING, DISTRIBUTED, OFFLOADING],
            f'{OFFLOADING}.HybridDeviceOptimizer.dummy_step takes other parameters: self, steps',
        ),
    ],
)
def test_every_import_goes_on(without_core, doctored, old, new, pre_release, stay_out, reason):
    root = doctored(old, new, pre_release)
    run = without_core.run('-c', IMPORT_ALL, path=root)
    assert run.returncode == 0, run.stderr[-3000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith('FOUND')]
    found = json.loads(line.removeprefix('FOUND '))
    status = without_core.run('-m', 'megatron_overlay', path=root)
    shown = {line.split()[1].strip(':'): line for line in status.stdout.splitlines()[3:]}
    assert status.returncode == 1 and shown.keys() == found.keys()
    for name, file in found.items():
        role = shown[name].split()[0]
        upstreams = root / (name.replace('.', '/') + '.py')
        if role == 'out':
            assert file == (str(upstreams) if upstreams.exists() else name)
            assert reason in shown[name]
        else:
            assert 'megatron_overlay/tree/' in file
    out = {name for name, line in shown.items() if line.split()[0] == 'out'}
    assert out.intersection(EXTENDING) == set(stay_out)
    (warning,) = [line for line in run.stderr.splitlines() if 'megatron_overlay stays' in line]
    assert warning.endswith(
        f'megatron_overlay stays out of {", ".join(sorted(out))}: {reason} in megatron-core '
        f'{core_version()[0]}{pre_release}, {root}/megatron/core. These run unmodified; '
        f'`python -m megatron_overlay` lists what is in the way of each.'
    )
