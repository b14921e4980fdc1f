"""Tools that only look don't import megatron-core, which takes longer than all else they do."""

import copy
import gc
import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch

from tests.unit_tests.tools.checkpoint.documented_commands import REPOSITORY
from tools.checkpoint.common.core_classes import CORE_CLASSES, StandIn, admitted, stand_in
from tools.checkpoint.common.quiet import import_quickly
from tools.checkpoint.common.safe_load import load_torch

CODE = """
import importlib, sys
{before}
tool = importlib.import_module('tools.checkpoint.' + sys.argv[1])
try:
    status = tool.main(sys.argv[2:])
except SystemExit as end:
    status = end.code
found = [name for name in ('torch', 'torch.distributed.checkpoint', 'megatron.core')
         if name in sys.modules]
print(status, *found, file=sys.stderr)
"""
NO_CORE = """
from importlib.machinery import PathFinder
class WithoutCore(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.startswith('megatron.') else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutCore
"""


def run(*words, before=''):
    """Standard output, exit status, and what of the slow packages was imported."""
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', CODE.format(before=before), *map(str, words)],
        cwd=REPOSITORY,
        env=os.environ | {'RANK': '0'},
        text=True,
        capture_output=True,
    )
    status, *imported = done.stderr.splitlines()[-1].split()
    return done.stdout, int(status), imported


def test_nothing_is_collected_while_a_package_is_imported(tmp_path, monkeypatch):
    (tmp_path / 'a_large_package.py').write_text('import gc\ncollecting = gc.isenabled()\n')
    monkeypatch.syspath_prepend(tmp_path)
    before = gc.get_freeze_count()
    import_quickly('a_large_package')
    assert not sys.modules.pop('a_large_package').collecting and gc.isenabled()
    after = gc.get_freeze_count()
    assert after > before
    import_quickly('sys')  # which is there: nothing of a program that uses a tool is frozen
    assert gc.get_freeze_count() == after
    gc.unfreeze()


@pytest.fixture(scope='module')
def saved(real):
    return real / 'gpt'


@pytest.mark.parametrize(
    'tool', ['weighted_merge', 'convert_ckpt_pp_vpp', 'gpt_into_hybrid', 'inspect_checkpoint']
)
def test_help_imports_nothing_slow(tool):
    printed, status, imported = run(tool, '--help')
    assert (status, imported) == (0, []) and printed.startswith('usage: ')


def test_looks_and_refusals_leave_core_alone(saved, pp4, tmp_path):
    merge = ['weighted_merge', '--merge-output', tmp_path / 'out', '--dry-run', '--merge-inputs']
    iteration = next(saved.glob('iter_*'))
    pair = [f'{iteration}:0.5', f'{saved}:0.5']
    convert = ['convert_ckpt_pp_vpp', 'merge', '--load-dir', pp4, '--save-dir', tmp_path / 'vpp']
    sizes = ['--pipeline-size', 2]
    for words, expected in [
        (['inspect_checkpoint', saved], 0),
        (['inspect_checkpoint', pp4], 0),
        (['inspect_checkpoint', tmp_path], 1),
        (['gpt_into_hybrid', saved, 'M*-M*-'], 0),
        (['gpt_into_hybrid', saved, 'M*-'], 1),
        ([*merge, f'{iteration}:1', '--min-checkpoints', '1', '--model-only'], 0),
        ([*merge, *pair], 1),  # twice the same
        ([*convert, *sizes, '--dry-run'], 0),
        ([*convert, '--pipeline-size', 3], 1),
        ([*convert, *sizes], 0),  # it writes core's enumerations
    ]:
        printed, status, imported = run(*words)
        assert status == expected, (words, printed)
        assert 'megatron.core' not in imported, words
        if 'convert_ckpt_pp_vpp' in words:
            assert 'torch.distributed.checkpoint' not in imported
    (one, *_), (other, *_) = sorted(pp4.rglob('*.pt')), sorted((tmp_path / 'vpp').rglob('*.pt'))
    one, other = (torch.load(file, weights_only=True)['args'] for file in (one, other))
    assert type(other.attention_backend).__module__ == 'megatron.core.transformer.enums'
    assert other.attention_backend is one.attention_backend


TOLD = """
import contextlib, importlib, io, json, sys

def told(words):
    tool = importlib.import_module('tools.checkpoint.' + words[0])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            status = tool.main(words[1:])
        except SystemExit as end:
            status = end.code
    return status, printed.getvalue()
"""


def test_what_is_told_is_the_same_with_and_without_core_imported(saved, pp4, tmp_path):
    source = next(saved.glob('iter_*'))
    names = ['good', 'unfinished', 'cut', 'garbage', 'hostile', 'no config', 'no file']
    for name in names:
        shutil.copytree(source, tmp_path / name / source.name)
        shutil.copy(saved / 'latest_checkpointed_iteration.txt', tmp_path / name)
    at = {name: tmp_path / name / source.name for name in names}
    (at['unfinished'] / '.metadata').unlink()
    (at['cut'] / '.metadata').write_bytes((source / '.metadata').read_bytes()[:300])
    (at['garbage'] / '.metadata').write_bytes(b'no pickle')
    (at['hostile'] / '.metadata').write_bytes(pickle.dumps(print))
    (at['no config'] / 'metadata.json').unlink()
    next(at['no file'].glob('*.distcp')).unlink()
    paths = [*(tmp_path / name for name in names), pp4, at['good'], tmp_path / 'absent', tmp_path]
    cases = [['gpt_into_hybrid', str(paths[0]), pattern] for pattern in ('*-', 'MQ', '*E', '+-')]
    for path in map(str, paths):
        merge = ['weighted_merge', '--merge-output', f'{tmp_path}/out', '--dry-run']
        cases += [
            ['gpt_into_hybrid', path, 'M-*-', '--replace-gpt-attention'],
            ['inspect_checkpoint', path],
            ['inspect_checkpoint', '--diff', path, str(saved)],
            ['resume_report', path],
            ['resume_report', path, '--check-weights'],
            [*merge, '--merge-inputs', f'{path}:1', '--min-checkpoints=1'],
            ['convert_ckpt_optimizer', '--load-dir', path, f'--save-dir={tmp_path}/o', '--dry-run'],
        ]
    code = f'{TOLD}\nall = [told(words) for words in json.loads(sys.argv[1])]\n'
    code += "print(json.dumps(['megatron.core' in sys.modules, all]))"
    alone = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', code, json.dumps(cases)],
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    core_imported, found = json.loads(alone.stdout)
    names = {}
    exec(TOLD, names)
    assert not core_imported and 'megatron.core.dist_checkpointing' in sys.modules
    for words, outcome in zip(cases, found, strict=True):
        assert names['told'](words) == tuple(outcome), words
    assert sum(status for status, _ in found) > len(found) / 2


def test_where_there_is_no_core_the_inspector_tells_what_it_can(saved, pp4):
    for checkpoint in saved, pp4:
        told, status, _ = run('inspect_checkpoint', checkpoint)
        alone, status_alone, _ = run('inspect_checkpoint', checkpoint, before=NO_CORE)
        assert status == status_alone == 0
        differ = [
            line
            for before, line in zip(told.splitlines(), alone.splitlines(), strict=True)
            if before != line
        ]
        assert len(differ) == (2 if checkpoint == saved else 0), differ
        for line in differ:
            assert 'unknown: megatron-core: not found' in line


def test_the_names_are_those_that_core_registers():
    import megatron.core.safe_globals as core

    ours = {name for _, name in admitted()} | {'numpy._core.multiarray._reconstruct'}
    theirs = {f'{cls.__module__}.{cls.__qualname__}' for cls in core.SAFE_GLOBALS}
    assert theirs <= ours
    of_core = {name for name in theirs if name.startswith('megatron.')}
    assert of_core <= set(CORE_CLASSES)


def test_a_stand_in_is_saved_as_what_it_stands_for(tmp_path):
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig

    value = {'kind': ModelType.encoder_or_decoder, 'config': OptimizerConfig(lr=0.25)}
    torch.save(value, tmp_path / 'core.pt')
    code = (
        'import sys, torch\n'
        'from tools.checkpoint.common.core_classes import WithStandIns\n'
        'from tools.checkpoint.common.safe_load import load_torch\n'
        'value = load_torch(sys.argv[1])\n'
        'torch.save(value, sys.argv[2], pickle_module=WithStandIns)\n'
        'assert "megatron.core" not in sys.modules\n'
    )
    words = [sys.executable, '-c', code, tmp_path / 'core.pt', tmp_path / 'again' / 'core.pt']
    (tmp_path / 'again').mkdir()
    subprocess.run(words, cwd=REPOSITORY, check=True)
    again = tmp_path / 'again' / 'core.pt'
    assert again.read_bytes() == (tmp_path / 'core.pt').read_bytes()
    assert torch.load(again, weights_only=True) == value
    # Where core is there, its own classes are.
    assert load_torch(again) == value
    one, other = stand_in(CORE_CLASSES[0])(1), stand_in(CORE_CLASSES[0])(1)
    assert one == other != stand_in(CORE_CLASSES[0])(2) and isinstance(one, StandIn)
    with pytest.raises(pickle.UnpicklingError):
        stand_in(CORE_CLASSES[0])([])


def test_errors_are_core_s_where_core_is():
    from megatron.core.dist_checkpointing.core import CheckpointingException

    from tools.checkpoint.common.errors import CheckpointError

    error = CheckpointError('a\nb')
    assert isinstance(error, CheckpointingException) and isinstance(error, ValueError)
    assert type(error).__name__ == 'CheckpointError' and str(error) == 'a\\nb'
    for same in copy.copy(error), pickle.loads(pickle.dumps(error)):
        assert type(same) is type(error) and str(same) == str(error)
