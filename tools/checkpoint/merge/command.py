"""What the command lines have in common that write a checkpoint on several ranks."""

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..common.arguments import local_path
from ..common.quiet import import_quickly, missing_packages
from ..common.stdout import complain, tell

if TYPE_CHECKING:
    from .report import Result
    from .request import Request


def add_trust(inputs: argparse._ActionsContainer) -> None:
    """``--trust-checkpoints``."""
    inputs.add_argument(
        '--trust-checkpoints',
        action='store_true',
        help='unpickle what is read without restriction: whatever code it holds will run',
    )


def add_run_options(run: argparse._ActionsContainer, dry_run: str, verify: str) -> None:
    """``--dry-run``, ``--verify`` and ``--report-json``.

    Args:
        dry_run, verify: what the command does then
    """
    run.add_argument('--dry-run', action='store_true', help=dry_run)
    run.add_argument('--verify', action='store_true', help=verify)
    run.add_argument(
        '--report-json',
        dest='report',
        type=local_path,
        metavar='FILE',
        help='also write the report (or, with --dry-run, the plan) as JSON; an existing FILE is '
        'replaced only where it is such a report',
    )


def check_report(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the process where the report has no directory to go to."""
    if args.report is not None and not os.path.isdir(args.report.absolute().parent):
        parser.error(f'--report-json {args.report}: no such directory')


def start_up(missing_input: object) -> str | None:
    """Import torch, which takes seconds, unless something is missing; returns what, in words.

    Args:
        missing_input: a path that isn't there; None where all are
    """
    if missing_input is not None:
        return f"{missing_input}: doesn't exist"
    reason = missing_packages()
    if reason is None:
        import_quickly('torch.distributed.checkpoint')
    return reason


def carry_out[Q: 'Request', R: 'Result'](
    request: Q,
    run: Callable[[Q], R],
    plan_text: Callable[[R], str],
    report_text: Callable[[R], str],
) -> int:
    """Do what one rank of several does; returns the exit code, having said why it isn't 0."""
    from ..common.errors import CheckpointError
    from ..common.publish import Interrupted
    from .ranks import RankLost
    from .report import write_json

    rank = int(os.environ.get('RANK', '0'))
    told: list[bool] = []
    request.on_plan = lambda result: told.append(tell(plan_text(result)))
    try:
        result = run(request)
        text = '' if request.dry_run else report_text(result)
        if rank == 0 and text:
            tell(text)  # published, whoever reads this
        if rank == 0 and request.report:
            write_json(result, request.report)
    except CheckpointError as error:
        # rank 0 tells for all, unless it may be the one that is lost
        if rank == 0 or (rank == 1 and isinstance(error, RankLost)):
            complain(error)
        return 1
    except Interrupted as stopped:
        complain(stopped)
        return stopped.exit_code
    return int(request.dry_run and not all(told))
