"""Tell from a checkpoint what resuming from it will do to the optimizer.

``python -m megatron.core.optimizer.distrib_optimizer`` runs it where the overlay is installed.
"""

import os
import sys

if __package__ in (None, ''):  # run as a script
    sys.path.insert(0, os.path.realpath(f'{__file__}/../../..'))
    __package__ = 'tools.checkpoint'
if __name__ == '__main__':  # before the imports that take their time
    from .common.interrupt import end_on_interrupt

    end_on_interrupt()

import argparse
from collections.abc import Sequence

from .common.arguments import Parser, local_path
from .common.interrupt import ends_on_interrupt
from .common.overlay import LOAD_MODULES, why_not_active
from .common.quiet import import_quickly, missing_packages
from .common.stdout import complain, tell

_DESCRIPTION = """\
Tell from a distributed checkpoint what resuming from it will do to the optimizer. Changes nothing,
and reads no tensors without --check-weights.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=_DESCRIPTION)
    parser.add_argument(
        'checkpoint', type=local_path, help='directory of one iteration, or the one above it'
    )
    parser.add_argument(
        '--check-weights',
        action='store_true',
        help='compare the main parameters with the weights, and name those that differ',
    )
    return parser


@ends_on_interrupt
def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 0 when a report was printed and no weight differs, else 1."""
    options = make_parser().parse_args(argv)
    reason = missing_packages() or why_not_active(*LOAD_MODULES)
    if reason:
        return complain(reason)
    import_quickly('torch.distributed.checkpoint')
    from .common.errors import CheckpointingException
    from .inspection.resume import describe, read_resume_report
    from .inspection.weights import check_weights

    try:
        if not options.check_weights:
            return 0 if tell(describe(read_resume_report(options.checkpoint))) else 1
        check = check_weights(options.checkpoint)
    except CheckpointingException as error:
        return complain(error)
    return 0 if tell(check.describe()) and not check.different else 1


if __name__ == '__main__':
    sys.exit(main())
