"""Tell what a checkpoint is and which tools and loads take it, from its metadata alone.

From a shell::

    python tools/checkpoint/inspect_checkpoint.py PATH
    python tools/checkpoint/inspect_checkpoint.py --diff A B

From Python: ``inspect_checkpoint`` and ``compare_checkpoints``.
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
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .common.arguments import Parser, not_a_url
from .common.interrupt import ends_on_interrupt
from .common.quiet import import_quickly, missing_packages
from .common.stdout import complain, tell

if TYPE_CHECKING:
    from .inspection.compare import Comparison
    from .inspection.summary import CheckpointSummary

__all__ = ['compare_checkpoints', 'inspect_checkpoint', 'main']

_DESCRIPTION = """\
Tell what a checkpoint is: format, model family and layers, parallel layout, dtypes, bytes,
optimizer format, where common state stands, integrity manifest; and which tools and loads take it:
weighted merge, PP/VPP converter, GPT into a hybrid run, resuming with the optimizer. Each "no" has
its reason.

Formats are torch_dist, fsdp_dtensor, torch_dcp and torch (legacy, mp_rank_*). Metadata and common
state are read, no tensor is, and nothing in a checkpoint is run. Every file that the metadata names
has to be there and long enough.
"""
_EPILOG = """\
exit status: 0 when PATH was inspected, or A and B can be merged; 1 when not, with the reason in one
line where there is nothing to report on; 2 on wrong usage
"""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=_DESCRIPTION, epilog=_EPILOG)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        'path',
        nargs='?',
        type=not_a_url,
        metavar='PATH',
        help='directory of one iteration (iter_XXXXXXX, release, or of any other name), or a root '
        'with latest_checkpointed_iteration.txt',
    )
    what.add_argument(
        '--diff',
        nargs=2,
        type=not_a_url,
        metavar=('A', 'B'),
        help='list everything that keeps two checkpoints from being merged, by the checks of the '
        'weighted merge, and the options with which it takes them',
    )
    parser.add_argument('--json', action='store_true', help='print one JSON object instead of text')
    return parser


def inspect_checkpoint(path: str | Path) -> 'CheckpointSummary':
    """What a checkpoint is and which tools and loads take it; printable.

    Args:
        path: directory of one iteration, or a root with a tracker

    Raises:
        CheckpointingException: no checkpoint there, or one that is unfinished, cut short, damaged,
            or holds what would have to be run
        OSError: a file can't be read
    """
    from megatron_overlay.standalone.dist_checkpointing.format_names import LEGACY

    from .common.directory import find_checkpoint
    from .common.errors import reading

    found = find_checkpoint(path)
    with reading(found.directory, 'checkpoint that Megatron wrote'):
        if found.format == LEGACY:
            from .inspection.legacy import summarise_legacy

            return summarise_legacy(found)
        from .inspection.distributed import summarise_distributed

        return summarise_distributed(found)


def compare_checkpoints(first: str | Path, other: str | Path) -> 'Comparison':
    """What keeps two ``torch_dist`` checkpoints from being merged; ``mergeable`` is the verdict.

    Raises:
        CheckpointError: one of the paths is no checkpoint that the merge knows, or both are the
            same
    """
    from .inspection.compare import compare_checkpoints as compare

    return compare(first, other)


@ends_on_interrupt
def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 0, 1 (see ``--help``), or 2 on wrong usage."""
    args = make_parser().parse_args(argv)
    reason = missing_packages()
    if reason is not None:
        return complain(reason)
    import_quickly('torch.distributed.checkpoint')
    from .common.errors import CheckpointingException, one_line
    from .common.safe_load import NOTHING_RUNS, TRUST_HINT
    from .inspection.report import comparison_text

    try:
        if args.diff is None:
            result: CheckpointSummary | Comparison = inspect_checkpoint(args.path)
            text, status = str(result), 0
        else:
            result = compare_checkpoints(*args.diff)
            text, status = comparison_text(result), int(not result.mergeable)
    except CheckpointingException as error:
        return complain(str(error).replace(TRUST_HINT, NOTHING_RUNS))
    except OSError as error:
        return complain(
            f'{error.filename}: {error.strerror}' if error.filename else one_line(error)
        )
    told = tell(json.dumps(result.as_json(), indent=2) if args.json else text)
    return status if told else 1


if __name__ == '__main__':
    sys.exit(main())
