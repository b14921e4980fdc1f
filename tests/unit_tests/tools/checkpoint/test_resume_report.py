import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.key_arguments import LEGACY_WAY_OUT
from megatron.core.dist_checkpointing.unstored_state import (
    NO_OPTIMIZER,
    NO_RNG,
    OPTIMIZER,
    RNG,
)

from tests.cpu_megatron import warm
from tests.cpu_megatron.session import Training, distributed_optimizer, gpt, model_parallel
from tests.cpu_megatron.torchrun import REPOSITORY
from tests.unit_tests.optimizer.leaked_steps import save_with_leaked_steps
from tools.checkpoint.inspection.resume import ResumeReport, describe, read_resume_report
from tools.checkpoint.resume_report import main


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory) -> Path:
    """One checkpoint a format, after two steps; 'leaked' has steps in the common state."""
    path = tmp_path_factory.mktemp('checkpoints')
    with model_parallel():
        for name, experts in (('dense', None), ('moe', 4)):
            run = Training.start(
                gpt(bf16=True, num_moe_experts=experts), distributed_optimizer(bf16=True)
            )
            run.train(2)
            for sharding_type in ('dp_reshardable', 'fully_reshardable'):
                run.save(path / f'{name} {sharding_type}', sharding_type)
            if experts is None:
                parameters = len(list(run.model[0].parameters()))
                save_with_leaked_steps(run, path / 'leaked')
    (path / 'leaked parameters').write_text(str(parameters))
    return path


@pytest.mark.parametrize('sharding_type', ['dp_reshardable', 'fully_reshardable'])
@pytest.mark.parametrize('name', ['dense', 'moe'])
def test_format_and_step(checkpoints, name, sharding_type):
    directory = checkpoints / f'{name} {sharding_type}'
    unstored = {RNG: NO_RNG}  # which `Training` leaves out
    assert read_resume_report(directory) == ResumeReport(
        directory, 2, sharding_type, {2}, unstored=unstored
    )


def test_leaked_steps_are_counted(checkpoints):
    report = read_resume_report(checkpoints / 'leaked')
    # padding between parameters has a step, too
    assert report.leaked_steps >= int((checkpoints / 'leaked parameters').read_text())
    assert report.steps == {2}
    assert 'leaked values are ignored' in describe(report)
    assert 'refused: duplicate values' in describe(report)


def test_real_run_with_offload_and_tracker(tmp_path):
    warm.run(
        1,
        'tests.cpu_megatron.pretrain',
        *('gpt', '--train-iters', '3', '--save', str(tmp_path)),
        *('--bf16', '--use-distributed-optimizer', '--use-precision-aware-optimizer'),
        *('--optimizer-cpu-offload', '--optimizer-offload-fraction', '0.5'),
        env={'MEGATRON_OVERLAY': '0', 'CPU_MEGATRON_OPTIMIZER': 'fused_adam'},
    )
    report = read_resume_report(tmp_path)
    directory = tmp_path / 'iter_0000003'
    assert report == ResumeReport(directory, 3, 'dp_reshardable', {3}, offload_fraction=0.5)
    text = describe(report)
    assert 'Adam in host memory starts again at step 1' in text
    assert 'FusedAdam on the GPU stands still' in text


@pytest.mark.parametrize(
    ('report', 'line'),
    [
        (('none', set(), 0, None, False, {OPTIMIZER: NO_OPTIMIZER}), 'weights only: the optimizer'),
        (('fully_reshardable', {4}), 'the next steps are those of the run'),
        (('fully_reshardable', {4, 5}), 'groups disagree on the step'),
        (('fully_reshardable', set()), 'no step is stored'),
        (('fully_sharded_model_space', {4}), 'convert_ckpt_optimizer.py --load-dir c '),
        (('fully_reshardable', {4}, 0, 0.0), 'megatron-core stores none'),
        (('fully_reshardable', {4}, 0, None, True), 'by layers is left to megatron-core'),
    ],
)
def test_what_resuming_does(report, line):
    assert line in describe(ResumeReport(Path('c'), 4, *report))


@pytest.mark.parametrize('distributed', [[], ['--use-distributed-optimizer']])
def test_the_step_of_any_optimizer_is_found(distributed, tmp_path):
    options = ('--train-iters', '3', '--save', str(tmp_path), '--ckpt-format', 'torch_dist')
    warm.run(1, 'tests.cpu_megatron.pretrain', 'gpt', *options, *distributed)
    report = read_resume_report(tmp_path)
    assert report.steps == {3} and report.loads
    assert (report.sharding_type == 'plain') is (not distributed)


def test_what_is_no_checkpoint(tmp_path, checkpoints, capsys):
    legacy, dangling, damaged = (tmp_path / name for name in ('legacy', 'dangling', 'damaged'))
    (legacy / 'mp_rank_00').mkdir(parents=True)
    dangling.mkdir()
    (dangling / 'latest_checkpointed_iteration.txt').write_text('7\n')
    damaged.mkdir()
    (damaged / 'metadata.json').write_text('{}')
    (damaged / '.metadata').write_bytes(b'no')
    expected = {
        tmp_path / 'absent': "doesn't exist",
        tmp_path: 'no metadata.json and no latest_checkpointed_iteration.txt',
        legacy: f'expected torch_dist; {LEGACY_WAY_OUT}',
        dangling: 'names 7, but',
        damaged: '.metadata: not DCP metadata',
    }
    for path, message in expected.items():
        with pytest.raises(CheckpointingException, match=message):
            read_resume_report(path)
        assert main([str(path)]) == 1
        out, err = capsys.readouterr()
        assert not out and err.count('\n') == 1 and message in err


def test_reading_runs_nothing_from_the_file(tmp_path, checkpoints):
    source = checkpoints / 'dense fully_reshardable'
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    touched = tmp_path / 'touched'
    torch.save({'iteration': 2, 'args': _Touches(touched)}, tmp_path / 'common.pt')
    with pytest.raises(CheckpointingException, match='nothing that has to be run'):
        read_resume_report(tmp_path)
    assert not touched.exists()


class _Touches:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize('as_module', [True, False], ids=['module', 'file'])
def test_as_a_program(tmp_path, checkpoints, as_module):
    """As a module where the overlay is installed, and as a file in a checkout."""
    program = [str(REPOSITORY / 'megatron/core/optimizer/distrib_optimizer.py')]
    environment = {**os.environ}
    if as_module:
        program = ['-m', 'megatron.core.optimizer.distrib_optimizer']
        (tmp_path / 'sitecustomize.py').write_text(
            'import megatron_overlay; megatron_overlay.activate()'
        )
        environment['PYTHONPATH'] = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    result = subprocess.run(
        [sys.executable, *program, str(checkpoints / 'dense dp_reshardable')],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, '')
    assert 'optimizer state  dp_reshardable' in result.stdout
