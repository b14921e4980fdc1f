"""bf16 and fp32 parameters in one group, all of one size: stock saves, the overlay loads.

    python -m tests.unit_tests.optimizer.mixed_groups {save,load} DIRECTORY

``save`` is for one rank with ``MEGATRON_OVERLAY=0``. DIRECTORY gets what the runs computed.
"""

import os
import sys
from pathlib import Path

import torch

from tests.cpu_megatron.recorder import model_state
from tests.unit_tests.optimizer.fact_runs import FORMATS, model_parallel, start, start_warm
from tests.unit_tests.optimizer.facts_one_rank import with_fp32_norms

OPTIONS = {'prepare_model': with_fp32_norms, 'model': {'add_bias_linear': False}}


def save(directory: Path) -> None:
    """Train, save in each format and train on."""
    with model_parallel():
        run = start(**OPTIONS)
        run.train(3)
        for kind in FORMATS:
            run.save(directory / kind, kind)
        losses = run.train(3)
        torch.save((losses, model_state(run.model)), directory / 'stock')


def load(directory: Path) -> None:
    """Load each, or be refused, and train on."""
    found = {}
    for kind in FORMATS:
        with model_parallel(seed=4321):
            run = start_warm(**OPTIONS)
            try:
                run.load(directory / kind)
                found[kind] = run.train(3), model_state(run.model)
            except Exception as error:
                found[kind] = f'{type(error).__name__}: {error}', {}
    ranks, rank = os.environ.get('WORLD_SIZE', '1'), os.environ.get('RANK', '0')
    torch.save(found, directory / f'loaded by {rank} of {ranks}')


if __name__ == '__main__':
    {'save': save, 'load': load}[sys.argv[1]](Path(sys.argv[2]))
