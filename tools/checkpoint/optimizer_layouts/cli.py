"""The command line of ``convert_ckpt_optimizer.py``."""

import argparse
import os
from collections.abc import Sequence

from megatron_overlay.standalone.dist_checkpointing.format_names import FSDP_DTENSOR, TORCH_DIST

from ..common.arguments import Parser, local_path, natural
from ..common.stdout import complain
from ..merge import command

_DESCRIPTION = """\
Convert a torch_dist checkpoint's optimizer state into fully_reshardable, which loads into any TP,
PP, EP, VPP and DP size, GPT and hybrid.

Read are dp_reshardable checkpoints, megatron-core's default, and fully_sharded_model_space, the
default up to megatron-core 0.14. The place of every parameter is derived from the metadata and
proven by its weight, bit for bit; what can't be proven is refused. A checkpoint of Megatron-FSDP
(fsdp_dtensor), GPT or hybrid, is converted with its weights, by names and shapes; --to fsdp_dtensor
makes one of a torch_dist checkpoint.
Weights and all other state are copied as they are. Nothing is built or run on a GPU. Start it with
plain python for one process, with torchrun or srun for several. An existing output is never
replaced, and on any error or signal nothing is published.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=_DESCRIPTION)
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
        choices=[TORCH_DIST, FSDP_DTENSOR],
        default=TORCH_DIST,
        help='format of the output (default: %(default)s, with fully_reshardable optimizer state)',
    )
    command.add_trust(parser)
    command.add_run_options(
        parser,
        dry_run='derive everything from the metadata, print the plan, write nothing',
        verify='before publishing read the output back and put every chunk together again, by '
        'another path',
    )
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, convert, report; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    command.check_report(parser, args)
    reason = command.start_up(None if os.path.exists(args.load_dir) else args.load_dir)
    if reason is not None:
        return complain(reason)

    from .prepare import ConversionRequest
    from .report import plan_text, report_text
    from .run import run_conversion

    request = ConversionRequest(**vars(args))
    return command.carry_out(request, run_conversion, plan_text, report_text)
