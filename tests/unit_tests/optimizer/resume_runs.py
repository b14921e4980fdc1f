"""Runs of ``megatron.training`` one after the other in the processes of one launch.

    torchrun … -m tests.unit_tests.optimizer.resume_runs TASKS

TASKS is a JSON list of ``{"name", "kind", "arguments", "result"}``. Each run's record goes to
``<result>.<rank>``, an error to the same file as text. ``"--load"`` in the arguments loads the
checkpoint of the third iteration, or of the task's ``"iteration"``.
"""

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path

import torch

from tests.cpu_megatron import warm
from tests.cpu_megatron.pretrain import prepare, run


def main() -> None:
    """Do the tasks in order; a task that fails doesn't keep the next ones from running."""
    prepare(simulate_devices=True)
    for task in json.loads(Path(sys.argv[1]).read_text()):
        if '--load' in task['arguments']:
            load = task['arguments'].index('--load') + 1
            write_tracker(Path(task['arguments'][load]), task.get('iteration', 3))
        try:
            result = dataclasses.asdict(run(task['kind'], task['arguments']))
        except (Exception, SystemExit):
            result = traceback.format_exc(limit=-4)
        torch.save(result, f'{task["result"]}.{os.environ["RANK"]}')
        torch.distributed.barrier()


def write_tracker(checkpoints: Path, iteration: int) -> None:
    """Make ``iteration`` the one that is loaded."""
    (checkpoints / 'latest_checkpointed_iteration.txt').write_text(str(iteration))


def launch(nproc: int, tasks: list[dict], file: Path, **env: str) -> None:
    """Start the processes that do the tasks; ``file`` is written for them."""
    file.write_text(json.dumps(tasks))
    warm.run(nproc, 'tests.unit_tests.optimizer.resume_runs', str(file), env=env)


def read_records(result: Path) -> list[dict]:
    """The record of each rank of a run.

    Raises:
        AssertionError: the run failed, with its traceback.
    """
    files = sorted(result.parent.glob(f'{result.name}.[0-9]'))
    records = [torch.load(file, map_location='cpu') for file in files]
    failed = [record for record in records if isinstance(record, str)]
    assert records and not failed, failed[0]
    return records


def whole_tensors(records: list[dict], when: str = 'loaded') -> dict[str, torch.Tensor]:
    """Each state of each parameter put together from the ranks' shards.

    Args:
        records: of all ranks.
        when: ``'loaded'``, before the first step, or ``'trained'``, after the last.
    """
    shards: dict[str, dict[int, torch.Tensor]] = {}
    for record in records:
        for key, (start, shard) in record[when].items():
            shards.setdefault(key, {})[start if shard.dim() else 0] = shard
    return {
        key: torch.cat([parts[start] for start in sorted(parts)]) if parts[0].dim() else parts[0]
        for key, parts in shards.items()
    }


if __name__ == '__main__':
    main()
