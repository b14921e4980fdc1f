"""The command line of ``python -m megatron.core.optimizer.distrib_optimizer``."""

import argparse

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer.resume_report import describe, read_resume_report
from megatron.core.optimizer.weight_check import check_weights

try:
    from megatron_overlay.tools.checkpoint.common.arguments import add_version, local_path
    from megatron_overlay.tools.checkpoint.common.stdout import complain, tell
except ModuleNotFoundError:
    # In a checkout the tools are beside the overlay's package, not below it.
    from tools.checkpoint.common.arguments import add_version, local_path
    from tools.checkpoint.common.stdout import complain, tell


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog='python -m megatron.core.optimizer.distrib_optimizer',
        description='Tell from a distributed checkpoint what resuming from it will do to the '
        'optimizer. Changes nothing, and reads no tensors without --check-weights.',
    )
    add_version(parser)
    parser.add_argument(
        'checkpoint', type=local_path, help='directory of one iteration, or the one above it'
    )
    parser.add_argument(
        '--check-weights',
        action='store_true',
        help='compare the main parameters with the weights, and name those that differ',
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command line.

    Returns:
        0 when a report was printed and no weight differs, else 1.
    """
    options = make_parser().parse_args(argv)
    try:
        if not options.check_weights:
            return 0 if tell(describe(read_resume_report(options.checkpoint))) else 1
        check = check_weights(options.checkpoint)
    except CheckpointingException as error:
        return complain(error)
    return 0 if tell(check.describe()) and not check.different else 1
