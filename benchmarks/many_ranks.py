"""Planning and metadata work for many chunks and many ranks, simulated in one process.

    python benchmarks/many_ranks.py [--only PART …] [--chunks N …] [--ranks N …] [--dir /dev/shm]

A checkpoint of a mixture-of-experts model is made by hand: metadata of as many chunks as asked for,
in files that are long enough and empty, as if so many ranks had saved it. On it are done, by the
product's own functions: a merge's and an optimizer conversion's reading of metadata, plan, orders,
plans of ranks, results, metadata of the output and checks; what each rank does for a GPT checkpoint
that goes into a hybrid model; the inspector. No tensor is read or written. What ranks send is
pickled and unpickled, and counted. Of the ranks beside rank 0 one in the middle is measured.

Prints a table, and draws the growth into ``many_ranks.svg`` beside this file.
"""

import argparse
import importlib
import json
import multiprocessing
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import megatron_overlay
from benchmarks.growth_plot import draw
from benchmarks.hollow_checkpoints import STAGES, sizes, write_checkpoint
from tools.checkpoint.common.progress import peak_memory, resident_memory
from tools.checkpoint.inspect_checkpoint import inspect_checkpoint
from tools.checkpoint.merge import prepare as merge_prepare
from tools.checkpoint.merge.collective import Prepared, check_visible, orders
from tools.checkpoint.merge.inputs import explicit_inputs
from tools.checkpoint.merge.places import stored_places
from tools.checkpoint.merge.ranks import Ranks
from tools.checkpoint.merge.request import MergeRequest
from tools.checkpoint.merge.validate import validate_output
from tools.checkpoint.merge.writer import MergePlanner, MergeWriter
from tools.checkpoint.optimizer_layouts import prepare as conversion_prepare

PARTS = ('merge', 'conversion', 'inspector', 'load')  # the last one needs megatron-core


class Clock:
    """Processor time of each step, and the most memory above what was there before the first."""

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}
        self.sent: dict[str, int] = {}
        self._before = resident_memory()

    def __call__(self, step: str, action: Callable):
        """Measure a step; its result."""
        begin = time.process_time()
        result = action()
        self.steps[step] = self.steps.get(step, 0) + time.process_time() - begin
        return result

    def send(self, step: str, value: object):
        """A copy, as another rank gets it."""
        data = self(step, lambda: pickle.dumps(value))
        self.sent[step] = self.sent.get(step, 0) + len(data)
        return self(step, lambda: pickle.loads(data))

    def figures(self) -> dict:
        """All of it; seconds of rank 0 and of another rank."""
        other = sum(seconds for step, seconds in self.steps.items() if 'a rank' in step)
        return {
            'steps': self.steps,
            'seconds': (sum(self.steps.values()) - other, other),
            'sent': self.sent,
            'memory': peak_memory() - self._before,
        }


def merge(root: Path, ranks: int, clock: Clock) -> None:
    """A merge of two inputs."""
    inputs = explicit_inputs([root / 'one/iter_0000001', root / 'two/iter_0000001'], [0.5, 0.5])
    request = MergeRequest(lambda: inputs, root / 'out', 1, dry_run=True, balance_rank_work=True)
    prepared = clock('prepare', lambda: merge_prepare.prepare(request, ranks))
    _carry_out(root, ranks, prepared, clock)


def conversion(root: Path, ranks: int, clock: Clock) -> None:
    """An optimizer conversion, in as many ranks as saved."""
    request = conversion_prepare.ConversionRequest(
        root / 'one/iter_0000001', root / 'out', dry_run=True
    )
    prepared = clock('prepare', lambda: conversion_prepare.prepare(request, ranks))
    _carry_out(root, ranks, prepared, clock)


def _carry_out(root: Path, ranks: int, prepared: Prepared, clock: Clock) -> None:
    found = clock('orders', lambda: orders(prepared, Ranks(size=ranks)))
    sent = [clock.send('orders', one) for one in found]
    _write(root, prepared.plan, [one.share for one in sent], clock)
    clock('a rank', lambda: check_visible(sent[ranks // 2]))


def _write(root: Path, plan, shares: list, clock: Clock) -> None:
    """What is written besides tensors: plans of ranks, results, metadata, checks, proof."""
    staging = root / 'staging'
    staging.mkdir()
    results = []
    for rank, share in enumerate(shares):

        def plans(share=share):
            planner = MergePlanner(share, None, 1, object, threading.Event())
            planner.finish_plan(SavePlan([]))
            return planner

        own = rank == len(shares) // 2
        places = (clock('a rank', plans) if own else plans()).places
        at = 0
        for number, job in enumerate(share.entries):
            places.lengths[number] = getattr(job, 'nbytes', 0) or job.piece.length
            places.put(number, f'__{rank}_0.distcp', at)
            at += places.lengths[number]
        with open(staging / f'__{rank}_0.distcp', 'wb') as file:
            file.truncate(at)
        results.append([clock.send('results', places)])
    planner = MergePlanner(shares[0], plan, 1, object, threading.Event())
    writer = MergeWriter(staging, root / 'out', 1, threading.Event())
    writer._plan = plan
    clock.send('plans', planner.create_global_plan([planner.create_local_plan()])[1])
    clock('metadata', lambda: writer.finish(Metadata({}), results))
    storage = clock('checks', lambda: validate_output(staging, plan))
    clock.send('proof', clock('proof', lambda: stored_places(plan, storage))[len(shares) // 2])


def load(root: Path, ranks: int, clock: Clock) -> None:
    """The steps that a GPT checkpoint adds to a load, of weights, on rank 0 and on one rank."""
    from megatron.core.dist_checkpointing import (
        checkpoint_layout,
        gpt_checkpoint_interop,
        read_record,
        validation,
    )

    directory = str(root / 'one/iter_0000001')
    layout = clock('prepare', lambda: checkpoint_layout.read_checkpoint_layout(directory))
    layout = clock.send('layout', layout)
    state, pattern = _request_of_a_rank(layout, ranks), '*E' * layout.num_layers
    interop = gpt_checkpoint_interop
    maps = clock('a rank', lambda: interop.gpt_compatible_layer_maps(pattern, layout))
    retarget = interop.retarget_sharded_state_dict_to_gpt_checkpoint
    clock('a rank', lambda: retarget(state, maps))
    needed = clock('a rank', lambda: checkpoint_layout.check_sources(state, layout))
    own = clock('a rank', lambda: read_record._digests(needed))
    # what each rank does with what all have sent
    everyones = torch.arange(len(needed) * ranks)
    clock('of all, a rank', lambda: torch.isin(own, everyones))
    shards = list(state.values()) * ranks
    clock('of all, a rank', lambda: validation.partial_state(shards))


def _request_of_a_rank(layout, ranks: int) -> dict:
    """Weights of a hybrid model: of the first stage and the first experts, and the last norm."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    state, stages = {}, STAGES[ranks]
    for key, shape in layout.sizes.items():
        prefix, _, part = key.partition('decoder.layers.')
        for layer in range(layout.num_layers // stages) if part else [0]:
            hybrid = 2 * layer + ('self_attention' not in part)
            name = f'decoder.layers.{hybrid}.{part}' if part else prefix
            name = name.replace('final_layernorm', 'final_norm')
            rest, experts = (shape[1:] if part else shape), 1
            if 'experts' in part:
                rest, experts = rest[1:], rest[0]
            for expert in range(max(experts * stages // ranks, 1)):
                of_expert = [(0, expert, experts)] if 'experts' in part else []
                state[f'{name}:{expert}'] = ShardedTensor.from_rank_offsets(
                    name, torch.empty(rest), *of_expert, prepend_axis_num=len(of_expert)
                )
    return state


def inspector(root: Path, ranks: int, clock: Clock) -> None:
    """The inspector's summary."""
    clock('prepare', lambda: inspect_checkpoint(root / 'one/iter_0000001'))


def measure(part: str, ranks: int, chunks: int, directory: Path) -> dict:
    """The figures of one part, and the number of chunks or pieces of state that there are."""
    layers, experts = sizes(chunks // (3 if part == 'conversion' else 1))
    optimizer = part in ('conversion', 'inspector')
    with tempfile.TemporaryDirectory(prefix='many-ranks-', dir=directory) as root:
        for name in ('one', 'two') if part == 'merge' else ('one',):
            place = Path(root, name, 'iter_0000001')
            _in_a_process(write_checkpoint, place, ranks, layers, experts, optimizer)
        figures = _in_a_process(_figures, part, Path(root), ranks)
    found = layers * (2 * experts + 5) + 3
    states = {'conversion': 3, 'inspector': 4}.get(part, 1)
    return figures | {'part': part, 'ranks': ranks, 'chunks': found * states}


def _in_a_process(function: Callable, *arguments: object):
    """Forked, with all imported, so that its memory is its own."""
    with multiprocessing.get_context('fork').Pool(1) as pool:
        return pool.apply(function, arguments)


def _figures(part: str, root: Path, ranks: int) -> dict:
    clock = Clock()
    globals()[part](root, ranks, clock)
    return clock.figures()


def row(figures: dict) -> str:
    """Of the table."""
    chunks, (first, other) = figures['chunks'], figures['seconds']
    return (
        f'| {figures["part"]} | {figures["ranks"]} | {chunks} | {first:.2f} '
        f'| {first / chunks * 1e6:.0f} | {other * 1e3:.1f} '
        f'| {sum(figures["sent"].values()) / chunks:.0f} | {figures["memory"] / chunks:.0f} |'
    )


def main() -> None:
    """Print the table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', nargs='+', choices=PARTS, default=PARTS)
    parser.add_argument('--ranks', nargs='+', type=int, choices=STAGES, default=[1, 64, 1024])
    parser.add_argument('--chunks', nargs='+', type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument('--dir', type=Path, default=Path('/dev/shm'), help='for metadata')
    parser.add_argument('--figures', type=Path, help='keep them here, and draw what is there, too')
    args = parser.parse_args()
    found = []
    if args.figures and args.figures.exists():
        found = [json.loads(line) for line in args.figures.read_text().splitlines()]
    print(
        '| work | ranks | chunks | rank 0, s | µs a chunk | another rank, ms | sent, bytes a chunk '
        '| memory, bytes a chunk |\n|---|---|---|---|---|---|---|---|'
    )
    for part in args.only:
        if part == 'load':
            megatron_overlay.activate()
            importlib.import_module('megatron.core.dist_checkpointing')
        for chunks in args.chunks:
            for ranks in args.ranks:
                found.append(measure(part, ranks, chunks, args.dir))
                print(row(found[-1]), flush=True)
                if args.figures:
                    args.figures.write_text('\n'.join(map(json.dumps, found)) + '\n')
    Path(__file__).with_suffix('.svg').write_text(draw(found))


if __name__ == '__main__':
    main()
