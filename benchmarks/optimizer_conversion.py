"""Optimizer conversion: time against copying, memory, growth with the number of pieces, ranks.

    python benchmarks/optimizer_conversion.py [--only PART …] [--runs N] [--dir /dev/shm]

Makes ``dp_reshardable`` checkpoints under ``--dir`` (a tmpfs: 12 GB for the whole run) and prints
the tables. Figures are the best of several runs: the machine may be shared. Nothing is left behind.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

GB = 1e9
PARTS = ('speed', 'growth', 'ranks', 'fsdp')
SHARES = 2  # data-parallel ranks that saved
Chunk = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def model_shapes(layers: int, hidden: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Weights of a GPT in the order of registration, layers stacked."""
    layer = 'decoder.layers'
    return {
        'embedding.word_embeddings.weight': (vocabulary, hidden),
        f'{layer}.self_attention.linear_proj.weight': (layers, hidden, hidden),
        f'{layer}.self_attention.linear_qkv.layer_norm_weight': (layers, hidden),
        f'{layer}.self_attention.linear_qkv.weight': (layers, 3 * hidden, hidden),
        f'{layer}.mlp.linear_fc1.layer_norm_weight': (layers, hidden),
        f'{layer}.mlp.linear_fc1.weight': (layers, 4 * hidden, hidden),
        f'{layer}.mlp.linear_fc2.weight': (layers, hidden, 4 * hidden),
        'decoder.final_layernorm.weight': (hidden,),
    }


def _chunks(key: str, shape: tuple[int, ...]) -> list[Chunk]:
    if not key.startswith('decoder.layers.'):
        return [((0,) * len(shape), shape)]
    rest = (0,) * (len(shape) - 1)
    return [((layer, *rest), (1, *shape[1:])) for layer in range(shape[0])]


def _bucket(shapes: dict[str, tuple[int, ...]]) -> tuple[int, list[int]]:
    """Size of the one bucket, and the edges of its chunks."""
    layers = max(shape[0] for key, shape in shapes.items() if 'layers' in key)
    stacked = [math.prod(shape[1:]) for key, shape in shapes.items() if 'layers' in key]
    first, *_, last = map(math.prod, shapes.values())
    edges, at = [0], 0
    for size in [last, *(layers * stacked[::-1]), first]:
        start = -(-at // 64) * 64
        edges += [start, start + size]
        at = start + size
    share = -(-at // (SHARES * 128)) * 128
    return at, sorted({*edges, *range(share, at, share)})


def write_checkpoint(directory: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A bf16 checkpoint with its optimizer in one bucket, in two files."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    # Every value is the same, so that each main parameter is its weight.
    numel, edges = _bucket(shapes)
    prefix = 'optimizer.distributed.dp_group_idx_0'
    bucket = f'{prefix}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0'
    tensors = {key: (shape, torch.bfloat16, _chunks(key, shape)) for key, shape in shapes.items()}
    pieces = [((a,), (b - a,)) for a, b in zip(edges, edges[1:], strict=False)]
    for state in ('param', 'exp_avg', 'exp_avg_sq'):
        tensors[f'{bucket}.{state}'] = ((numel,), torch.float32, pieces)
    sizes = {(key, offsets): size for key, entry in tensors.items() for offsets, size in entry[2]}
    settings = MetadataIndex(f'{prefix}.optimizer/shard_0_1')

    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            items = [WriteItem(settings, WriteItemType.BYTE_IO)]
            for key, (shape, dtype, chunks) in tensors.items():
                for offsets, own in chunks:
                    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(own))
                    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
                    index = MetadataIndex(key, torch.Size(offsets))
                    items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            self.plan = SavePlan(items, planner_data={})
            return self.plan

        def lookup_object(self, index: MetadataIndex) -> object:
            if index == settings:
                return [{'param_groups': [{'step': 1, 'is_expert_parallel': False}]}]
            own = sizes[index.fqn, tuple(index.offset or ())]
            return torch.full(own, 0.5, dtype=tensors[index.fqn][1])

        def transform_object(self, write_item: WriteItem, object: object) -> object:
            return (
                super().transform_object(write_item, object)
                if write_item.type == WriteItemType.BYTE_IO
                else object
            )

    with warnings.catch_warnings(action='ignore'):
        dcp.save(
            {},
            planner=Planner(),
            no_dist=True,
            storage_writer=dcp.FileSystemWriter(directory, thread_count=2, sync_files=False),
        )
    layers = next(shape[0] for key, shape in shapes.items() if key.startswith('decoder.layers.'))
    common = {
        'iteration': 1,
        'args': argparse.Namespace(
            num_layers=layers, transformer_impl='transformer_engine', bf16=True
        ),
        'optimizer': {'param_state_sharding_type': 'dp_reshardable'},
        'content_metadata': {'distrib_optim_sharding_type': 'dp_reshardable'},
    }
    torch.save(common, directory / 'common.pt')
    (directory / 'metadata.json').write_text(
        json.dumps({'sharded_backend': 'torch_dist', 'sharded_backend_version': 1})
    )


@contextmanager
def checkpoint(parent: Path, *sizes: int) -> Iterator[tuple[Path, Path, int]]:
    """Root, checkpoint, and number of stored optimizer pieces; removed afterwards."""
    root = Path(tempfile.mkdtemp(prefix='conversion-benchmark-', dir=parent))
    try:
        shapes = model_shapes(*sizes)
        write_checkpoint(root / 'iter_0000001', shapes)
        yield root, root / 'iter_0000001', 3 * (len(_bucket(shapes)[1]) - 1)
    finally:
        shutil.rmtree(root)


def copy_seconds(root: Path, source: Path) -> float:
    """``cp`` of the checkpoint."""
    started = time.perf_counter()
    subprocess.run(['cp', '-r', str(source), str(root / 'copy')], check=True)
    seconds = time.perf_counter() - started
    shutil.rmtree(root / 'copy')
    return seconds


def conversion(root: Path, source: Path, ranks: int = 1, *options: str) -> dict:
    """The report of one conversion in processes of its own; its output is ``root / 'out'``."""
    tool = [str(REPOSITORY / 'tools/checkpoint/convert_ckpt_optimizer.py')]
    launcher = ['-m', 'torch.distributed.run', '--standalone', f'--nproc-per-node={ranks}']
    report, out = root / 'report.json', root / 'out'
    arguments = ['--load-dir', source, '--save-dir', out, '--report-json', report, *options]
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), *tool, *map(str, arguments)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return json.loads(report.read_text())


def best(root: Path, source: Path, runs: int, ranks: int = 1, *options: str) -> dict:
    """The fastest of several."""
    return min(
        (conversion(root, source, ranks, *options) for _ in range(runs)),
        key=lambda report: report['timings']['total'],
    )


def speed(parent: Path, runs: int, rows: list[str]) -> None:
    """Against ``cp`` of the same checkpoint in the same run."""
    rows += against_copy_header('checkpoint')
    for sizes in ((8, 768, 16384), (8, 1536, 32768)):
        with checkpoint(parent, *sizes) as (root, source, _):
            rows.append(against_copy('', root, source, runs))


def against_copy_header(first: str) -> list[str]:
    """Head of a table of such rows."""
    return [
        f'| {first} | `cp`, s | conversion, s | ratio | memory above Python and torch, MiB |',
        '|---|---|---|---|---|',
    ]


def against_copy(name: str, root: Path, source: Path, runs: int, *options: str) -> str:
    """One conversion's row; its name and size of the output first."""
    copied = min(copy_seconds(root, source) for _ in range(runs))
    report = best(root, source, runs, 1, *options)
    total, memory = report['timings']['total'], max(report['conversion_memory'])
    return (
        f'| {name}{report["content_bytes"] / GB:.2f} GB | {copied:.2f} | {total:.2f} '
        f'| {total / copied:.2f} | {memory / 2**20:.0f} |'
    )


def fsdp(parent: Path, runs: int, rows: list[str]) -> None:
    """To Megatron-FSDP's format and back, against ``cp`` of what is read."""
    rows += against_copy_header('conversion')
    with checkpoint(parent, 8, 768, 16384) as (root, source, _):
        conversion(root, source)
        for name, to in (
            ('`torch_dist` to `fsdp_dtensor`', 'fsdp_dtensor'),
            ('and back', 'torch_dist'),
        ):
            shutil.rmtree(source)
            (root / 'out/iter_0000001').rename(source)
            rows.append(against_copy(f'{name}, ', root, source, runs, '--to', to))


def growth(parent: Path, runs: int, rows: list[str]) -> None:
    """Tiny parameters: what remains is the cost of each."""
    rows += ['| optimizer pieces | conversion, s | ms a piece | planning, s |', '|---|---|---|---|']
    for layers in (160, 1600, 5500):
        with checkpoint(parent, layers, 8, 64) as (root, source, pieces):
            times = best(root, source, runs)['timings']
            each = 1000 * times['total'] / pieces
            rows.append(
                f'| {pieces} | {times["total"]:.2f} | {each:.3f} | {times["discovery"]:.2f} |'
            )


def ranks(parent: Path, runs: int, rows: list[str]) -> None:
    """One process against two."""
    rows += ['| ranks | conversion, s |', '|---|---|']
    with checkpoint(parent, 8, 1536, 32768) as (root, source, _):
        for count in (1, 2):
            total = best(root, source, runs, count)['timings']['total']
            rows.append(f'| {count} | {total:.2f} |')


def main() -> None:
    """Print the tables of the parts."""
    parser = argparse.ArgumentParser(description='Benchmark of the optimizer conversion.')
    parser.add_argument('--only', nargs='+', choices=PARTS, default=PARTS)
    parser.add_argument('--runs', type=int, default=3)
    parser.add_argument('--dir', type=Path, default=Path('/dev/shm'))
    options = parser.parse_args()
    for part in options.only:
        rows: list[str] = []
        globals()[part](options.dir, options.runs, rows)
        print('\n'.join(rows), end='\n\n', flush=True)


if __name__ == '__main__':
    main()
