"""Runs upstream's own unit tests on stock megatron-core and over the overlay, and compares.

    python -m tests.upstream.run MEGATRON_LM [--ranks N] [FILE ...]

MEGATRON_LM is a checkout of Megatron-LM, whatever its version. What needs a GPU, or more ranks,
fails on both sides and says nothing; a test that passes on stock has to pass over the overlay.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cpu_megatron.torchrun import free_port, of_rank

SESSION = Path(__file__).with_name('session.py')
UNIT_TESTS = 'tests/unit_tests'
# Those of the code that the overlay extends.
PATTERNS = (
    'test_checkpointing.py',
    'test_optimizer*.py',
    'test_layer_wise_optimizer.py',
    'optimizer/test_*.py',
    'dist_checkpointing/**/test_*.py',
)
HANGS = 1800  # seconds for a file; tests that need another backend may wait for ever

Outcomes = dict[str, str]


def main(argv: list[str] | None = None) -> int:
    """Run the files on both sides, print the differences.

    Returns:
        1 when a test passes on stock and not over the overlay, or none passes on stock; else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('checkout', type=Path, metavar='MEGATRON_LM')
    parser.add_argument('files', nargs='*', metavar='FILE', help='below the checkout')
    parser.add_argument('--ranks', type=int, default=1)
    options = parser.parse_args(argv)
    checkout = options.checkout.resolve()
    unit_tests = checkout / UNIT_TESTS
    if not unit_tests.is_dir():
        parser.error(f'{unit_tests}: no such directory; expected a checkout of Megatron-LM')
    files = options.files or sorted(
        {
            str(path.relative_to(checkout))
            for pattern in PATTERNS
            for path in unit_tests.glob(pattern)
        }
    )
    lost: list[str] = []
    passed_on_stock = 0
    for file in files:
        stock, ours = both_sides(checkout, file, options.ranks)
        lost += [name for name in passed(stock) if ours.get(name) != 'passed']
        passed_on_stock += len(passed(stock))
        print(f'{file}: stock {counts(stock)}; overlay {counts(ours)}', flush=True)
    for name in lost:
        print(f'passes on stock, not over the overlay: {name}')
    print(f'{passed_on_stock} tests pass on stock, {len(lost)} of them not over the overlay')
    return 1 if lost or not passed_on_stock else 0


def both_sides(checkout: Path, file: str, ranks: int) -> tuple[Outcomes, Outcomes]:
    """Outcomes of the tests in ``file`` on stock and over the overlay, run at the same time."""
    with ThreadPoolExecutor(2) as pool:
        stock, ours = pool.map(lambda side: run(checkout, file, ranks, side), ('0', '1'))
    return stock, ours


def run(checkout: Path, file: str, ranks: int, overlay: str) -> Outcomes:
    """Each test's outcome: the worst of all ranks; absent if a rank didn't reach it."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **os.environ,
            'MEGATRON_OVERLAY': overlay,
            'MEGATRON_LM': str(checkout),  # whose version doesn't keep the overlay out
            # upstream tests with Transformer Engine
            'CPU_MEGATRON_OPTIMIZER': os.environ.get('CPU_MEGATRON_OPTIMIZER', 'fused_adam'),
            'OMP_NUM_THREADS': '1',
            'TMPDIR': scratch,
            **of_rank(0, 1, free_port()),
        }
        launcher = [sys.executable]
        if ranks > 1:
            launcher += ['-m', 'torch.distributed.run', '--standalone', f'--nproc-per-node={ranks}']
        process = subprocess.Popen(
            [*launcher, str(SESSION), str(checkout), file, scratch],
            env=environment,
            cwd=scratch,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(HANGS)
        except subprocess.TimeoutExpired:
            print(f'{file}: no end after {HANGS} s', flush=True)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        by_rank = [read_outcomes(path) for path in Path(scratch).glob('outcomes-*')]
    common = set.intersection(*map(set, by_rank)) if len(by_rank) == ranks else set()
    return {name: min(outcomes[name] for outcomes in by_rank) for name in sorted(common)}


def read_outcomes(path: Path) -> Outcomes:
    """What a rank wrote; a test that failed in its call or its set-up or its end is failed."""
    outcomes: Outcomes = {}
    for line in path.read_text().splitlines():
        name, outcome = json.loads(line)
        outcomes[name] = min(outcome, outcomes.get(name, outcome))
    return outcomes


def passed(outcomes: Outcomes) -> list[str]:
    """Names of the tests that passed."""
    return [name for name, outcome in outcomes.items() if outcome == 'passed']


def counts(outcomes: Outcomes) -> str:
    """For instance ``18 passed, 21 failed``."""
    number = Counter(outcomes.values())
    return (
        ', '.join(f'{number[key]} {key}' for key in sorted(number, reverse=True)) or 'nothing ran'
    )


if __name__ == '__main__':
    sys.exit(main())
