"""Checkpoints without state that runs ask for: every look at one names the way to load it."""

import json
import shlex

import pytest

from tests.cpu_megatron import warm
from tests.unit_tests.tools.checkpoint.handmade import set_common_form
from tools.checkpoint.inspect_checkpoint import inspect_checkpoint
from tools.checkpoint.inspection import uses
from tools.checkpoint.inspection.gpt_into_hybrid import dry_run
from tools.checkpoint.inspection.resume import describe, read_resume_report
from tools.checkpoint.weighted_merge import main as merge

DISTRIBUTED = ['--ckpt-format=torch_dist', '--use-distributed-optimizer']
FUSED = {'CPU_MEGATRON_OPTIMIZER': 'fused_adam'}
# the first gradients overflow, and so the first step is left out
OVERFLOWS = ['--fp16', '--initial-loss-scale=4294967296', *DISTRIBUTED]
SHORT = ['--exit-interval=1', '--save-interval=1']
MERGED = (
    'The checkpoint has no optimizer state and no random state, as merged ones; pass '
    '--no-load-optim --no-load-rng to start them fresh.'
)
NO_RNG = 'The checkpoint has no random state; pass --no-load-rng to start it fresh.'
NO_OPTIM = 'The checkpoint has no optimizer state; pass --no-load-optim to start it fresh.'
NO_MOMENTS = (
    "The checkpoint has no moments in its optimizer state, saved before the optimizer's first "
    'step; pass --no-load-optim to start it fresh.'
)
WITHOUT = {'no_load_optim': True, 'no_load_rng': True}


@pytest.fixture(scope='module')
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp('unstored')
    pretrain = 'tests.cpu_megatron.pretrain'
    warm.run(1, pretrain, 'gpt', *DISTRIBUTED, *SHORT, f'--save={work / "run"}')
    merging = ['--merge-inputs', str(work / 'run'), '--model-only', '--start-checkpoint', '1']
    assert merge([*merging, '--end-checkpoint', '1', '--merge-output', str(work / 'merged')]) == 0
    stock = {'MEGATRON_OVERLAY': '0', **FUSED}
    save = f'--save={work / "unstepped"}'
    warm.run(1, pretrain, 'gpt', *OVERFLOWS, *SHORT, save, env=stock)
    left_out = ['--no-save-optim', '--no-save-rng', f'--save={work / "left out"}']
    warm.run(1, pretrain, 'gpt', *DISTRIBUTED, *SHORT, *left_out)
    return work


def attempt(work, kind, cases, *arguments, nproc=1, env=None):
    out = work / 'out.json'
    refusals = 'tests.unit_tests.training.refusals'
    warm.run(nproc, refusals, str(out), json.dumps(cases), kind, *arguments, env=env)
    return json.loads(out.read_text())


@pytest.mark.parametrize('kind, nproc', [('gpt', 1), ('gpt', 2), ('hybrid', 1)])
def test_a_merged_checkpoint(work, kind, nproc):
    load = {'load': str(work / 'merged')}
    cases = {
        'all': load,
        'without optimizer': load | {'no_load_optim': True},
        'without random state': load | {'no_load_rng': True},
        'weights': load | WITHOUT,
        'finetune': load | {'finetune': True},
    }
    pattern = ['--hybrid-layer-pattern=*-*-'] if kind == 'hybrid' else []
    found = attempt(work, kind, cases, *DISTRIBUTED, *pattern, '--seed=99', nproc=nproc)
    for name in ('weights', 'finetune'):
        assert found.pop(name) == {'error': None, 'untouched': False}
    # what is translated is refused by its plan, which knows the checkpoint alone
    if kind == 'hybrid':
        reasons, prefix = [MERGED, NO_RNG, MERGED], 'RuntimeError: '
    else:
        reasons, prefix = [MERGED, NO_RNG, NO_OPTIM], 'CheckpointingException: '
    at = f'CheckpointingException: {work / "merged" / "iter_0000001"}: '
    for (name, outcome), reason in zip(found.items(), reasons, strict=True):
        expected = {f'{at}{reason}', f'{prefix}{reason}'}
        assert outcome['error'] in expected and outcome['untouched'], (name, outcome)


def test_a_stock_checkpoint_from_before_the_first_step(work):
    load = {'load': str(work / 'unstepped')}
    cases = {'all': load, 'weights': load | {'no_load_optim': True}}
    found = attempt(work, 'gpt', cases, *OVERFLOWS, '--seed=99', env=FUSED)
    directory = work / 'unstepped' / 'iter_0000001'
    assert found == {
        'all': {'error': f'CheckpointingException: {directory}: {NO_MOMENTS}', 'untouched': True},
        'weights': {'error': None, 'untouched': False},
    }


@pytest.mark.parametrize('nproc', [1, 2])
def test_state_that_its_run_left_out(work, nproc):
    load = {'load': str(work / 'left out')}
    cases = {
        'all': load,
        'whatever is missing': load | {'dist_ckpt_strictness': 'log_all'},
        'weights': load | {'no_load_optim': True},
        'finetune': load | {'finetune': True},
    }
    found = attempt(work, 'gpt', cases, *DISTRIBUTED, '--seed=99', nproc=nproc)
    error = f'CheckpointingException: {work / "left out" / "iter_0000001"}: {NO_OPTIM}'
    for name in ('all', 'whatever is missing'):
        assert found.pop(name) == {'error': error, 'untouched': True}
    assert found == dict.fromkeys(('weights', 'finetune'), {'error': None, 'untouched': False})


@pytest.mark.parametrize(
    'name, options, reason, resume',
    [
        ('run', '', '', None),
        (
            'merged',
            ' --no-load-optim --no-load-rng',
            MERGED,
            'no optimizer state; load with --no-load-optim --no-load-rng',
        ),
        (
            'left out',
            ' --no-load-optim',
            NO_OPTIM,
            'no optimizer state; load with --no-load-optim',
        ),
        (
            'unstepped',
            ' --no-load-optim',
            NO_MOMENTS,
            "no moments in its optimizer state, saved before the optimizer's first step; load "
            'with --no-load-optim',
        ),
    ],
)
def test_every_look_names_the_same_options(work, name, options, reason, resume, capsys):
    summary = inspect_checkpoint(work / name)
    assert summary.load == f'--load {shlex.quote(str(work / name))}{options}'
    (found,) = [use for use in summary.uses if use.name == uses.RESUME]
    assert (found.works, None if found.works else found.reason) == (resume is None, resume)
    assert reason in describe(read_resume_report(work / name))
    assert read_resume_report(work / name).loads == (resume is None)
    assert dry_run(str(work / name), '*-*-') == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(reason)


def test_random_state_alone_is_missing(work, tmp_path, capsys):
    from tests.unit_tests.tools.checkpoint.handmade import model_tensors, write_checkpoint

    directory = write_checkpoint(
        tmp_path / 'iter_0000003',
        model_tensors(3) | {f'optimizer.state.exp_avg.{k}': v for k, v in model_tensors(4).items()},
    )
    set_common_form(directory, {'iteration': 3}, 'legacy')
    (tmp_path / 'latest_checkpointed_iteration.txt').write_text('3')
    summary = inspect_checkpoint(tmp_path)
    assert summary.load == f'--load {tmp_path} --no-load-rng'
    (found,) = [use for use in summary.uses if use.name == uses.RESUME]
    assert found.works and found.reason.endswith(NO_RNG)
    assert describe(read_resume_report(tmp_path)).count(NO_RNG) == 1
