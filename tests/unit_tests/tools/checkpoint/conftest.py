"""Checkpoints that several of the tools' tests read; signal handlers as in a shell."""

import signal

import pytest

from tests.unit_tests.tools.checkpoint.handmade import WEIGHTS, plain_merge, write_run
from tests.unit_tests.tools.checkpoint.inspect_runs import write_runs
from tests.unit_tests.tools.checkpoint.pp_vpp_runs import run

EXTRA = {'decoder.layers.mlp.linear_fc1._extra_state': b'never unpickled \x80\x05.'}

UNEVEN = (
    '--num-layers 6 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 '
    '--decoder-last-pipeline-num-layers 1 --exit-interval 2'
)


@pytest.fixture
def default_signal_handlers():
    """What Python starts with; under nohup and in background jobs some are ignored."""
    before = {
        signum: signal.signal(signum, handler)
        for signum, handler in (
            (signal.SIGINT, signal.default_int_handler),
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGHUP, signal.SIG_DFL),
        )
    }
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture(scope='session')
def five(tmp_path_factory):
    """Root, paths and tensors of five checkpoints of one bf16 run with an fp32 router bias."""
    root = tmp_path_factory.mktemp('five')
    paths, models = write_run(root, [100, 200, 300, 400, 500], extra_states=EXTRA)
    return root, paths, models


@pytest.fixture(scope='session')
def three(tmp_path_factory):
    """Paths and tensors of three checkpoints of one bf16 run."""
    return write_run(tmp_path_factory.mktemp('three'), [100, 200, 300])


@pytest.fixture(scope='session')
def expected(three):
    """What these are by ``WEIGHTS``."""
    return plain_merge(three[1], WEIGHTS)


@pytest.fixture(scope='session')
def pp4(tmp_path_factory):
    """PP 4 with 1, 2, 2, 1 layers, bf16 with fp32 masters, tied embeddings, torch AdamW."""
    root = tmp_path_factory.mktemp('pp4') / 'source'
    run(4, UNEVEN, f'--bf16 --save {root}')
    return root


@pytest.fixture(scope='session')
def pp4_tp2(tmp_path_factory):
    """The same with TP 2, from other initial weights."""
    root = tmp_path_factory.mktemp('pp4_tp2') / 'source'
    run(8, UNEVEN, f'--bf16 --tensor-model-parallel-size 2 --seed 7 --save {root}')
    return root


@pytest.fixture(scope='session')
def vpp(tmp_path_factory):
    """PP 2 x VPP 2 with one layer a chunk, fp32, untied, FusedAdam's convention."""
    root = tmp_path_factory.mktemp('vpp') / 'source'
    run(
        2,
        '--num-layers 4 --pipeline-model-parallel-size 2 --exit-interval 2 '
        '--num-layers-per-virtual-pipeline-stage 1 --untie-embeddings-and-output-weights',
        f'--save {root}',
        optimizer='fused_adam',
    )
    return root


@pytest.fixture(scope='session')
def real(tmp_path_factory):
    """Checkpoints by name, each of a run of one or two steps or of a model alone."""
    return write_runs(tmp_path_factory.mktemp('real'))
