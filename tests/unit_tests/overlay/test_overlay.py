"""The overlay, installed from its wheel, over the real megatron-core."""

import hashlib
import json
import os
import shlex
import shutil
import zipapp
import zipfile
from pathlib import Path

import pytest

from tests.unit_tests.overlay.conftest import REPOSITORY, copy_environment, core_directory

PLAIN_USER = Path(__file__).with_name('plain_user.py')
WARNING = 'megatron_overlay stays out'
EXTENDED = ['megatron.core.optimizer.distrib_optimizer', 'megatron.training.checkpointing']
REPLACED = 'megatron.core.dist_checkpointing.gpt_checkpoint_interop'
TOOLS = {
    'megatron-weighted-merge': 'weighted_merge.py',
    'megatron-convert-pp-vpp': 'convert_ckpt_pp_vpp.py',
    'megatron-inspect-checkpoint': 'inspect_checkpoint.py',
    'megatron-gpt-into-hybrid': 'gpt_into_hybrid.py',
    'megatron-convert-optimizer': 'convert_ckpt_optimizer.py',
    'megatron-resume-report': 'resume_report.py',
}


def facts(run):
    """What plain_user.py printed."""
    assert run.returncode == 0, run.stderr[-3000:]
    (line,) = [line for line in run.stdout.splitlines() if 'FACTS' in line]
    return json.loads(line.partition('FACTS ')[2])


def path_in(directory, name):
    return str(directory.joinpath(*name.split('.'))) + '.py'


def assert_overlaid(found, environment, upstream):
    """The facts are those of upstream's tree with the overlay's modules in it."""
    tree = environment.site_packages / 'megatron_overlay' / 'tree'
    overlaid = {name: path_in(tree, name) for name in [REPLACED, *EXTENDED]}
    checkpointing = path_in(upstream, 'megatron.training.checkpointing')
    assert found['files'] == overlaid
    assert found['module'] == EXTENDED[0]
    assert found['qualname'] == 'DistributedOptimizer'
    assert found['bases'].count('DistributedOptimizer') == 2
    for fact in 'one class', 'pickled', 'instance pickled', 'isinstance':
        assert found[fact], fact
    assert found['source file'] == checkpointing
    assert found['source'].startswith('def save_checkpoint(')
    own, *theirs = found['class source']
    assert own.startswith('class DistributedOptimizer(upstream.DistributedOptimizer):')
    assert theirs == ['class Range:', 'class CheckpointType(Enum):']
    assert found['mocked']['file'] == checkpointing
    # The line that a traceback names is the one that upstream's file has there.
    assert found['mocked']['line'].startswith('assert ')
    assert '71' in found['mocked']['message'] and '72' in found['mocked']['message']
    assert found['reloaded'] == {
        'same module': True,
        'upstream': True,
        'code': overlaid['megatron.training.checkpointing'],
        'files': overlaid,
    }


def test_wheel_owns_no_path_of_another_distribution(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = [name for name in names if name.endswith('entry_points.txt')]
        scripts = archive.read(entry_points).decode()
        start_up = archive.read('megatron_overlay.pth').decode()
    own = ('megatron_overlay/', 'megatron_checkpoint_toolkit-')
    assert [name for name in names if not name.startswith(own)] == ['megatron_overlay.pth']
    assert start_up.startswith('import ') and start_up.count('\n') == 1
    assert {line.partition(' = ')[0] for line in scripts.splitlines() if '=' in line} == set(TOOLS)
    # Everything is in it, and nothing else.
    places = [('megatron', 'tree/megatron'), ('tools', 'tools'), ('megatron_overlay', '.')]
    assert {name for name in names if name.endswith('.py')} == {
        str(Path('megatron_overlay', place, file.relative_to(REPOSITORY / folder)))
        for folder, place in places
        for file in (REPOSITORY / folder).rglob('*.py')
    }


def test_plain_script_under_torchrun_with_core_in_site_packages(installed):
    run = installed.run(
        *('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=1'),
        *(PLAIN_USER, '--child'),
    )
    found = facts(run)
    assert_overlaid(found, installed, installed.site_packages)
    assert found['child'] == found['files']
    assert WARNING not in run.stderr


def test_plain_script_in_a_source_tree(installed, source_tree):
    # As Megatron-LM's own scripts do, it stands in the tree's root, before site-packages.
    tree = source_tree()
    script = shutil.copy(PLAIN_USER, tree / 'pretrain.py')
    assert_overlaid(facts(installed.run(script)), installed, tree)


def test_editable_installation_of_core(without_core, tmp_path, source_tree):
    tree = source_tree()
    (tree / 'pyproject.toml').write_text(
        '[project]\nname = "megatron-core"\nversion = "0.1"\n'
        '[tool.setuptools.packages.find]\ninclude = ["megatron.core", "megatron.core.*"]\n'
    )
    environment = copy_environment(without_core, tmp_path / 'environment')
    environment.pip('install', '--no-deps', '--no-index', '--no-build-isolation', '-e', str(tree))
    code, lines = status(environment.run('-m', 'megatron_overlay'))
    assert code == 0 and str(tree / 'megatron' / 'core') in lines[1]


def test_unsupported_version_runs_unmodified_with_one_warning(without_core, source_tree):
    tree = source_tree(MAJOR=0, MINOR=20, PATCH=0)
    run = without_core.run(PLAIN_USER, path=tree)
    found = facts(run)
    assert run.stderr.count(WARNING) == 1
    assert f'{tree}/megatron/core is version 0.20.0' in run.stderr
    for name, file in found['files'].items():
        expected = path_in(tree, name)
        assert file == (expected if Path(expected).exists() else None)
    assert found['bases'].count('DistributedOptimizer') == 1
    assert found['reloaded']['code'] == path_in(tree, 'megatron.training.checkpointing')


def test_uninstalling_leaves_core_as_it_was(installed, stock, tmp_path):
    environment = copy_environment(installed, tmp_path / 'environment')
    environment.pip('uninstall', '--yes', 'megatron-checkpoint-toolkit')
    assert contents(environment.site_packages) == contents(stock.site_packages)
    assert not [path for path in (environment.root / 'bin').iterdir() if path.name in TOOLS]
    run = environment.run('-c', 'import sys; print(sys.meta_path)')
    assert run.returncode == 0 and not run.stderr and 'Overlay' not in run.stdout


def contents(directory):
    # Running modules in it adds compiled ones; those aren't megatron-core's files.
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in directory.rglob('*')
        if file.is_file() and '__pycache__' not in file.parts
    }


def test_installing_changes_no_file_that_was_there(installed, stock):
    before, after = contents(stock.site_packages), contents(installed.site_packages)
    assert {path: after.get(path) for path in before} == before
    added = {path.partition('/')[0].partition('-')[0] for path in after.keys() - before.keys()}
    assert added == {'megatron_overlay', 'megatron_overlay.pth', 'megatron_checkpoint_toolkit'}


def status(run):
    """Exit status and the lines that ``python -m megatron_overlay`` printed."""
    assert not run.stderr
    return run.returncode, run.stdout.splitlines()


def test_status_active(installed):
    code, lines = status(installed.run('-m', 'megatron_overlay'))
    assert code == 0
    assert str(installed.site_packages / 'megatron' / 'core') in lines[1]
    assert 'active:' in lines
    upstream = core_directory().parent
    roles = dict(reversed(line.split()) for line in lines[lines.index('active:') + 1 :])
    for name in EXTENDED:
        assert roles[name] == 'extends'
    exists = Path(path_in(upstream, REPLACED)).exists()
    assert roles[REPLACED] == ('replaces' if exists else 'adds')
    overlay = {
        '.'.join(file.relative_to(REPOSITORY).with_suffix('').parts)
        for file in (REPOSITORY / 'megatron').rglob('*.py')
    }
    assert set(roles) == overlay


def test_status_off(installed):
    code, lines = status(installed.run('-m', 'megatron_overlay', MEGATRON_OVERLAY='0'))
    assert code == 1 and lines[-1] == 'off: MEGATRON_OVERLAY=0'


def test_status_over_an_unsupported_version(without_core, source_tree):
    tree = source_tree(MINOR=17)
    code, lines = status(without_core.run('-m', 'megatron_overlay', path=tree))
    assert code == 1 and lines[-1] == 'out: supported are releases of 0.18 and 0.19'
    assert f'{tree}/megatron/core' in lines[-2]


def test_status_without_megatron(without_core):
    code, lines = status(without_core.run('-m', 'megatron_overlay'))
    assert code == 1 and lines[-1].startswith('megatron-core: not found')


def test_status_in_a_checkout_that_is_not_installed(stock):
    code, lines = status(stock.run('-m', 'megatron_overlay', path=REPOSITORY))
    assert code == 1 and lines[-1].startswith('not active in plain processes')


def test_installed_in_editable_mode(stock, sources, tmp_path):
    environment = copy_environment(stock, tmp_path / 'environment')
    environment.pip('install', '--no-deps', '--no-index', '--no-build-isolation', '-e', sources)
    code, lines = status(environment.run('-m', 'megatron_overlay'))
    assert code == 0 and lines[0].endswith(f'tree {sources}') and 'active:' in lines
    for command in TOOLS:
        run = environment.run(environment.root / 'bin' / command, '--help')
        assert run.returncode == 0 and run.stdout.startswith(f'usage: {command} ')


ACTIVATED = """
import megatron_overlay
assert megatron_overlay.activate() and not megatron_overlay.finder.left_out()
"""


def test_installed_where_start_up_files_are_not_run(installed, stock, wheel, tmp_path):
    target = tmp_path / 'target'
    stock.pip('install', '--no-deps', '--no-index', '--target', target, wheel)
    for environment, options, path in [
        (stock, [], target),
        (installed, ['-S'], installed.site_packages),
    ]:
        code, lines = status(environment.run(*options, '-m', 'megatron_overlay', path=path))
        assert code == 1 and lines[-1] == (
            f'not active in plain processes: {path}/megatron_overlay.pth was not run, as python '
            f'was started with -S, or finds the package by PYTHONPATH (after `pip install '
            f'--target`); call megatron_overlay.activate() before the first import of megatron'
        )
        run = environment.run(*options, '-c', ACTIVATED, path=path)
        assert run.returncode == 0, run.stderr


def test_every_start_is_quiet(installed, stock, wheel, tmp_path):
    active = 'import sys; print(any("Overlay" in type(each).__name__ for each in sys.meta_path))'
    (tmp_path / 'app').mkdir()
    (tmp_path / 'app' / '__main__.py').write_text(active)
    zipapp.create_archive(tmp_path / 'app', tmp_path / 'app.pyz')
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / 'another')
    read_only = copy_environment(installed, tmp_path / 'read_only')
    for file in [*read_only.site_packages.rglob('*'), read_only.site_packages]:
        if not file.is_symlink():
            file.chmod(0o555 if file.is_dir() else 0o444)
    (removed, left) = (copy_environment(installed, tmp_path / name) for name in ('none', 'left'))
    for environment in removed, left:
        for file in (environment.site_packages / 'megatron_overlay').rglob('*.py'):
            file.unlink()
    shutil.rmtree(removed.site_packages / 'megatron_overlay')
    for environment, arguments, path, expected in [
        (removed, ['-c', active], None, False),
        (left, ['-c', active], None, False),  # of the package, folders are there
        (installed, ['-c', active], None, True),
        (installed, ['-I', '-c', active], None, True),
        (installed, ['-E', '-s', '-c', active], None, True),
        (installed, ['-W', 'error', '-c', active], None, True),
        (installed, ['-S', '-c', active], None, False),
        (installed, [tmp_path / 'app.pyz'], None, True),
        (installed, ['-c', active], tmp_path / 'another', True),
        (installed, ['-c', active], stock.site_packages, True),
        (stock, ['-c', active], installed.site_packages, False),
        (stock, ['-c', f'import megatron_overlay\n{active}'], wheel, False),
        (read_only, ['-c', active], None, True),
    ]:
        run = environment.run(*arguments, path=path)
        assert (run.returncode, run.stderr) == (0, ''), arguments
        assert run.stdout == f'{expected}\n', arguments
    run = stock.run('-m', 'megatron_overlay', path=wheel)
    assert run.returncode == 1 and not run.stderr
    for file in [read_only.site_packages, *read_only.site_packages.rglob('*')]:
        if not file.is_symlink():
            file.chmod(0o755)


@pytest.mark.parametrize('command', TOOLS)
def test_console_commands(installed, command):
    assert (REPOSITORY / 'tools' / 'checkpoint' / TOOLS[command]).exists()
    script = installed.root / 'bin' / command
    assert script.read_text().startswith(f'#!{installed.python}')
    run = installed.run(script, '--help')
    assert run.returncode == 0 and run.stdout.startswith(f'usage: {command} ')
    (distribution,) = installed.site_packages.glob('megatron_checkpoint_toolkit-*.dist-info')
    version = distribution.name.removesuffix('.dist-info').partition('-')[2]
    for arguments in [script, '--version'], ['-m', 'megatron_overlay', '--version']:
        run = installed.run(*arguments)
        assert (run.returncode, run.stdout) == (0, f'megatron-checkpoint-toolkit {version}\n')


NAMED = 'from megatron_overlay.commands import command_of; print(command_of({!r}))'


def test_commands_in_messages_work_where_they_are_printed(installed, stock, wheel, tmp_path):
    target = tmp_path / 'target'
    stock.pip('install', '--no-deps', '--no-index', '--target', target, wheel)
    found = {'PATH': f'{installed.root / "bin"}:{os.environ["PATH"]}'}
    for command, file in TOOLS.items():
        tool = file.removesuffix('.py')
        module = ['-m', f'megatron_overlay.tools.checkpoint.{tool}']
        for environment, path, variables, words in [
            (installed, None, found, [str(installed.root / 'bin' / command)]),
            (installed, None, {}, module),
            (stock, target, {}, module),
            (stock, REPOSITORY, {}, [f'{REPOSITORY}/tools/checkpoint/{file}']),
        ]:
            run = environment.run('-c', NAMED.format(tool), path=path, **variables)
            python = shlex.join([str(environment.python), *words])
            assert run.stdout == f'{command if variables else python}\n', run.stderr
            run = environment.run(*words, '--version', path=path, **variables)
            assert run.returncode == 0 and run.stdout.startswith('megatron-checkpoint-toolkit ')


def test_the_dry_run_without_what_it_needs(installed, stock, without_core, source_tree, tmp_path):
    script = installed.root / 'bin' / 'megatron-gpt-into-hybrid'
    tree = source_tree(MINOR=17)
    for environment, path, variables, reason in [
        (installed, None, {'MEGATRON_OVERLAY': '0'}, 'MEGATRON_OVERLAY=0'),
        (without_core, None, {}, 'megatron-core: not found'),
        (without_core, tree, {}, 'megatron-core 0.17'),
    ]:
        run = environment.run(script, tmp_path, '*-', path=path, **variables)
        assert run.returncode == 1 and run.stderr.startswith('error: '), run.stdout
        assert reason in run.stderr and run.stderr.count('\n') == 1 and not run.stdout


def test_the_dry_run_s_output_is_its_own(installed, tmp_path):
    script = installed.root / 'bin' / 'megatron-gpt-into-hybrid'
    run = installed.run(script, tmp_path / 'nowhere', '*-')
    assert run.returncode == 1 and run.stdout.startswith('Will not load: ')
    assert not run.stderr
    run = installed.run('-m', REPLACED, tmp_path / 'nowhere', '*-')
    assert run.returncode == 1 and run.stdout.startswith('Will not load: ')
