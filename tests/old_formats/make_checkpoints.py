"""Make the small checkpoints of old megatron-core releases that the tests convert.

    python -m tests.old_formats.make_checkpoints MEGATRON_LM [CASE ...]

``MEGATRON_LM`` is a git repository of Megatron-LM with its tags ``core_v0.10.0`` to
``core_v0.15.0``. Their trees run as they are under today's torch, from this project's environment
(``make .venv/.ready``); ``train.py`` says what they need without a GPU. Each case trains two
iterations and saves, then trains and saves another two. Written to ``data/``:

* ``CASE.tar.xz``: the checkpoint of iteration 2, as ``--load`` takes it
* ``expected.json``: for each case the losses and gradient norms of all iterations; SHA-256 of every
  weight at iteration 4; and of every optimizer tensor of iteration 2 as core 0.15 itself, the last
  release that loads the old format, saves it in ``fully_reshardable``
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cpu_megatron.torchrun import REPOSITORY
from tests.cpu_megatron.whole_checkpoint import read_tensors
from tests.old_formats.stored import DATA, EXPECTED, digests

_LAST_TO_READ = '0.15.0'
_SIZES = [
    *('--num-layers', '2', '--hidden-size', '16', '--ffn-hidden-size', '32'),
    *('--vocab-size', '32', '--max-position-embeddings', '16', '--lr-decay-iters', '6'),
]
_DISTRIBUTED = ['--use-distributed-optimizer', '--ckpt-format', 'torch_dist']
_MOE = [
    *('--num-layers', '1', '--ffn-hidden-size', '16'),
    *('--num-experts', '4', '--moe-router-topk', '2', '--disable-bias-linear'),
    *('--expert-model-parallel-size', '2'),
]


@dataclass(frozen=True)
class Case:
    """A run: release, number of ranks, Adam ('torch_adam' or 'fused_adam'), arguments.

    Attributes:
        model: arguments, which a run resumed by another release takes, too
    """

    release: str
    ranks: int
    adam: str
    model: list[str]

    def resumed_with(self) -> list[str]:
        """Arguments of a run that goes on from the checkpoint."""
        return [*_SIZES, *_DISTRIBUTED, *self.model, '--train-iters', '6']


CASES = {
    'core-0.14-tp2-dp2': Case(
        '0.14.0', 4, 'fused_adam', ['--bf16', '--swiglu', '--tensor-model-parallel-size', '2']
    ),
    'core-0.14-moe-ep2': Case('0.14.0', 2, 'torch_adam', ['--bf16', '--swiglu', *_MOE]),
    'core-0.13-pp2-fp32': Case(
        '0.13.0',
        2,
        'torch_adam',
        ['--untie-embeddings-and-output-weights', '--pipeline-model-parallel-size', '2'],
    ),
    'core-0.12-moe-ep2': Case('0.12.0', 2, 'fused_adam', ['--bf16', *_MOE]),
    'core-0.10-dp2': Case('0.10.0', 2, 'fused_adam', ['--bf16', '--swiglu']),
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description='Checkpoints of old releases, for the tests.')
    parser.add_argument('megatron_lm', type=Path, help='git repository of Megatron-LM')
    parser.add_argument('cases', nargs='*', metavar='CASE', help='default: all')
    options = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        for name in options.cases or CASES:
            expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
            expected[name] = _make(name, CASES[name], options.megatron_lm, Path(work))
            EXPECTED.write_text(json.dumps(dict(sorted(expected.items())), indent=1) + '\n')


def _make(name: str, case: Case, megatron_lm: Path, work: Path) -> dict:
    saved, log = work / name, work / f'{name}.log'
    often = ['--save', str(saved), '--save-interval', '2', '--exit-interval', '4']
    _train(megatron_lm, case, case.release, log, ['--ckpt-fully-parallel-save', *often], work)
    tracker = saved / 'latest_checkpointed_iteration.txt'
    tracker.write_text('2')
    with tarfile.open(DATA / f'{name}.tar.xz', 'w:xz', preset=9) as archive:
        for path in (tracker, saved / 'iter_0000002'):
            archive.add(path, path.relative_to(saved))
    return {
        'steps': [json.loads(line) for line in log.read_text().splitlines()],
        'optimizer': _by_core(megatron_lm, case, saved, work),
    }


def _by_core(megatron_lm: Path, case: Case, saved: Path, work: Path) -> dict[str, str]:
    """What core itself makes of the optimizer state, in the last release that reads it."""
    twin = work / f'{saved.name}-twin'
    arguments = ['--cpu-only-save', '--load', str(saved), '--save', str(twin)]
    arguments += ['--dist-ckpt-optim-fully-reshardable']
    # without Transformer Engine and with torch's Adam it can't load optimizer state
    environment = {'CPU_MEGATRON_OPTIMIZER': 'fused_adam'}
    _train(megatron_lm, case, _LAST_TO_READ, work / 'log', arguments, work, environment)
    return digests(read_tensors(str(twin / 'iter_0000002')))


def _train(
    megatron_lm: Path,
    case: Case,
    release: str,
    log: Path,
    arguments: list[str],
    work: Path,
    environment: Mapping[str, str] | None = None,
) -> None:
    tree = work / f'core_v{release}'
    if not tree.exists():
        tree.mkdir()
        command = ['git', '-C', str(megatron_lm), 'archive', tree.name, 'megatron']
        archive = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(['tar', 'x', '-C', str(tree)], check=True, input=archive)
    launcher = ['torch.distributed.run', '--standalone', f'--nproc-per-node={case.ranks}']
    subprocess.run(
        [
            *(sys.executable, '-W', 'ignore', '-m', *launcher, '-m', 'tests.old_formats.train'),
            *(str(log), *case.resumed_with(), *arguments),
        ],
        check=True,
        stdout=sys.stderr,
        env={
            **os.environ,
            'CPU_MEGATRON_OPTIMIZER': case.adam,
            'OMP_NUM_THREADS': '1',
            'PYTHONPATH': os.pathsep.join([str(tree), str(REPOSITORY)]),
            **(environment or {}),
        },
    )


if __name__ == '__main__':
    main()
