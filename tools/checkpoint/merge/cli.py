"""The command line of ``weighted_merge.py``."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from ..common.arguments import Parser, local_path, natural, not_a_url, positive
from ..common.stdout import complain, tell
from . import command
from .request import BYTE_ACCOUNTING, SAVE_DTYPES, MergeRequest
from .schedules import STYLES

if TYPE_CHECKING:
    from .inputs import Inputs

_DESCRIPTION = """\
Merge the model tensors of several torch_dist checkpoints into one, as a weighted sum.

Tensors are accumulated in fp32 in input order and cast once. Nothing is built or run on a GPU.
Start it with plain python for one process, with torchrun or srun for several, also on several
nodes. An existing output is never replaced, and on any error or signal nothing is published.

Give the inputs either as PATH:WEIGHT pairs, or as one ROOT with --start-checkpoint and
--end-checkpoint, which weighs the checkpoints in that range by --merge-style.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=_DESCRIPTION)
    inputs = parser.add_argument_group('inputs')
    inputs.add_argument(
        '--merge-inputs',
        nargs='+',
        type=not_a_url,
        required=True,
        metavar='INPUT',
        help='PATH:WEIGHT pairs (the weight is what follows the last colon; PATH is a checkpoint '
        'directory or a root with latest_checkpointed_iteration.txt), or one ROOT for a range',
    )
    inputs.add_argument(
        '--ckpt-format',
        choices=('torch_dist',),
        default='torch_dist',
        help='format of inputs and output; there is no other',
    )
    inputs.add_argument(
        '--start-checkpoint', type=natural, metavar='S', help='first iteration of the range'
    )
    inputs.add_argument(
        '--end-checkpoint',
        type=natural,
        metavar='E',
        help='last iteration of the range; its checkpoint must exist',
    )
    inputs.add_argument(
        '--min-iteration-interval',
        type=natural,
        default=0,
        metavar='N',
        help='range: walking back from E, keep a checkpoint only when it lies at least N '
        'iterations before the last one kept',
    )
    inputs.add_argument(
        '--min-checkpoints',
        type=positive,
        default=1,
        metavar='N',
        help='fail when fewer are merged (default: 1)',
    )
    inputs.add_argument(
        '--model-only',
        action='store_true',
        help='leave training state (optimizer, RNG) of the inputs unread instead of refusing it',
    )
    inputs.add_argument(
        '--allow-reshard',
        action='store_true',
        help="accept inputs whose chunk layouts differ; the output takes the first one's",
    )
    inputs.add_argument(
        '--allow-nonfinite',
        action='store_true',
        help='merge inputs that hold infinities or NaN; they are counted and named',
    )
    command.add_trust(inputs)

    weights = parser.add_argument_group('weights')
    weights.add_argument(
        '--merge-style',
        choices=STYLES,
        metavar='STYLE',
        help='range: linear (default: 1/n each), minus-sqrt, cosine or inverse-sqrt, each plain or '
        'with __reverse or __scramble. A style is the difference of a decay curve over the '
        'checkpoints; minus-sqrt (1 - sqrt(x)) weighs the OLDEST checkpoint most, since it stands '
        'for the learning rate that falls first: 0.577350, 0.239146, 0.183503 for three',
    )
    weights.add_argument(
        '--coefficient-seed',
        type=int,
        default=0,
        metavar='N',
        help='seed of __scramble (default: 0)',
    )
    weights.add_argument(
        '--coefficients',
        type=local_path,
        metavar='FILE',
        help='range: JSON or YAML file, iteration: weight, in place of a style',
    )
    weights.add_argument(
        '--normalize',
        action='store_true',
        help="scale weights to sum 1, as a style's do; without it given ones are used exactly",
    )

    output = parser.add_argument_group('output')
    output.add_argument(
        '--merge-output',
        dest='output_dir',
        type=local_path,
        required=True,
        metavar='DIR',
        help='where to write; with an output iteration DIR/iter_XXXXXXX, unless DIR is that '
        'directory already',
    )
    output.add_argument(
        '--output-iteration',
        type=natural,
        metavar='N',
        help='iteration of the output, recorded in its common state and in the tracker beside it '
        '(range: default E; pairs: default none, and then '
        'no tracker, without which --load finds nothing)',
    )
    output.add_argument(
        '--merge-save-dtype',
        dest='save_dtype',
        choices=SAVE_DTYPES,
        default='same',
        help="same (default: each tensor's own) or one for all; either way the inputs' dtypes must "
        'agree tensor by tensor',
    )
    output.add_argument(
        '--keep-fp32',
        nargs='+',
        default=[],
        action='extend',
        metavar='PATTERN',
        help='fp32 tensors, as shell-style patterns of whole names, that --merge-save-dtype leaves '
        'fp32 (router biases: "*.expert_bias"); the ones it narrows are listed',
    )
    output.add_argument(
        '--extra-state-source-index',
        type=natural,
        metavar='I',
        help='zero-based input whose _extra_state entries are copied (default: 0); in a range the '
        'inputs are in iteration order',
    )
    output.add_argument(
        '--common-state-checkpoint',
        type=local_path,
        metavar='PATH',
        help='checkpoint that supplies common state and _extra_state, where the inputs hold model '
        'shards only; an iteration recorded there must equal --output-iteration',
    )

    run = parser.add_argument_group('run')
    run.add_argument(
        '--merge-balance-rank-work',
        dest='balance_rank_work',
        action='store_true',
        help='share out chunks over ranks by size, largest first',
    )
    run.add_argument(
        '--merge-byte-accounting',
        dest='byte_accounting',
        choices=BYTE_ACCOUNTING,
        default='rank0',
        help='who stats the written files for the report (default: rank0); all is each-rank',
    )
    run.add_argument(
        '--save-integrity',
        action='store_true',
        help='write a SHA-256 manifest (integrity.json) into the output',
    )
    command.add_run_options(
        run,
        dry_run='check everything, print the plan, write nothing',
        verify='check SHA-256 manifests of the inputs, and before publishing read the output back '
        'and compute every chunk again by another path',
    )
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, merge, report; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    _check_usage(parser, args)
    reason = command.start_up(_missing_input(args))
    if reason is not None:
        return complain(reason)

    from .report import plan_text, report_text
    from .run import run_merge

    options = {option.name for option in fields(MergeRequest)}
    request = MergeRequest(
        inputs=lambda: _inputs(args),
        **{name: given for name, given in vars(args).items() if name in options},
    )
    return command.carry_out(request, run_merge, plan_text, report_text)


def _is_range(args: argparse.Namespace) -> bool:
    return args.start_checkpoint is not None and args.end_checkpoint is not None


def _check_usage(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the process where flags don't go together."""
    command.check_report(parser, args)
    if _is_range(args):
        if len(args.merge_inputs) != 1:
            parser.error('a range has one ROOT in --merge-inputs')
        if args.coefficients is not None and args.merge_style is not None:
            parser.error('--coefficients takes the place of --merge-style; give one')
    elif args.coefficients is not None:
        parser.error(
            '--coefficients is for a range: give one ROOT with --start-checkpoint and '
            '--end-checkpoint'
        )


def _missing_input(args: argparse.Namespace) -> str | None:
    """An input that isn't there, found before torch and megatron-core are imported, for seconds.

    Several ranks may see different files, and tell together.
    """
    if int(os.environ.get('WORLD_SIZE', '1')) > 1:
        return None
    paths = [given if _is_range(args) else given.rpartition(':')[0] for given in args.merge_inputs]
    return next((path for path in paths if path and not os.path.exists(path)), None)


def _inputs(args: argparse.Namespace) -> 'Inputs':
    from .inputs import manual_inputs, range_inputs

    if not _is_range(args):
        inputs = manual_inputs(
            args.merge_inputs, normalize=args.normalize, min_checkpoints=args.min_checkpoints
        )
        if (args.start_checkpoint, args.end_checkpoint) != (None, None):
            tell(
                'warning: --start-checkpoint and --end-checkpoint make a range only together; the '
                'pairs are merged as they are'
            )
        if (args.merge_style, args.min_iteration_interval) != (None, 0):
            tell(
                'warning: --merge-style and --min-iteration-interval are for a range; the pairs '
                'are merged as they are, with the weights given'
            )
        return inputs
    return range_inputs(
        args.merge_inputs[0],
        args.start_checkpoint,
        args.end_checkpoint,
        style=args.merge_style or 'linear',
        seed=args.coefficient_seed,
        min_interval=args.min_iteration_interval,
        min_checkpoints=args.min_checkpoints,
        coefficients=args.coefficients,
        normalize=args.normalize,
    )
