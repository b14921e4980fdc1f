"""Planning and metadata work for many chunks and many ranks, simulated in one process a figure.

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
import json
import math
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

PARTS = ('merge', 'conversion', 'load', 'inspector')
HIDDEN = 64
# Ranks that saved the checkpoint: pipeline stages and expert-parallel ranks; one tensor-parallel.
STAGES = {1: 1, 8: 2, 64: 4, 1024: 16}


def sizes(part: str, chunks: int) -> tuple[int, int]:
    """Layers and experts, for about as many chunks; a third of them where they have three states.

    In the optimizer's buckets each expert is a piece of every state, as it is a chunk of a weight.
    """
    layers = 16 << max(round(math.log10(chunks)) - 3, 0)
    pieces = chunks / (3 if part == 'conversion' else 1)
    return layers, max(round((pieces / layers - 6) / 2 / 64), 1) * 64


def weights(layers: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Weights of a GPT in the order of registration, layers and experts stacked."""
    layer = 'decoder.layers'
    return {
        'embedding.word_embeddings.weight': (512, HIDDEN),
        f'{layer}.self_attention.linear_proj.weight': (layers, HIDDEN, HIDDEN),
        f'{layer}.self_attention.linear_qkv.layer_norm_weight': (layers, HIDDEN),
        f'{layer}.self_attention.linear_qkv.weight': (layers, 3 * HIDDEN, HIDDEN),
        f'{layer}.pre_mlp_layernorm.weight': (layers, HIDDEN),
        f'{layer}.mlp.router.weight': (layers, 2, HIDDEN),
        f'{layer}.mlp.experts.experts.linear_fc1.weight': (layers, experts, 4, HIDDEN),
        f'{layer}.mlp.experts.experts.linear_fc2.weight': (layers, experts, HIDDEN, 2),
        'decoder.final_layernorm.weight': (HIDDEN,),
        'output_layer.weight': (512, HIDDEN),
    }


class Writer:
    """Metadata of tensors whose chunks lie one after the other in the files of their ranks."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.directory, self.ranks = directory, ranks
        self.ends = [0] * ranks
        self.entries: dict = {}
        self.storage: dict = {}
        self.objects: list[tuple[Path, int, bytes]] = []

    def tensor(self, key: str, shape, dtype, chunks, rank: Callable[[tuple], int]) -> None:
        """Chunks are (offsets, sizes); ``rank`` tells from the offsets who saved one."""
        import torch
        from torch.distributed.checkpoint import metadata as dcp

        stored = []
        for offsets, own in chunks:
            at = torch.Size(offsets)
            stored.append(dcp.ChunkStorageMetadata(at, torch.Size(own)))
            length = math.prod(own) * dtype.itemsize + 1200  # as torch.save's
            self._place(dcp.MetadataIndex(key, at), length, rank(offsets))
        properties = dcp.TensorProperties(dtype=dtype)
        self.entries[key] = dcp.TensorStorageMetadata(properties, torch.Size(shape), stored)

    def object(self, key: str, value: object) -> None:
        """An object of its own, which can be read."""
        import io

        import torch
        from torch.distributed.checkpoint import metadata as dcp

        data = io.BytesIO()
        torch.save([value], data)
        self.entries[key] = dcp.BytesStorageMetadata()
        name, at = self._place(dcp.MetadataIndex(key), len(data.getvalue()), 0)
        self.objects.append((self.directory / name, at, data.getvalue()))

    def _place(self, index, length: int, rank: int) -> tuple[str, int]:
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        name, at = f'__{rank}_0.distcp', self.ends[rank]
        self.storage[index] = _StorageInfo(name, at, length)
        self.ends[rank] += length
        return name, at

    def finish(self, common: dict) -> None:
        """Write the metadata, and files of the lengths that it tells."""
        import torch
        from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

        self.directory.mkdir(parents=True)
        for rank, end in enumerate(self.ends):
            with open(self.directory / f'__{rank}_0.distcp', 'wb') as file:
                file.truncate(end)
        for path, at, content in self.objects:
            with open(path, 'r+b') as file:
                file.seek(at)
                file.write(content)
        meta = StorageMeta(save_id=str(self.directory))
        with open(self.directory / '.metadata', 'wb') as file:
            pickle.dump(Metadata(self.entries, storage_data=self.storage, storage_meta=meta), file)
        torch.save(common, self.directory / 'common.pt')
        (self.directory / 'metadata.json').write_text(
            json.dumps({'sharded_backend': 'torch_dist', 'sharded_backend_version': 1})
        )


def write_checkpoint(
    directory: Path, ranks: int, layers: int, experts: int, optimizer: bool
) -> None:
    """A checkpoint that so many ranks have saved."""
    import torch

    stages, shapes = STAGES[ranks], weights(layers, experts)
    expert_ranks = min(ranks // stages, experts)
    writer = Writer(directory, ranks)

    def saver(offsets: tuple[int, ...]) -> int:
        stage = offsets[0] * stages // layers if len(offsets) > 2 else 0
        expert = offsets[1] * expert_ranks // experts if len(offsets) > 3 else 0
        return stage * (ranks // stages) + expert

    for key, shape in shapes.items():
        writer.tensor(key, shape, torch.bfloat16, list(_stacked(shape)), saver)
    common = {'iteration': 1, 'args': argparse.Namespace(num_layers=layers)}
    if optimizer:
        _write_optimizer(writer, shapes, ranks, expert_ranks)
        common['optimizer'] = {'param_state_sharding_type': 'dp_reshardable'}
        common['content_metadata'] = {'distrib_optim_sharding_type': 'dp_reshardable'}
    writer.finish(common)


def _stacked(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A chunk for each layer and expert."""
    axes = {1: 0, 2: 1 if shape[0] != 512 else 0, 3: 1, 4: 2}[len(shape)]
    rest = shape[axes:]
    for layer in range(shape[0] if axes else 1):
        for expert in range(shape[1] if axes > 1 else 1):
            index = (layer, expert)[:axes]
            yield (*index, *(0 for _ in rest)), (*(1 for _ in index), *rest)


def _write_optimizer(writer: Writer, shapes: dict, ranks: int, expert_ranks: int) -> None:
    """The buckets of each model-parallel position, and its optimizer's settings."""
    stages = STAGES[ranks]
    layers, experts = shapes['decoder.layers.mlp.experts.experts.linear_fc1.weight'][:2]
    numels = {key: math.prod(list(_stacked(shape))[0][1]) for key, shape in shapes.items()}
    dense = [numel for key, numel in numels.items() if '.layers.' in key and 'experts' not in key]
    of_expert = [numel for key, numel in numels.items() if 'experts' in key]
    groups = ranks // stages
    for stage in range(stages):
        own = [numels['embedding.word_embeddings.weight']] if stage == 0 else []
        own += dense * (layers // stages)
        if stage == stages - 1:
            own += [numels['decoder.final_layernorm.weight'], numels['output_layer.weight']]
        _write_bucket(writer, 0, stage, own, groups, stage * groups)
        for expert in range(expert_ranks):
            own = of_expert * (layers // stages * (experts // expert_ranks))
            group, first = expert + expert_ranks * stage, stage * groups + expert
            _write_bucket(writer, 1, group, own, groups // expert_ranks, first)


def _write_bucket(
    writer: Writer, chain: int, group: int, numels: list[int], shares: int, first: int
) -> None:
    import torch

    position = f'chained_{chain}.optimizer.distributed.dp_group_idx_{group}'
    edges = [0]
    for numel in reversed(numels):
        edges.append(edges[-1] + numel)
    numel = edges[-1]
    share = -(-numel // (shares * 128)) * 128
    cut = sorted({*edges, *range(share, numel, share)})
    pieces = [((a,), (b - a,)) for a, b in zip(cut, cut[1:], strict=False)]
    bucket = f'{position}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0'
    for state in ('param', 'exp_avg', 'exp_avg_sq'):
        saver = lambda offsets: first + min(offsets[0] // share, shares - 1)  # noqa: E731
        writer.tensor(f'{bucket}.{state}', (numel,), torch.float32, pieces, saver)
    group_of_parameters = {'step': 1, 'is_expert_parallel': chain == 1}
    writer.object(f'{position}.optimizer/shard_0_1', {'param_groups': [group_of_parameters]})


class Clock:
    """Processor time of each step, and the most memory above what was there before the first."""

    def __init__(self) -> None:
        from tools.checkpoint.common.progress import resident_memory

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
        """All of it."""
        from tools.checkpoint.common.progress import peak_memory

        return {
            'steps': self.steps,
            'sent': self.sent,
            'memory': peak_memory() - self._before,
        }


def merge(root: Path, ranks: int, clock: Clock) -> None:
    """A merge of two inputs."""
    from tools.checkpoint.merge import run
    from tools.checkpoint.merge.inputs import explicit_inputs
    from tools.checkpoint.merge.prepare import Request
    from tools.checkpoint.merge.ranks import Ranks

    inputs = explicit_inputs([root / 'one/iter_0000001', root / 'two/iter_0000001'], [0.5, 0.5])
    request = Request(lambda: inputs, root / 'out', 1, dry_run=True, balance_rank_work=True)
    prepared = clock('prepare', lambda: run.prepare(request, ranks))
    orders = clock('orders', lambda: run._orders(prepared, Ranks(size=ranks)))
    _write(root, prepared.plan, [clock.send('orders', one) for one in orders], clock)
    clock('a rank', lambda: run._check_visible(orders[ranks // 2]))


def conversion(root: Path, ranks: int, clock: Clock) -> None:
    """An optimizer conversion, in as many ranks as saved."""
    from tools.checkpoint.optimizer_layouts import run
    from tools.checkpoint.optimizer_layouts.prepare import Request

    request = Request(root / 'one/iter_0000001', root / 'out', dry_run=True)
    prepared = clock('prepare', lambda: run.prepare(request, ranks))
    orders = [run._Orders(share, prepared.target) for share in prepared.plan.shares]
    _write(root, prepared.plan, [clock.send('orders', one) for one in orders], clock)
    clock('a rank', lambda: run._check_visible(orders[ranks // 2].share))


def _write(root: Path, plan, orders: list, clock: Clock) -> None:
    """What is written besides tensors: plans of ranks, results, metadata, checks, proof."""
    import threading

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan

    from tools.checkpoint.merge.places import stored_places
    from tools.checkpoint.merge.validate import validate_output
    from tools.checkpoint.merge.writer import MergePlanner, MergeWriter

    staging = root / 'staging'
    staging.mkdir()
    results = []
    for rank, order in enumerate(orders):

        def plans(order=order):
            planner = MergePlanner(order.share, None, object, threading.Event())
            planner.finish_plan(SavePlan([]))
            return planner

        own = rank == len(orders) // 2
        places = (clock('a rank', plans) if own else plans()).places
        at = 0
        for number, job in enumerate((*order.share.chunks, *order.share.byte_entries)):
            places.lengths[number] = getattr(job, 'nbytes', 0) or job.piece.length
            places.put(number, f'__{rank}_0.distcp', at)
            at += places.lengths[number]
        with open(staging / f'__{rank}_0.distcp', 'wb') as file:
            file.truncate(at)
        results.append([clock.send('results', places)])
    planner = MergePlanner(orders[0].share, plan, object, threading.Event())
    writer = MergeWriter(staging, root / 'out', 1, threading.Event())
    writer._plan = plan
    clock.send('plans', planner.create_global_plan([planner.create_local_plan()])[1])
    clock('metadata', lambda: writer.finish(Metadata({}), results))
    storage = clock('checks', lambda: validate_output(staging, plan))
    clock.send('proof', clock('proof', lambda: stored_places(plan, storage))[len(orders) // 2])


def load(root: Path, ranks: int, clock: Clock) -> None:
    """The steps that a GPT checkpoint adds to a load, of weights, on rank 0 and on one rank."""
    import torch
    from megatron.core.dist_checkpointing import checkpoint_layout, gpt_checkpoint_interop
    from megatron.core.dist_checkpointing import read_record, validation

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
    import torch
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
    from tools.checkpoint.inspect_checkpoint import inspect_checkpoint

    clock('prepare', lambda: inspect_checkpoint(root / 'one/iter_0000001'))


def child(part: str, root: Path, ranks: int) -> dict:
    """The figures of one part, in this process."""
    if part == 'load':
        import megatron_overlay

        megatron_overlay.activate()
        import megatron.core.dist_checkpointing
    import tools.checkpoint.inspection.distributed
    import tools.checkpoint.merge.run
    import tools.checkpoint.optimizer_layouts.run  # noqa: F401

    clock = Clock()
    globals()[part](root, ranks, clock)
    return clock.figures()


def measure(part: str, ranks: int, chunks: int, directory: Path) -> dict:
    """The figures of one part, in a process of its own, and the number of chunks there are."""
    layers, experts = sizes(part, chunks)
    with tempfile.TemporaryDirectory(prefix='many-ranks-', dir=directory) as root:
        for name in ('one', 'two') if part == 'merge' else ('one',):
            optimizer = part in ('conversion', 'inspector')
            write_checkpoint(Path(root, name, 'iter_0000001'), ranks, layers, experts, optimizer)
        done = subprocess.run(
            [sys.executable, '-W', 'ignore', __file__, '--child', part, root, str(ranks)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found = layers * (2 * experts + 5) + 3
    return json.loads(done.stdout.splitlines()[-1]) | {
        'part': part,
        'ranks': ranks,
        'chunks': found * (4 if part == 'inspector' else 3 if part == 'conversion' else 1),
    }


def split(figures: dict) -> tuple[float, float]:
    """Seconds of rank 0, which does what is of no rank alone, and of another rank."""
    steps = figures['steps']
    other = sum(seconds for step, seconds in steps.items() if 'a rank' in step)
    return sum(steps.values()) - other, other


def row(figures: dict) -> str:
    """Of the table."""
    chunks, (first, other) = figures['chunks'], split(figures)
    return (
        f'| {figures["part"]} | {figures["ranks"]} | {chunks} | {first:.2f} '
        f'| {first / chunks * 1e6:.0f} | {other * 1e3:.1f} '
        f'| {sum(figures["sent"].values()) / chunks:.0f} | {figures["memory"] / chunks:.0f} |'
    )


WIDTH, HEIGHT, GAP = 300, 220, 50
COLOURS = {1: '#4c78a8', 8: '#72b7b2', 64: '#f58518', 1024: '#e45756'}
TIMES = 1e-4, 1e3  # s
CHUNKS = 1e3, 1e7


def draw(found: list[dict]) -> str:
    """Growth as SVG: a panel for each part, both axes logarithmic."""
    parts = [part for part in PARTS if any(figures['part'] == part for figures in found)]
    width, height = 2 * (WIDTH + GAP) + GAP, -(-len(parts) // 2) * (HEIGHT + 2 * GAP) + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, part in enumerate(parts):
        left, top = GAP + number % 2 * (WIDTH + GAP), GAP + number // 2 * (HEIGHT + 2 * GAP)
        lines += panel(part, [f for f in found if f['part'] == part], left, top)
    text = 'line: rank 0; dashed: another rank; grey: twice the time for twice the chunks. Ranks:'
    lines.append(f'<text x="{GAP}" y="{height - 20}">{text}</text>')
    for number, ranks in enumerate(sorted({figures['ranks'] for figures in found})):
        at = GAP + 470 + 50 * number
        lines.append(f'<text x="{at}" y="{height - 20}" fill="{COLOURS[ranks]}">{ranks}</text>')
    return '\n'.join([*lines, '</svg>']) + '\n'


def panel(part: str, found: list[dict], left: int, top: int) -> Iterator[str]:
    """One part: processor time by number of chunks."""

    def at(chunks: float, seconds: float) -> str:
        x, y = (
            math.log(value / low) / math.log(high / low)
            for value, (low, high) in ((chunks, CHUNKS), (max(seconds, TIMES[0]), TIMES))
        )
        return f'{left + WIDTH * x:.1f},{top + HEIGHT * (1 - y):.1f}'

    def line(points: list[tuple[float, float]], style: str) -> str:
        return f'<polyline points="{" ".join(at(*p) for p in points)}" fill="none" {style}/>'

    yield f'<text x="{left}" y="{top - 8}" font-weight="bold">{part}, s</text>'
    yield f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#333"/>'
    for power in range(-4, 4):
        x, y = at(CHUNKS[0], 10.0**power).split(',')
        yield f'<text x="{float(x) - 4}" y="{float(y) + 4}" text-anchor="end">1e{power}</text>'
        yield line([(CHUNKS[0], 10.0**power), (CHUNKS[1], 10.0**power)], 'stroke="#eee"')
    for power in range(3, 8):
        x, y = at(10.0**power, TIMES[0]).split(',')
        yield f'<text x="{x}" y="{float(y) + 14}" text-anchor="middle">1e{power}</text>'
    yield f'<text x="{left + WIDTH}" y="{top + HEIGHT + 28}" text-anchor="end">chunks</text>'
    yield line([(CHUNKS[0], 0.01), (CHUNKS[1], 100)], 'stroke="#bbb"')
    for ranks in sorted({figures['ranks'] for figures in found}):
        own = sorted((f for f in found if f['ranks'] == ranks), key=lambda f: f['chunks'])
        for which, dashes in ((0, ''), (1, 'stroke-dasharray="5 4"')):
            points = [(f['chunks'], split(f)[which]) for f in own if split(f)[which]]
            yield line(points, f'stroke="{COLOURS[ranks]}" stroke-width="2" {dashes}')


def main() -> None:
    """Print the table, and draw it."""
    if sys.argv[1:2] == ['--child']:
        part, root, ranks = sys.argv[2:]
        print(json.dumps(child(part, Path(root), int(ranks))))
        return
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
        for chunks in args.chunks:
            for ranks in args.ranks:
                found.append(measure(part, ranks, chunks, args.dir))
                print(row(found[-1]), flush=True)
                if args.figures:
                    args.figures.write_text('\n'.join(map(json.dumps, found)) + '\n')
    Path(__file__).with_suffix('.svg').write_text(draw(found))


if __name__ == '__main__':
    main()
