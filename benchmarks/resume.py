"""Memory that resuming the distributed optimizer takes, over the run that never stopped.

    python benchmarks/resume.py [--layers N] [--runs N]

Each figure comes from a process of its own that builds a GPT model on the CPU and loads a
checkpoint, on stock megatron-core and with the overlay; the reference is a process that trained
for a step instead. Figures are in units of the two moments: 1.0 is a second copy of them.
"""

import argparse
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

FORMATS = ('dp_reshardable', 'fully_reshardable')
OPTIONS = {'plain': None, 'offload 0.5': 0.5, 'offload 1.0': 1.0}


def measure(
    action: str, path: str, sharding_type: str, fraction: float | None, layers: int
) -> None:
    """In a process of its own: print resident memory after ``action``, and the peak in it."""
    from tests.cpu_megatron.pretrain import prepare

    prepare(simulate_devices=fraction is not None)
    from tests.cpu_megatron.session import (
        Training,
        distributed_optimizer,
        gpt,
        model_parallel,
    )

    offload = (
        {}
        if fraction is None
        else {
            'optimizer_cpu_offload': True,
            'optimizer_offload_fraction': fraction,
            'use_precision_aware_optimizer': True,
        }
    )
    sizes = {
        'num_layers': layers,
        'hidden_size': 512,
        'ffn_hidden_size': 2048,
        'num_attention_heads': 8,
    }
    with model_parallel():
        run = Training.start(gpt(bf16=True, **sizes), distributed_optimizer(bf16=True, **offload))
        parameters = sum(param.numel() for param in run.model[0].parameters())
        Path('/proc/self/clear_refs').write_text('5')  # the peak counts from here
        if action == 'load':
            run.load(path)
        else:
            run.train(1)
        peak = _status('VmHWM')
        ctypes.CDLL('libc.so.6').malloc_trim(0)
        print(json.dumps({'held': _status('VmRSS'), 'peak': peak, 'moments': 8 * parameters}))
        if action == 'save':
            run.save(path, sharding_type)


def _status(name: str) -> int:
    found = re.search(rf'{name}:\s+(\d+) kB', Path('/proc/self/status').read_text())
    return int(found[1]) * 1024


def in_process(overlay: bool, *arguments) -> dict:
    """Run :func:`measure` and read what it prints."""
    environment = {
        **os.environ,
        'MEGATRON_OVERLAY': str(int(overlay)),
        # stock can't load into torch's Adam before its first step
        'CPU_MEGATRON_OPTIMIZER': 'fused_adam',
        'MALLOC_MMAP_THRESHOLD_': '65536',
        'PYTHONWARNINGS': 'ignore',
    }
    result = subprocess.run(
        [sys.executable, __file__, '--measure', json.dumps(arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        sys.exit(result.stderr[-2000:])
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith('{')))


def compare(name: str, sharding_type: str, layers: int, runs: int) -> list[str]:
    """Table rows of one option and format: stock, and with the overlay."""
    rows = []
    with tempfile.TemporaryDirectory(dir='/dev/shm') as path:
        given = (path, sharding_type, OPTIONS[name], layers)
        in_process(True, 'save', *given)
        reference = statistics.median(in_process(True, 'run', *given)['held'] for _ in range(runs))
        for overlay in (False, True):
            found = [in_process(overlay, 'load', *given) for _ in range(runs)]
            moments = found[0]['moments']
            held, peak = (
                (statistics.median(one[key] for one in found) - reference) / moments
                for key in ('held', 'peak')
            )
            with_what = 'overlay' if overlay else 'stock'
            rows.append(f'| {name} | {sharding_type} | {with_what} | {held:+.2f} | {peak:+.2f} |')
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--layers', type=int, default=8, help='of the model (default: 8)')
    parser.add_argument('--runs', type=int, default=3, help='processes a figure (default: 3)')
    parser.add_argument('--measure', help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*json.loads(options.measure))
        return
    print('| optimizer | format | megatron-core | held after the load | peak in it |')
    print('|---|---|---|---|---|')
    for name in OPTIONS:
        for sharding_type in FORMATS:
            print('\n'.join(compare(name, sharding_type, options.layers, options.runs)), flush=True)


if __name__ == '__main__':
    main()
