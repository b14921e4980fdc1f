"""Train a GPT on the CPU, load its checkpoint into hybrid runs, and show what arrived.

    python examples/demo.py [DIR]

All three runs are megatron's own training loop, saving and loading; the hybrid runs are given
``--load`` and ``--hybrid-layer-pattern`` and nothing else about the checkpoint.
"""

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.cpu_megatron.recorder import read_log
from tests.cpu_megatron.torchrun import torchrun
from tests.cpu_megatron.whole_checkpoint import gpt_source, read_tensors

SAVED_AT, LAST = 3, 6
RUN = [
    '--ckpt-format=torch_dist',
    '--use-distributed-optimizer',
    '--dist-ckpt-optim-fully-reshardable',
    f'--train-iters={LAST}',
]


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 when everything is as it should be."""
    parser = argparse.ArgumentParser(description='A GPT checkpoint goes on in hybrid runs.')
    parser.add_argument(
        'directory', type=Path, nargs='?', default=Path('demo'), help='made anew (default: demo)'
    )
    directory = parser.parse_args(argv).directory
    if directory.exists() and not (directory / 'gpt.log').exists() and any(directory.iterdir()):
        parser.error(f'{directory} holds something else; name another directory')
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)

    print(f'GPT: {LAST} steps, checkpoint after step {SAVED_AT} ...', flush=True)
    train(directory, 'gpt', [f'--save={directory}/gpt', f'--save-interval={SAVED_AT}'])
    (directory / 'gpt' / 'latest_checkpointed_iteration.txt').write_text(f'{SAVED_AT}\n')
    print('hybrid *-*-: loads it, goes on ...', flush=True)
    train(directory, '*-*-', [f'--load={directory}/gpt'])
    print('hybrid M*-M*-: loads it, goes on ...\n', flush=True)
    end = directory / 'hybrid_end'
    train(directory, 'M*-M*-', [f'--load={directory}/gpt', f'--save={end}'], directory / 'record')

    same = show_steps(read_log(directory / 'gpt.log'), read_log(directory / '*-*-.log'))
    sourced = show_layers(directory, 'M*-M*-')
    print('\nAs it should be.' if same and sourced else '\nNOT as it should be.')
    return 0 if same and sourced else 1


def train(directory: Path, name: str, arguments: list[str], record: Path | None = None) -> None:
    """One run; ``name`` is ``gpt`` or a hybrid pattern. ``record`` keeps its state at the load."""
    kind = ['gpt'] if name == 'gpt' else ['hybrid', f'--hybrid-layer-pattern={name}']
    target = ['tests.cpu_megatron.pretrain']
    if record is not None:
        target = ['tests.cpu_megatron.load_and_save_again', str(record)]
    torchrun(1, *target, *kind, *RUN, *arguments, f'--cpu-log={directory}/{name}.log')


def show_steps(gpt: list[dict], hybrid: list[dict]) -> bool:
    """Print the steps after the checkpoint side by side; True when all are bit-identical."""
    print('step   loss, GPT goes on    loss, hybrid *-*-    gradient norms            equal')
    equal = True
    for expected, found in zip(gpt[SAVED_AT:], hybrid, strict=True):
        equal &= expected == found
        print(
            f'{found["iteration"]:4}   {expected["lm loss"]:<18.14f}   '
            f'{found["lm loss"]:<18.14f}   {expected["grad norm"]:.8f}  {found["grad norm"]:.8f}   '
            f'{"bit for bit" if expected == found else "NO"}'
        )
    return equal


def show_layers(directory: Path, pattern: str) -> bool:
    """Print, by kind of tensor, what the hybrid run holds after the load and three steps later."""
    gpt = read_tensors(f'{directory}/gpt/iter_{SAVED_AT:07d}')
    fresh = read_tensors(f'{directory}/record/fresh/iter_0000001')
    loaded = read_tensors(f'{directory}/record/loaded/iter_0000001')
    later = read_tensors(f'{directory}/hybrid_end/iter_{LAST:07d}')
    counts = {
        ('weights', 'from GPT'): [0, 0, 0],
        ('weights', 'Mamba'): [0, 0, 0],
        ('optimizer', 'from GPT'): [0, 0, 0],
        ('optimizer', 'Mamba'): [0, 0, 0],
    }
    for key, value in loaded.items():
        source = gpt_source(gpt, key, pattern)
        if source is None:
            source = expected_fresh(key, value, fresh)
            kind = 'Mamba'
        else:
            kind = 'from GPT'
        row = counts['optimizer' if key.startswith('optimizer.') else 'weights', kind]
        row[0] += 1
        row[1] += torch.equal(value, source)
        row[2] += not torch.equal(value, later[key])
    print(f'\n{pattern:<17}tensors   as in GPT / as initialised   moved by step {LAST}')
    for (part, kind), (total, equal, moved) in counts.items():
        print(f'{part:<9} {kind:<10} {total:4}      {equal:4}                        {moved:4}')
    return all(total and total == equal == moved for total, equal, moved in counts.values())


def expected_fresh(key: str, value: torch.Tensor, fresh: dict) -> torch.Tensor:
    """Fresh weights, main parameters equal to them, moments of zero."""
    state, _, weight = key.removeprefix('optimizer.state.').partition('.')
    if not key.startswith('optimizer.'):
        return fresh[key]
    return fresh[weight] if state == 'param' else torch.zeros_like(value)


if __name__ == '__main__':
    sys.exit(main())
