"""Tell what loading a GPT checkpoint into a hybrid model will do, from its metadata alone."""

import os
import sys

if __package__ in (None, ''):  # run as a script
    sys.path.insert(0, os.path.realpath(f'{__file__}/../../..'))
    __package__ = 'tools.checkpoint'
if __name__ == '__main__':  # before the imports that take their time
    from .common.interrupt import end_on_interrupt

    end_on_interrupt()

import argparse
import re
from collections.abc import Sequence

from .common.arguments import Parser, not_a_url
from .common.interrupt import ends_on_interrupt
from .common.overlay import LOAD_MODULES, why_not_active
from .common.quiet import import_quickly, missing_packages
from .common.stdout import complain

# Options have a small letter; layer symbols don't.
_OPTION = re.compile(r'-.*[a-z]').match
# They decide whether Mamba layers can begin with an attention.
RUN_SIZES = (
    'mamba_num_heads',
    'mamba_head_dim',
    'mamba_state_dim',
    'mamba_num_groups',
    'tensor_model_parallel_size',
)
_DESCRIPTION = """\
Tell what `pretrain_hybrid.py --load CHECKPOINT --hybrid-layer-pattern PATTERN` will do with a
checkpoint of a GPT model: which layer reads what, what starts fresh, and whether the load will
work. Reads metadata only.
"""
_EPILOG = """\
exit status: 0 when it will, with what the last line names, such as --no-load-optim; 1 when nothing
makes it; 2 on wrong usage
"""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        'checkpoint',
        type=not_a_url,
        help='what --load gets: the directory with latest_checkpointed_iteration.txt',
    )
    parser.add_argument('pattern', help='the run\'s --hybrid-layer-pattern, such as "M*-M*-"')
    parser.add_argument(
        '--ckpt-step',
        type=int,
        metavar='STEP',
        help='as in the run: the iteration to load, where it is another than the latest',
    )
    parser.add_argument(
        '--replace-gpt-attention',
        action='store_true',
        help='as in the run: where the pattern has no attention, that of the checkpoint is unread',
    )
    parser.add_argument(
        '--init-mamba-from-attention',
        action='store_true',
        help='as in the run: Mamba layers begin with the attention they replace',
    )
    for name in RUN_SIZES:
        parser.add_argument(
            f'--{name.replace("_", "-")}',
            type=int,
            default=argparse.SUPPRESS,
            help="the run's, where it isn't that of the run which saved the checkpoint",
        )
    return parser


@ends_on_interrupt
def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 0 or 1 (see ``--help``), or 2 on wrong usage."""
    options = make_parser().parse_args(_with_pattern_last(sys.argv[1:] if argv is None else argv))
    reason = missing_packages() or why_not_active('megatron.training.checkpointing', *LOAD_MODULES)
    if reason:
        return complain(reason)
    import_quickly('torch.distributed.checkpoint')
    from .inspection.gpt_into_hybrid import dry_run

    return dry_run(**vars(options))


def _with_pattern_last(argv: Sequence[str]) -> list[str]:
    """The arguments, so that a pattern which begins with a dense MLP isn't taken for an option."""
    patterns = [word for word in argv if len(word) > 1 and word[0] == '-' and not _OPTION(word)]
    if not patterns or '--' in argv:
        return list(argv)
    return [*(word for word in argv if word not in patterns), '--', *patterns]


if __name__ == '__main__':
    sys.exit(main())
