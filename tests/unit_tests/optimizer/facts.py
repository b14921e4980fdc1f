"""What becomes of the optimizer over a save and a load, fact by fact.

    python -m tests.unit_tests.optimizer.facts [--results FILE]

prints one line a fact: whether it is as it should be, and what was found. ``MEGATRON_OVERLAY=0``
shows what stock megatron-core does, ``CPU_MEGATRON_OPTIMIZER=fused_adam`` takes an Adam with
FusedAdam's conventions; both are told in the first line. Facts that differ between ranks need two
processes, as ``torchrun --nproc-per-node 2`` starts them.
"""

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.unit_tests.optimizer import fact_runs
from tools.checkpoint.common.progress import progress_bar

RANK, WORLD_SIZE = (int(os.environ.get(*given)) for given in (('RANK', '0'), ('WORLD_SIZE', '1')))


def main() -> int:
    """Print the table; 0 when every fact is as it should be, or the results went to a file."""
    parser = argparse.ArgumentParser(description='What becomes of the optimizer over a resume.')
    parser.add_argument('--results', type=Path, help='write the table as JSON')
    results_file = parser.parse_args().results
    logging.disable(logging.WARNING)
    results = one_rank() if WORLD_SIZE == 1 else several_ranks()
    if RANK != 0:
        return 0
    if results_file:
        results_file.write_text(json.dumps(results))
    print_table(results)
    return 0 if results_file or all(holds for holds, *_ in results.values()) else 1


def one_rank() -> dict[str, list]:
    """For each fact whether it holds, its text, and what was found where it doesn't."""
    from tests.unit_tests.optimizer import facts_one_rank  # noqa: F401  # registers them

    with tempfile.TemporaryDirectory() as scratch:
        return {
            name: check(run, text, Path(scratch) / name.replace(' ', '_'))[:3]
            for name, text, run in facts_in_order()
        }


def facts_in_order() -> Iterator[tuple[str, str, Callable]]:
    """Name, text and check of each fact; a bar on rank 0's terminal counts them."""
    with progress_bar(len(fact_runs.FACTS), 'facts', unit='fact', rank=RANK) as progress:
        for fact in fact_runs.FACTS:
            yield fact
            progress.update()


def several_ranks() -> dict[str, list]:
    """As :func:`one_rank`; on rank 0, what the first rank found that failed.

    Each fact has a process group of its own. A rank that fails closes it, and so ends the waiting
    of the others, who would find nothing but that.
    """
    from tests.unit_tests.optimizer import facts_two_ranks  # noqa: F401  # registers them

    store, _, _ = next(dist.rendezvous('env://'))
    if RANK == 0:
        store.set('scratch', tempfile.mkdtemp())
    scratch = Path(store.get('scratch').decode())
    found = {}
    for name, text, run in facts_in_order():
        with process_group(dist.PrefixStore(name, store)):
            found[name] = check(run, text, scratch / name.replace(' ', '_'))
    store.set(f'found {RANK}', json.dumps(found))
    if RANK != 0:
        return found
    ranks = [json.loads(store.get(f'found {rank}')) for rank in range(WORLD_SIZE)]
    shutil.rmtree(scratch, ignore_errors=True)
    return {name: min((rank[name] for rank in ranks), key=_failed_first)[:3] for name in found}


def _failed_first(result: list) -> tuple:
    holds, _, _, ended = result
    return holds, ended


@contextmanager
def process_group(store: dist.Store) -> Iterator[None]:
    """A default process group inside the block, which every rank leaves by itself."""
    from megatron.core import parallel_state

    dist.init_process_group(
        'gloo', store=store, rank=RANK, world_size=WORLD_SIZE, timeout=timedelta(minutes=20)
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def check(run, text: str, path: Path) -> list:
    """Whether it holds, the fact's text, what was found where it doesn't, and when it ended."""
    try:
        run(path)
    except (Exception, CheckpointException) as error:
        return [False, text, describe(error), time.time()]
    return [True, text, '', time.time()]


def describe(error: BaseException) -> str:
    """One line; a message is made up of the place and the line for errors that have none."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error) or f'{frame.line} (in {frame.name})'
    return f'{type(error).__name__}: {message}'.split('\n')[0]


def print_table(results: dict) -> None:
    """One line a fact, under a line that says what was looked at."""
    import megatron.core

    overlay = 'stock' if os.environ.get('MEGATRON_OVERLAY') == '0' else 'with the overlay'
    adam = 'FusedAdam convention' if fact_runs.FUSED else 'torch AdamW'
    ranks = '' if WORLD_SIZE == 1 else f', {WORLD_SIZE} ranks'
    print(f'megatron-core {megatron.core.__version__} {overlay}, {adam}{ranks}')
    for name, (holds, text, found) in results.items():
        number = name.split()[0]
        print(f'  {number:>2} {"as it should be" if holds else "WRONG":15}  {text}')
        if found:
            print(f'{"":22}{found[:160]}')


if __name__ == '__main__':
    sys.exit(main())
