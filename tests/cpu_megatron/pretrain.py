"""Train a tiny GPT or hybrid model on the CPU with ``megatron.training``'s own loop.

    python -m tests.cpu_megatron.pretrain {gpt,hybrid} [--cpu-log FILE] [--cpu-dump FILE]
        [--cpu-optimizer {torch_adam,fused_adam}] [megatron arguments]

Options of a tiny run are added where they aren't given (arguments.py). ``--cpu-log`` gets one JSON
line an iteration from the last pipeline stage, ``--cpu-dump`` a file a rank (recorder.py).
"""

import argparse
import os
import sys
from functools import partial

import tests.cpu_megatron as cpu_megatron
from tests.cpu_megatron.arguments import with_defaults


def _options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog='tests.cpu_megatron.pretrain', allow_abbrev=False)
    parser.add_argument('kind', choices=['gpt', 'hybrid'])
    parser.add_argument('--cpu-log', default=os.environ.get('CPU_MEGATRON_LOG'))
    parser.add_argument('--cpu-dump', default=os.environ.get('CPU_MEGATRON_DUMP'))
    parser.add_argument('--cpu-optimizer', choices=['torch_adam', 'fused_adam'])
    return parser.parse_known_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run one training; the arguments are those after the module's name."""
    options, given = _options(sys.argv[1:] if argv is None else argv)
    if options.cpu_optimizer:
        os.environ['CPU_MEGATRON_OPTIMIZER'] = options.cpu_optimizer
    cpu_megatron.install()
    cpu_megatron.activate_overlay()
    sys.argv = [sys.argv[0], *with_defaults(options.kind, given)]

    from megatron.core.enums import ModelType
    from megatron.training import get_args, training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from tests.cpu_megatron import recorder
    from tests.cpu_megatron.models import model_from_args
    from tests.cpu_megatron.synthetic_data import SyntheticTokens, forward_step

    def datasets(num_samples, vp_stage=None):
        args = get_args()
        return [
            SyntheticTokens(length, args.seq_length, args.vocab_size) if length else None
            for length in num_samples
        ]

    datasets.is_distributed = True
    args = parse_and_validate_args()
    recorder.install(training, log=options.cpu_log, dump=options.cpu_dump)
    try:
        training.pretrain(
            pretrain_cfg_container_from_args(args),
            datasets,
            model_provider=partial(model_from_args, options.kind),
            model_type=ModelType.encoder_or_decoder,
            forward_step_func=forward_step,
        )
    finally:
        recorder.close()


if __name__ == '__main__':
    main()
