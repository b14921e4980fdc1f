"""Converting a checkpoint against copying its files, and how much memory that takes.

    python benchmarks/convert.py [--megabytes 1000] [--repeats 5] [--directory /dev/shm]

Makes a PP 2 checkpoint of two rank files of the given size (bf16 weights, fp32 masters and both
moments), then in turn copies it with ``cp`` and converts it in a fresh process to PP 2 x VPP 2,
back to PP 2, and to one rank with two chunks. Takes four times the size in the directory.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
HIDDEN, LAYERS = 1024, 4
COMMANDS = {
    'reshape to PP 2 x VPP 2': 'reshape --pipeline-size 2 --virtual-size 2',
    'merge to one rank of 2 chunks': 'merge --pipeline-size 1',
    'reshape, one worker': 'reshape --pipeline-size 2 --virtual-size 2 --workers 1',
}


def stage_shapes(size: int) -> dict[str, tuple[int, ...]]:
    """Parameters of a stage's layers, of which 14 bytes are stored each, ``size`` in all."""
    ffn = (size // 14 // LAYERS - 4 * HIDDEN * HIDDEN) // (2 * HIDDEN)
    shapes = {}
    for layer in range(LAYERS):
        shapes |= {
            f'decoder.layers.{layer}.self_attention.linear_proj.weight': (HIDDEN, HIDDEN),
            f'decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight': (HIDDEN,),
            f'decoder.layers.{layer}.self_attention.linear_qkv.weight': (3 * HIDDEN, HIDDEN),
            f'decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight': (HIDDEN,),
            f'decoder.layers.{layer}.mlp.linear_fc1.weight': (ffn, HIDDEN),
            f'decoder.layers.{layer}.mlp.linear_fc2.weight': (HIDDEN, ffn),
        }
    return shapes


def make_checkpoint(root: Path, size: int) -> None:
    """Two rank files as ``--ckpt-format torch`` writes them."""
    import torch

    torch.manual_seed(0)
    for stage in range(2):
        shapes = stage_shapes(size)
        if stage == 0:
            shapes = {'embedding.word_embeddings.weight': (256, HIDDEN), **shapes}
        else:
            shapes |= {
                'decoder.final_layernorm.weight': (HIDDEN,),
                'output_layer.weight': (256, HIDDEN),
            }
        matrices = [name for name, shape in shapes.items() if len(shape) == 2]
        vectors = [name for name, shape in shapes.items() if len(shape) == 1]
        masters = {name: torch.rand(shape) for name, shape in shapes.items()}
        order = matrices + vectors
        state = {
            i: {'exp_avg': torch.rand(shapes[name]), 'exp_avg_sq': torch.rand(shapes[name])}
            for i, name in enumerate(order)
        }
        groups = [
            {'params': list(range(len(matrices))), 'wd_mult': 1.0, 'lr': 1e-3, 'step': 5},
            {
                'params': list(range(len(matrices), len(order))),
                'wd_mult': 0.0,
                'lr': 1e-3,
                'step': 5,
            },
        ]
        args = argparse.Namespace(
            num_layers=2 * LAYERS,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=None,
            untie_embeddings_and_output_weights=True,
            world_size=2,
            data_parallel_size=1,
            num_layers_per_virtual_pipeline_stage=None,
        )
        file = root / 'iter_0000005' / f'mp_rank_00_{stage:03d}' / 'model_optim_rng.pt'
        file.parent.mkdir(parents=True)
        torch.save(
            {
                'args': args,
                'checkpoint_version': 3.0,
                'iteration': 5,
                'model': {name: value.bfloat16() for name, value in masters.items()},
                'optimizer': {
                    'optimizer': {'state': state, 'param_groups': groups},
                    'fp32_from_fp16_params': [
                        [masters[name] for name in names] for names in (matrices, vectors)
                    ],
                },
            },
            file,
        )
    (root / 'latest_checkpointed_iteration.txt').write_text('5')


def anonymous_memory() -> int:
    """Anonymous resident memory of this process in bytes."""
    with open('/proc/self/status') as status:
        return next(int(line.split()[1]) for line in status if line.startswith('RssAnon')) * 1024


def measured_conversion(words: list[str]) -> None:
    """Run the tool in this process, and print its times and memory as JSON."""
    start = time.perf_counter()
    sys.path.insert(0, str(REPOSITORY))
    import tools.checkpoint.pp_vpp.convert  # noqa: F401  the tool imports it only when it is needed
    from tools.checkpoint.convert_ckpt_pp_vpp import main

    imported, before = time.perf_counter(), anonymous_memory()
    peak, done = before, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_memory())

    sampler = threading.Thread(target=sample)
    sampler.start()
    cpu = os.times()
    code = main(words)
    converted, cpu_after = time.perf_counter(), os.times()
    done.set()
    sampler.join()
    if code:
        raise SystemExit(code)
    print(
        json.dumps(
            {
                'imports': imported - start,
                'main': converted - imported,
                'cpu': sum(cpu_after[:2]) - sum(cpu[:2]),
                'memory': max(peak, anonymous_memory()) - before,
            }
        )
    )


def timed(command: list[str]) -> tuple[float, float, str]:
    """Wall time and CPU time of a process, and what it printed."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, done.stdout


def measure(root: Path, repeats: int) -> list[tuple[str, list[dict], list[dict]]]:
    """Copy and convert in turn; per command the figures of the copies and the conversions."""
    source, rows = root / 'source', []
    for name, command in COMMANDS.items():
        copies, conversions = [], []
        for _ in range(repeats):
            wall, cpu, _ = timed(['cp', '-r', str(source), str(root / 'copy')])
            shutil.rmtree(root / 'copy')
            copies.append({'wall': wall, 'cpu': cpu})
            words = [*command.split(), '--load-dir', str(source), '--save-dir', str(root / 'out')]
            wall, _, output = timed([sys.executable, __file__, '--convert', *words])
            shutil.rmtree(root / 'out')
            conversions.append(json.loads(output.splitlines()[-1]) | {'process': wall})
        rows.append((name, copies, conversions))
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--megabytes', type=int, default=1000, help='size of one rank file')
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--directory', default='/dev/shm', help='where the files go, a tmpfs')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory, prefix='benchmark-convert-') as name:
        # a process of its own, so that its memory is not in the way
        subprocess.run(
            [sys.executable, __file__, '--make', f'{name}/source', str(args.megabytes * 1000000)],
            check=True,
        )
        rows = measure(Path(name), args.repeats)
    print(
        f'| two files of {args.megabytes} MB | `cp` | conversion | ratio | CPU `cp` | conversion | '
        'ratio | with imports | memory |'
    )
    print('| --- ' * 9 + '|')
    for name, copies, conversions in rows:
        copy, conversion = medians(copies), medians(conversions)
        memory = max(figures['memory'] for figures in conversions)
        cells = [name]
        for what, converting in (('wall', 'main'), ('cpu', 'cpu')):
            cells += [
                f'{copy[what]:.2f} s',
                f'{conversion[converting]:.2f} s',
                f'{conversion[converting] / copy[what]:.2f}',
            ]
        cells += [f'{conversion["process"]:.2f} s', f'{memory / 2**20:.0f} MiB']
        print(f'| {" | ".join(cells)} |')


def medians(figures: list[dict]) -> dict:
    """The median of each figure."""
    return {key: statistics.median(one[key] for one in figures) for key in figures[0]}


if __name__ == '__main__':
    if sys.argv[1:2] == ['--convert']:
        measured_conversion(sys.argv[2:])
    elif sys.argv[1:2] == ['--make']:
        make_checkpoint(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
