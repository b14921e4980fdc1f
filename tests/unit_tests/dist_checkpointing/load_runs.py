"""Runs of ``megatron.training`` that save what they loaded, before they go on.

    torchrun … -m tests.unit_tests.dist_checkpointing.load_runs TASKS

TASKS is a JSON list of ``{"kind", "arguments", "log", "record"}``: runs one after the other in the
processes of one launch. A run with ``--load=DIR`` resumes from iteration 3 there, and one with
``--pretrained-checkpoint=DIR`` begins with it. What
``load_checkpoint`` made of model, optimizer, scheduler and random state goes to ``--save``, or,
beside the initialised model, to ``record`` where that is given. ``log`` gets what the steps
computed.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from megatron.core.dist_checkpointing import load_common_state_dict

from tests.cpu_megatron import warm
from tests.cpu_megatron.load_and_save_again import recording_loads
from tests.cpu_megatron.pretrain import prepare, run
from tests.unit_tests.optimizer.resume_runs import write_tracker

LAST_SAVED = 3


def launch(nproc: int, tasks: list[dict], file: Path, **env: str) -> None:
    """Start the processes that do the tasks; ``file`` is written for them."""
    file.write_text(json.dumps(tasks))
    warm.run(nproc, 'tests.unit_tests.dist_checkpointing.load_runs', str(file), env=env)


def schedules(checkpoint: Path) -> dict[str, set[float]]:
    """What the groups of parameters have of the schedule, all values of each setting."""
    groups = load_common_state_dict(checkpoint)['optimizer']['optimizer']['param_groups']
    return {name: {group[name] for group in groups} for name in ('lr', 'max_lr', 'weight_decay')}


@contextmanager
def saving_loads() -> Iterator[None]:
    """Save to ``--save`` after every ``load_checkpoint`` of training inside the block."""
    from megatron.training import checkpointing, training

    def load_and_save(model, optimizer, scheduler, **kwargs):
        iteration, flops = checkpointing.load_checkpoint(model, optimizer, scheduler, **kwargs)
        checkpointing.save_checkpoint(iteration, model, optimizer, scheduler, flops)
        return iteration, flops

    with mock.patch.object(training, 'load_checkpoint', load_and_save):
        yield


def main() -> None:
    """Do the tasks in order."""
    prepare(simulate_devices=False)
    # Memory that nobody initialised then holds NaN instead of what happens to be there.
    torch.use_deterministic_algorithms(True, warn_only=True)
    for task in json.loads(Path(sys.argv[1]).read_text()):
        options = (argument.partition('=') for argument in task['arguments'])
        load = [path for name, _, path in options if name in ('--load', '--pretrained-checkpoint')]
        for checkpoints in load:
            write_tracker(Path(checkpoints), LAST_SAVED)
        with recording_loads(task['record']) if 'record' in task else saving_loads():
            run(task['kind'], task['arguments'], task['log'])
        torch.distributed.barrier()


if __name__ == '__main__':
    main()
