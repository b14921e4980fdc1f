"""Load the example's GPT checkpoint into hybrid runs with half of its attention, on the CPU.

    python examples/replace_attention.py DIR

DIR is what ``make_checkpoints.py`` wrote. Of its four attention layers two are replaced by Mamba
layers: in one run fresh ones, in the other ones that begin with the attention they replace.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cpu_megatron.recorder import read_log
from tests.cpu_megatron.torchrun import torchrun

PATTERN = 'M-*-M-*-'
STEPS = 6
# As many heads as the attention has, of as many channels.
AS_ATTENTION = [
    *('--mamba-num-heads', '4', '--mamba-num-groups', '4'),
    *('--mamba-head-dim', '8', '--mamba-state-dim', '8'),
]
RUNS = {
    'fresh': [],
    'from attention': ['--init-mamba-from-attention'],
}


def main(argv: list[str] | None = None) -> int:
    """Run both; 0 when they have gone on from the checkpoint."""
    parser = argparse.ArgumentParser(description=f'GPT checkpoints into {PATTERN} runs.')
    parser.add_argument('directory', type=Path, help='what make_checkpoints.py wrote')
    directory = parser.parse_args(argv).directory
    if not (directory / 'latest_checkpointed_iteration.txt').exists():
        parser.error(f'{directory}: no checkpoint; python examples/make_checkpoints.py makes some')
    losses = {}
    for name, options in RUNS.items():
        print(f'{PATTERN}, Mamba layers {name}:', flush=True)
        losses[name] = train(directory, options)
    print('step  ' + ''.join(f'{name:>16}' for name in losses))
    for step, found in enumerate(zip(*losses.values(), strict=True), 1):
        print(f'{step:4}  ' + ''.join(f'{loss:16.6f}' for loss in found))
    return 0


def train(directory: Path, options: list[str]) -> list[float]:
    """Losses of the first steps; prints what the load says."""
    with tempfile.TemporaryDirectory() as scratch:
        done = torchrun(
            1,
            'tests.cpu_megatron.pretrain',
            'hybrid',
            *('--load', str(directory), '--finetune', '--hybrid-layer-pattern', PATTERN),
            *('--replace-gpt-attention', *AS_ATTENTION, *options),
            *('--ckpt-format', 'torch_dist', '--train-iters', str(STEPS)),
            *('--use-distributed-optimizer', '--dist-ckpt-optim-fully-reshardable'),
            *('--cpu-log', f'{scratch}/log'),
            env={'CPU_MEGATRON_OPTIMIZER': 'fused_adam'},
        )
        said = [line for line in done.stdout.splitlines() if line.startswith('> ')]
        about_load = [line for line in said if 'GPT' in line or 'attention' in line]
        print('\n'.join(f'  {line}' for line in about_load))
        return [step['lm loss'] for step in read_log(f'{scratch}/log')]


if __name__ == '__main__':
    sys.exit(main())
