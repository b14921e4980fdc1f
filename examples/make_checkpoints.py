"""Train a tiny GPT on the CPU with real megatron.training code and keep its checkpoints.

    python examples/make_checkpoints.py DIR

writes DIR/iter_0000004, iter_0000008, … in torch_dist format with the optimizer's state
(fully_reshardable, or what ``--optimizer-format`` says). ``--ckpt-format torch`` writes the legacy
format instead, one file a rank.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cpu_megatron.torchrun import torchrun


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description='Train a tiny GPT of four layers (one a virtual stage where these are more) on '
        'the CPU and keep its checkpoints.'
    )
    parser.add_argument('directory', type=Path, help='where the checkpoints go; new or empty')
    parser.add_argument(
        '--iterations', type=int, default=12, help='training steps in all (default: %(default)s)'
    )
    parser.add_argument(
        '--save-interval', type=int, default=4, help='steps between saves (default: %(default)s)'
    )
    parser.add_argument('--no-optimizer', action='store_true', help='leave the optimizer state out')
    parser.add_argument(
        '--optimizer-format',
        choices=['fully_reshardable', 'dp_reshardable'],
        default='fully_reshardable',
        help="how torch_dist stores the optimizer's state; dp_reshardable is megatron-core's "
        'default (default: %(default)s)',
    )
    parser.add_argument(
        '--ckpt-format',
        choices=['torch_dist', 'torch'],
        default='torch_dist',
        help='distributed checkpoint or legacy files a rank (default: %(default)s)',
    )
    parser.add_argument(
        '--pipeline-size', type=int, default=1, help='pipeline-parallel ranks (default: 1)'
    )
    parser.add_argument(
        '--virtual-size',
        type=int,
        default=1,
        help='virtual stages (model chunks) a pipeline rank (default: 1)',
    )
    parser.add_argument(
        '--bf16', action='store_true', help='bf16 weights with fp32 main parameters'
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Make the checkpoints; 0 when they are there."""
    parser = arguments()
    options = parser.parse_args(argv)
    directory = options.directory
    if directory.exists() and any(directory.iterdir()):
        parser.error(f'{directory} is not empty: give a new directory')
    if options.iterations < 3 or options.save_interval < 1:
        parser.error('--iterations must be at least 3 (two warm up), --save-interval at least 1')
    if options.virtual_size > 1 and options.pipeline_size < 2:
        parser.error('--virtual-size needs a --pipeline-size of at least 2')
    started = time.monotonic()
    torchrun(
        options.pipeline_size,
        'tests.cpu_megatron.pretrain',
        'gpt',
        *_training_arguments(options),
        env={'CPU_MEGATRON_OPTIMIZER': 'fused_adam'},
    )
    print(f'{options.iterations} steps in {time.monotonic() - started:.0f} s; checkpoints:')
    for checkpoint in sorted(directory.glob('iter_*')):
        size = sum(file.stat().st_size for file in checkpoint.rglob('*') if file.is_file())
        print(f'  {checkpoint.absolute()}  {size / 1024:.0f} KiB')
    return 0


def _training_arguments(options: argparse.Namespace) -> list[str]:
    layers = max(4, options.pipeline_size * options.virtual_size)
    training = [
        *('--num-layers', str(layers)),
        *('--train-iters', str(options.iterations)),
        *('--save', str(options.directory)),
        *('--save-interval', str(options.save_interval)),
        *('--ckpt-format', options.ckpt_format),
        *('--pipeline-model-parallel-size', str(options.pipeline_size)),
    ]
    if options.virtual_size > 1:
        stages = options.pipeline_size * options.virtual_size
        training += ['--num-layers-per-virtual-pipeline-stage', str(layers // stages)]
    if options.ckpt_format == 'torch_dist':
        training.append('--use-distributed-optimizer')
        if options.optimizer_format == 'fully_reshardable':
            training.append('--dist-ckpt-optim-fully-reshardable')
    if options.no_optimizer:
        training.append('--no-save-optim')
    if options.bf16:
        training.append('--bf16')
    return training


if __name__ == '__main__':
    sys.exit(main())
