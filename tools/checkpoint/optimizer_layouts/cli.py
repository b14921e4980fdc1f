"""The command line of ``convert_ckpt_optimizer.py``."""

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.arguments import add_version, local_path, natural
from ..common.directory import DISTRIBUTED, FSDP
from ..common.quiet import import_quickly, missing_packages
from ..common.stdout import complain, tell

if TYPE_CHECKING:
    from .report import ConversionResult

_DESCRIPTION = """\
Convert a torch_dist checkpoint's optimizer state into fully_reshardable, which loads into any TP,
PP, EP, VPP and DP size, GPT and hybrid.

Read are dp_reshardable checkpoints, megatron-core's default, and fully_sharded_model_space, the
default up to megatron-core 0.14. The place of every parameter is derived from the metadata and
proven by its weight, bit for bit; what can't be proven is refused. A GPT checkpoint of
Megatron-FSDP (fsdp_dtensor) is converted with its weights, by names and shapes; --to fsdp_dtensor
makes one of a torch_dist checkpoint.
Weights and all other state are copied as they are. Nothing is built or run on a GPU. Start it with
plain python for one process, with torchrun or srun for several. An existing output is never
replaced, and on any error or signal nothing is published.
"""


def make_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(parser)
    parser.add_argument(
        '--load-dir',
        type=local_path,
        required=True,
        metavar='DIR',
        help='root with latest_checkpointed_iteration.txt, or the directory of one iteration',
    )
    parser.add_argument(
        '--save-dir',
        type=local_path,
        required=True,
        metavar='DIR',
        help='root of the output: DIR/iter_XXXXXXX and a tracker are written',
    )
    parser.add_argument(
        '--iteration',
        type=natural,
        metavar='N',
        help='convert this iteration of the root (default: the one that the tracker names)',
    )
    parser.add_argument(
        '--to',
        choices=[DISTRIBUTED, FSDP],
        default=DISTRIBUTED,
        help='format of the output (default: %(default)s, with fully_reshardable optimizer state)',
    )
    parser.add_argument(
        '--dry-run',
        action='store_true',
        help='derive everything from the metadata, print the plan, write nothing',
    )
    parser.add_argument(
        '--verify',
        action='store_true',
        help='before publishing read the output back and put every chunk together again, by '
        'another path',
    )
    parser.add_argument(
        '--trust-checkpoints',
        action='store_true',
        help='unpickle the input without restriction: whatever code it holds will run',
    )
    parser.add_argument(
        '--report-json',
        dest='report',
        type=local_path,
        metavar='FILE',
        help='also write the report (or, with --dry-run, the plan) as JSON; an existing FILE is '
        'replaced only where it is such a report',
    )
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, convert, report; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.report is not None and not os.path.isdir(args.report.absolute().parent):
        parser.error(f'--report-json {args.report}: no such directory')
    reason = missing_packages()
    if reason is None and not os.path.exists(args.load_dir):
        reason = f"{args.load_dir}: doesn't exist"
    if reason is not None:
        return complain(reason)

    import_quickly('torch.distributed.checkpoint')
    from ..merge.cli import carry_out
    from ..merge.report import write_json
    from .prepare import ConversionRequest
    from .report import already_text, report_text
    from .run import run_conversion

    rank = int(os.environ.get('RANK', '0'))
    first = rank == 0
    told: list[bool] = []
    request = ConversionRequest(
        **vars(args),
        on_plan=lambda result: told.append(_show_plan(result)),
    )

    def work() -> None:
        result = run_conversion(request)
        if first and result.already:
            tell(already_text(result))
        elif first and not args.dry_run:
            tell(report_text(result))  # published, whoever reads this
        if first and args.report:
            write_json(result, args.report)

    return carry_out(work, rank) or int(args.dry_run and not all(told))


def _show_plan(result: 'ConversionResult') -> bool:
    from .report import plan_text

    return result.already or tell(plan_text(result))
