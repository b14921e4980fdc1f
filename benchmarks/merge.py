"""Weighted merge: speed against copying, memory, and scaling over ranks.

    python benchmarks/merge.py [--only PART …] [--runs N] [--chunks N] [--dir /dev/shm]

Makes its inputs under ``--dir`` (a tmpfs: 8 GB for the whole run) and prints the table. Figures are
the best of several runs: the machine may be shared. Nothing is left behind.
"""

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

GB = 1e9
PARTS = ('speed', 'ranks', 'disk', 'memory', 'chunks')


def model_shapes(layers: int, hidden: int, vocabulary: int = 50304) -> dict[str, tuple[int, ...]]:
    """Tensors of a GPT with ``layers`` layers, stacked as core stores them."""
    return {
        'embedding.word_embeddings.weight': (vocabulary, hidden),
        'decoder.layers.self_attention.linear_qkv.weight': (layers, 3 * hidden, hidden),
        'decoder.layers.self_attention.linear_proj.weight': (layers, hidden, hidden),
        'decoder.layers.mlp.linear_fc1.weight': (layers, 4 * hidden, hidden),
        'decoder.layers.mlp.linear_fc2.weight': (layers, hidden, 4 * hidden),
        'decoder.layers.input_layernorm.weight': (layers, hidden),
        'decoder.layers.pre_mlp_layernorm.weight': (layers, hidden),
        'decoder.final_layernorm.weight': (hidden,),
    }


SIZES = {'0.4 GB': model_shapes(12, 1024), '1.5 GB': model_shapes(13, 2048)}


def write_checkpoint(directory: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """One bf16 checkpoint in core's format, a chunk for each layer, in two files."""
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

    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(seed)).bfloat16()
    largest = max(torch.Size(shape).numel() for shape in shapes.values())
    noise = noise.repeat(largest // noise.numel() + 1)

    class LayerChunks(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            self.plan = SavePlan(
                [
                    WriteItem(
                        MetadataIndex(key, torch.Size(offsets)),
                        WriteItemType.SHARD,
                        tensor_data=TensorWriteData(
                            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                            TensorProperties(dtype=torch.bfloat16),
                            torch.Size(shape),
                        ),
                    )
                    for key, shape in shapes.items()
                    for offsets, sizes in _layer_chunks(shape)
                ],
                planner_data={},
            )
            return self.plan

        def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
            _, sizes = next(_layer_chunks(shapes[index.fqn]))
            return noise[: torch.Size(sizes).numel()].view(sizes).clone()

        def transform_object(self, write_item: WriteItem, object: torch.Tensor) -> torch.Tensor:
            return object

    with warnings.catch_warnings(action='ignore'):
        dcp.save(
            {},
            planner=LayerChunks(),
            no_dist=True,
            storage_writer=dcp.FileSystemWriter(directory, thread_count=2, sync_files=False),
        )
    torch.save({'iteration': seed}, directory / 'common.pt')
    (directory / 'metadata.json').write_text(
        json.dumps({'sharded_backend': 'torch_dist', 'sharded_backend_version': 1})
    )


def _layer_chunks(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes; all chunks of a tensor are of one size."""
    if len(shape) < 3:
        yield (0,) * len(shape), shape
    else:
        yield from (((layer, 0, 0), (1, *shape[1:])) for layer in range(shape[0]))


@contextmanager
def checkpoints(
    parent: Path, shapes: dict[str, tuple[int, ...]], count: int
) -> Iterator[tuple[Path, list[Path]]]:
    """A directory with ``count`` checkpoints, removed afterwards."""
    root = Path(tempfile.mkdtemp(prefix='merge-benchmark-', dir=parent))
    try:
        paths = [root / f'iter_{seed:07d}' for seed in range(1, count + 1)]
        for seed, path in enumerate(paths, 1):
            write_checkpoint(path, shapes, seed)
        yield root, paths
    finally:
        shutil.rmtree(root)


def best(action: Callable[[], float], runs: int) -> float:
    """Smallest result of several runs."""
    return min(action() for _ in range(runs))


def copy_seconds(root: Path, paths: list[Path], flush: bool = False) -> float:
    """``cat`` of all inputs to /dev/null, and ``cp`` of one, flushed to the disk or not."""
    files = [str(file) for path in paths for file in sorted(path.iterdir())]
    started = time.perf_counter()
    with open(os.devnull, 'wb') as sink:
        subprocess.run(['cat', *files], stdout=sink, check=True)
    subprocess.run(['cp', '-r', str(paths[0]), str(root / 'copy')], check=True)
    if flush:
        subprocess.run(['sync', *map(str, (root / 'copy').iterdir())], check=True)
    elapsed = time.perf_counter() - started
    shutil.rmtree(root / 'copy')
    return elapsed


def merge_report(paths: list[Path], output: Path, ranks: int, threads: int) -> dict:
    """One merge in fresh processes; the report's figures."""
    report = output.with_suffix('.json')
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ['-m', 'torch.distributed.run', '--standalone', f'--nproc-per-node={ranks}']
    command = [
        *launcher,
        str(REPOSITORY / 'tools/checkpoint/weighted_merge.py'),
        '--merge-inputs',
        *(f'{path}:{1 / len(paths)}' for path in paths),
        '--merge-output',
        str(output),
        '--report-json',
        str(report),
        '--merge-balance-rank-work',
    ]
    environment = {**os.environ, 'OMP_NUM_THREADS': str(threads)}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(output)
    result = json.loads(report.read_text())
    report.unlink()
    return result


def merge_seconds(paths: list[Path], output: Path, ranks: int = 1, threads: int = 2) -> float:
    """Wall time of a merge, from discovery to publication."""
    return merge_report(paths, output, ranks, threads)['timings']['total']


def naive_seconds(paths: list[Path], output: Path) -> float:
    """Load all, average, save: what a short script does."""
    script = (
        'import sys, time, torch, torch.distributed.checkpoint as dcp\n'
        'begin = time.perf_counter()\n'
        'states = []\n'
        'for path in sys.argv[2:]:\n'
        '    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata\n'
        '    state = {k: torch.empty(e.size, dtype=torch.bfloat16) for k, e in entries.items()}\n'
        '    dcp.load(state, checkpoint_id=path, no_dist=True)\n'
        '    states.append({k: v.float() for k, v in state.items()})\n'
        'mean = {k: (sum(s[k] for s in states) / len(states)).bfloat16() for k in states[0]}\n'
        'dcp.save(mean, checkpoint_id=sys.argv[1], no_dist=True)\n'
        'print(time.perf_counter() - begin)\n'
    )
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', script, str(output), *map(str, paths)],
        check=True,
        capture_output=True,
        text=True,
    )
    shutil.rmtree(output)
    return float(done.stdout)


def speed(parent: Path, runs: int, rows: list[str]) -> None:
    """One process, two threads, against copying and against the naive way."""
    for name, shapes in SIZES.items():
        with checkpoints(parent, shapes, 4) as (root, paths):
            merged, copied = [], []
            for _ in range(runs):  # in turn, so that a busy moment meets both
                copied.append(copy_seconds(root, paths))
                merged.append(merge_seconds(paths, root / 'out'))
            ratio = min(merged) / min(copied)
            rows.append(
                f'| 4 × {name} bf16, 1 process, 2 threads | {min(merged):.2f} s | '
                f'cat + cp {min(copied):.2f} s | {ratio:.2f} × |'
            )
            if name == '0.4 GB':
                naive = best(lambda: naive_seconds(paths, root / 'naive'), 2)  # noqa: B023
                rows.append(
                    f'| the same, load–average–save | {naive:.2f} s | '
                    f'cat + cp {min(copied):.2f} s | {naive / min(copied):.2f} × |'
                )


def ranks(parent: Path, runs: int, rows: list[str]) -> None:
    """Two ranks of one thread against one."""
    with checkpoints(parent, SIZES['1.5 GB'], 4) as (root, paths):
        one, two = [], []
        for _ in range(runs):
            one.append(merge_seconds(paths, root / 'out', 1, 1))
            two.append(merge_seconds(paths, root / 'out', 2, 1))
        rows.append(
            f'| 4 × 1.5 GB, torchrun 2 ranks × 1 thread | {min(two):.2f} s | '
            f'1 rank × 1 thread {min(one):.2f} s | {min(one) / min(two):.2f} × as fast |'
        )


def disk(parent: Path, runs: int, rows: list[str]) -> None:
    """From a cold disk, against reading the inputs from the cold disk."""
    with checkpoints(parent, SIZES['0.4 GB'], 4) as (root, paths):
        os.sync()

        def cold() -> None:
            for path in paths:
                for file in path.iterdir():
                    with open(file, 'rb') as opened:
                        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        read, merged = [], []
        for _ in range(runs):
            cold()
            read.append(copy_seconds(root, paths, flush=True))
            cold()
            merged.append(merge_seconds(paths, root / 'out'))
        rows.append(
            f'| 4 × 0.4 GB from a cold disk | {min(merged):.2f} s | '
            f'cold cat + cp + sync {min(read):.2f} s | {min(merged) / min(read):.2f} × |'
        )


def memory(parent: Path, runs: int, rows: list[str]) -> None:
    """Peak resident memory above the imports, for two and for eight inputs."""
    from tools.checkpoint.common.progress import format_bytes

    shapes = SIZES['0.4 GB']
    chunk = max(2 * _numel(sizes) for shape in shapes.values() for _, sizes in _layer_chunks(shape))
    script = (
        'import sys\n'
        f'sys.path.insert(0, {str(REPOSITORY)!r})\n'
        'import tools.checkpoint.merge.run, torch\n'
        'from tools.checkpoint.weighted_merge import (\n'
        '    merge_same_layout_dcp_metadata_checkpoints as merge)\n'
        'from tools.checkpoint.common.progress import peak_memory\n'
        'before = peak_memory()\n'
        'merge(sys.argv[2:], [0.1] * len(sys.argv[2:]), sys.argv[1], threads=2)\n'
        'print(peak_memory() - before)\n'
    )
    for count in (2, 8):
        with checkpoints(parent, shapes, count) as (root, paths):

            def measured(root: Path = root, paths: list[Path] = paths) -> float:
                done = subprocess.run(
                    [sys.executable, '-c', script, str(root / 'out'), *map(str, paths)],
                    check=True,
                    capture_output=True,
                    text=True,
                )
                shutil.rmtree(root / 'out')
                return float(done.stdout)

            peak = best(measured, min(runs, 2))
            rows.append(
                f'| peak memory above imports, {count} inputs of 0.4 GB, 2 threads | '
                f'{format_bytes(peak)} | 128 MiB + 2 chunks of {format_bytes(chunk)} | |'
            )


_EACH_CHUNK = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from tools.checkpoint.common.progress import peak_memory, resident_memory
from tools.checkpoint.merge import run
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge
inputs, verify, held = sys.argv[4:], sys.argv[3] == 'verify', []
prepare = run.prepare
run.prepare = lambda *a: (prepare(*a), held.append(resident_memory()))[0]
imported, wall, processor = resident_memory(), time.perf_counter(), time.process_time()
merge(inputs, [0.5] * len(inputs), sys.argv[2], threads=1, verify=verify)
wall, processor, peak = time.perf_counter() - wall, time.process_time() - processor, peak_memory()
print(json.dumps([wall, processor, peak - held[0], peak - imported]))
"""


def chunks(parent: Path, runs: int, rows: list[str], total: int) -> None:
    """Time and memory for each of many small chunks, as of a model with many experts."""
    shapes = {
        f'decoder.layers.mlp.experts.experts.linear_fc{i}.weight': (total // 20, 1, 256)
        for i in range(20)
    }
    with checkpoints(parent, shapes, 2) as (root, paths):
        for path in [*paths]:  # writing them takes longest
            paths.append(shutil.copytree(path, root / f'copy-{path.name}'))
        for count, verify in ((2, ''), (2, 'verify'), (4, '')):
            figures = []
            for _ in range(runs):
                done = subprocess.run(
                    [sys.executable, '-c', _EACH_CHUNK, REPOSITORY, root / 'out', verify]
                    + paths[:count],
                    check=True,
                    capture_output=True,
                    text=True,
                )
                figures.append(json.loads(done.stdout))
                shutil.rmtree(root / 'out')
            wall, processor, peak, memory = (min(column) for column in zip(*figures, strict=True))
            rows.append(
                f'| {count} × {total} chunks of 256 bf16{", --verify" if verify else ""}, 1 thread'
                f' | {1e3 * processor / total:.2f} ms a chunk of processor, '
                f'{1e3 * wall / total:.2f} ms of wall time, {peak / total:.0f} bytes over the '
                f'plan, {memory / 2**20:.0f} MiB over imports | | |'
            )


def _numel(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def main() -> None:
    """Run the parts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--dir', type=Path, default=Path('/dev/shm'), help='a tmpfs')
    parser.add_argument('--disk', type=Path, default=Path(tempfile.gettempdir()), help='a disk')
    parser.add_argument('--only', nargs='+', choices=PARTS, default=PARTS)
    parser.add_argument('--runs', type=int, default=5)
    parser.add_argument('--chunks', type=int, default=10_000, help='small ones, of each input')
    args = parser.parse_args()
    rows: list[str] = []
    for part in args.only:
        parent = args.disk if part == 'disk' else args.dir
        of_chunks = functools.partial(chunks, total=args.chunks)
        {'speed': speed, 'ranks': ranks, 'disk': disk, 'memory': memory, 'chunks': of_chunks}[part](
            parent, args.runs, rows
        )
        print(f'{part} done', file=sys.stderr)
    print('| what | measured | reference | ratio |\n| --- | --- | --- | --- |')
    print('\n'.join(rows))


if __name__ == '__main__':
    main()
