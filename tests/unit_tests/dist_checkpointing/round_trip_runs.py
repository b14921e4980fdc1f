"""Runs of ``megatron.training`` that save what they loaded, before they go on.

    torchrun … -m tests.unit_tests.dist_checkpointing.round_trip_runs TASKS

TASKS is a JSON list of ``{"kind", "arguments", "log"}``: runs one after the other in the processes
of one launch. A run with ``--load DIR`` resumes from iteration 3 there and writes to ``--save``
what ``load_checkpoint`` made of model, optimizer, scheduler and random state. ``log`` gets what the
steps computed.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch

from tests.cpu_megatron.pretrain import prepare, run
from tests.unit_tests.optimizer.resume_runs import write_tracker

LAST_SAVED = 3


def main() -> None:
    """Do the tasks in order."""
    prepare(simulate_devices=False)
    from megatron.training import checkpointing, training

    def load_and_save(model, optimizer, scheduler, **kwargs):
        iteration, flops = checkpointing.load_checkpoint(model, optimizer, scheduler, **kwargs)
        checkpointing.save_checkpoint(iteration, model, optimizer, scheduler, flops)
        return iteration, flops

    # Memory that nobody initialised then holds NaN instead of what happens to be there.
    torch.use_deterministic_algorithms(True, warn_only=True)
    with mock.patch.object(training, 'load_checkpoint', load_and_save):
        for task in json.loads(Path(sys.argv[1]).read_text()):
            load = [a.partition('=')[2] for a in task['arguments'] if a.startswith('--load=')]
            for checkpoints in load:
                write_tracker(Path(checkpoints), LAST_SAVED)
            run(task['kind'], task['arguments'], task['log'])
            torch.distributed.barrier()


if __name__ == '__main__':
    main()
