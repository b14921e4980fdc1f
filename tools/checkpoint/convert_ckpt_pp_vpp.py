r"""Convert legacy Megatron checkpoints between pipeline stages and virtual pipeline chunks.

From a shell::

    python tools/checkpoint/convert_ckpt_pp_vpp.py reshape --load-dir D --save-dir OUT \
        --pipeline-size 2 --virtual-size 2

From Python: ``main`` with the same words; or, to catch ``CheckpointError`` and see the plan,
``prepare`` and ``execute`` of ``pp_vpp.convert`` on a request that ``pp_vpp.commands`` makes.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ''):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    __package__ = 'tools.checkpoint'

from .common.arguments import add_version, local_path, natural, positive
from .common.quiet import missing_packages
from .common.stdout import complain, tell

if TYPE_CHECKING:
    from .pp_vpp.commands import Request

# torch and megatron-core take seconds to import: arguments that can't work are told before that.

_DESCRIPTION = """\
Convert legacy Megatron checkpoints (--ckpt-format torch) between pipeline stages (key `model`) and
virtual pipeline chunks (keys `model0`, `model1`, ...). Optimizer state goes along.

  merge    stages become chunks: of one edge and one cloud side, or of --pipeline-size ranks
  split    chunks become stages again
  reshape  any stages or chunks to any others, layer by layer

Nothing is written before every input has been checked, an existing output is replaced with
--overwrite only, and all outputs appear together or not at all.
"""


_MERGE = """\
Stages become virtual chunks. One of these, none of them with options of another:

  all ranks      --pipeline-size P --load-dir D --save-dir OUT
  edge and cloud --merge-stages 0,3 --merge-cloud-stages 1,2
  the same, with cloud ranks that keep one stage each
                 --merge-stages 0,3 --middle-stages 1,2

Edge and cloud read --load-dir D, or --load-dir-edge E and --load-dir-cloud C, and write
--save-dir-edge E and --save-dir-cloud C.
"""
_SPLIT = """\
Chunks become stages again, in --save-dir. One of these, none of them with options of another:

  all ranks      --load-dir D
  edge and cloud --num-cloud-vpp-chunks K [--split-rank R] [--split-cloud-rank R]
  the same, with cloud ranks that keep one stage each
                 --middle-ranks 1,2 [--split-rank R]

Edge and cloud read --load-dir D, or --load-dir-edge E and --load-dir-cloud C.
"""
_RESHAPE = """\
Any stages or chunks become any others: --load-dir D --save-dir OUT --pipeline-size P
--virtual-size V, where V 1 makes plain stages.
"""


class Misuse(ValueError):
    """Arguments that don't go together, or a source that isn't there."""


# An option given as '' is absent: that is a shell variable which is empty.
def _integers(text: str) -> list[int] | None:
    if not text.strip():
        return None
    try:
        numbers = [int(part) for part in text.split(',')]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0:
        raise argparse.ArgumentTypeError(f'{text!r}: expected numbers such as 0,3')
    return numbers


def _natural(text: str) -> int | None:
    return natural(text.strip()) if text.strip() else None


def _positive(text: str) -> int | None:
    return positive(text.strip()) if text.strip() else None


def _path(text: str) -> Path | None:
    return local_path(text) if text else None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(top)
    subparsers = top.add_subparsers(dest='command', required=True, metavar='COMMAND')
    merge = _add_command(subparsers, 'merge', 'PP to VPP', _MERGE)
    _add_directories(merge, 'load-dir', 'load-dir-edge', 'load-dir-cloud')
    _add_directories(merge, 'save-dir', 'save-dir-edge', 'save-dir-cloud')
    merge.add_argument(
        '--merge-stages',
        type=_integers,
        metavar='0,3',
        help='stages that become chunks model0, model1, ... of edge rank 0',
    )
    merge.add_argument(
        '--merge-cloud-stages',
        type=_integers,
        metavar='1,2',
        help='stages that become chunks of cloud rank 0',
    )
    merge.add_argument(
        '--middle-stages',
        type=_integers,
        metavar='1,2,3',
        help='or: stages kept as cloud ranks 1, 2, 3, each in model0 beside an empty model1',
    )
    merge.add_argument(
        '--pipeline-size',
        type=_positive,
        metavar='P',
        help='or: all stages become chunks of P ranks in interleaved order (rank r, '
        'chunk c holds stage c*P + r); takes --load-dir and --save-dir',
    )
    split = _add_command(subparsers, 'split', 'VPP to PP', _SPLIT)
    _add_directories(split, 'load-dir', 'load-dir-edge', 'load-dir-cloud', 'save-dir')
    split.add_argument(
        '--split-rank',
        type=_natural,
        metavar='R',
        help='edge rank whose model0 becomes stage 0 and whose model1 the last (default: 0)',
    )
    split.add_argument(
        '--split-cloud-rank',
        type=_natural,
        metavar='R',
        help='cloud rank whose model0, model1, ... become stages 1, 2, ... (default: 0)',
    )
    split.add_argument(
        '--num-cloud-vpp-chunks', type=_positive, metavar='K', help='number of chunks of that rank'
    )
    split.add_argument(
        '--middle-ranks',
        type=_integers,
        metavar='1,2,3',
        help='or: cloud ranks whose model0 becomes stage 1, 2, 3',
    )
    reshape = _add_command(subparsers, 'reshape', 'any (PP, VPP) to any other', _RESHAPE)
    _add_directories(reshape, 'load-dir', 'save-dir')
    reshape.add_argument(
        '--pipeline-size',
        type=_positive,
        metavar='P',
        required=True,
        help='pipeline ranks of the output',
    )
    reshape.add_argument(
        '--virtual-size',
        type=_positive,
        metavar='V',
        required=True,
        help='chunks of each rank; 1 for plain stages',
    )
    reshape.add_argument(
        '--layers-per-chunk',
        type=_integers,
        metavar='3,2,2,3',
        help='layers of each chunk in pipeline order: chunk 0 of every rank, then '
        'chunk 1, ... (default: equally many)',
    )
    for command in (merge, split, reshape):
        _add_common(command)
    return top


def _add_command(
    subparsers: Any, name: str, summary: str, description: str
) -> argparse.ArgumentParser:
    command = subparsers.add_parser(
        name,
        help=summary,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(command)
    return command


def _add_directories(command: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        what, _, side = name.partition('-dir')
        text = 'root of the source' if what == 'load' else 'root of the output'
        command.add_argument(
            f'--{name}', type=_path, metavar='DIR', help=text + side.replace('-', ', ')
        )


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        '--iteration',
        type=_natural,
        metavar='N',
        help='iteration to convert (default: the tracker of the (edge) source; '
        '`release` there means the release directory)',
    )
    command.add_argument(
        '--drop-optimizer', action='store_true', help='convert without optimizer state'
    )
    command.add_argument(
        '--workers',
        type=_positive,
        metavar='N',
        help='rank files written at the same time (default: one a CPU)',
    )
    command.add_argument(
        '--overwrite',
        action='store_true',
        help='replace an output that exists, once the new one is complete',
    )
    command.add_argument(
        '--dry-run',
        action='store_true',
        help='check everything, print the mapping and write nothing',
    )
    command.add_argument(
        '--trust-checkpoints',
        action='store_true',
        help='load classes that are not on the allow-list, which can run code',
    )


def request(args: argparse.Namespace) -> 'Request':
    """What the arguments ask for.

    Raises:
        Misuse: arguments that don't go together, or one that is missing
    """
    if args.command == 'reshape':
        _need(args, 'load_dir', 'save_dir', 'pipeline_size', 'virtual_size')
        _need_sources(args)
        from .pp_vpp import commands

        return commands.reshape(
            args.pipeline_size,
            args.virtual_size,
            args.layers_per_chunk,
            args.load_dir,
            args.save_dir,
        )
    return _merge(args) if args.command == 'merge' else _split(args)


def _merge(args: argparse.Namespace) -> 'Request':
    if args.pipeline_size is not None:
        _refuse(
            args,
            '--pipeline-size',
            'merge_stages',
            'merge_cloud_stages',
            'middle_stages',
            'load_dir_edge',
            'load_dir_cloud',
            'save_dir_edge',
            'save_dir_cloud',
        )
        _need(args, 'load_dir', 'save_dir')
        _need_sources(args)
        from .pp_vpp import commands

        return commands.merge_plain(args.pipeline_size, args.load_dir, args.save_dir)
    _refuse(args, '--merge-stages', 'save_dir')
    _need(args, 'merge_stages', 'save_dir_edge', 'save_dir_cloud')
    if args.merge_cloud_stages is not None:
        _refuse(args, '--merge-cloud-stages', 'middle_stages')
    elif args.middle_stages is None:
        raise Misuse('--merge-stages: needs --merge-cloud-stages or --middle-stages too')
    sources = _sides(args)
    from .pp_vpp import commands

    return commands.merge_sides(
        args.merge_stages,
        args.merge_cloud_stages or [],
        args.middle_stages or [],
        sources,
        {'edge': args.save_dir_edge, 'cloud': args.save_dir_cloud},
    )


def _split(args: argparse.Namespace) -> 'Request':
    _need(args, 'save_dir')
    sides = ('split_rank', 'split_cloud_rank', 'num_cloud_vpp_chunks', 'middle_ranks')
    if all(getattr(args, name) is None for name in sides) and args.load_dir is not None:
        _refuse(args, '--load-dir', 'load_dir_edge', 'load_dir_cloud')
        _need_sources(args)
        from .pp_vpp import commands

        return commands.split_plain(args.load_dir, args.save_dir)
    if args.middle_ranks is not None:
        _refuse(args, '--middle-ranks', 'split_cloud_rank', 'num_cloud_vpp_chunks')
    elif args.num_cloud_vpp_chunks is None:
        raise Misuse('split: needs --num-cloud-vpp-chunks or --middle-ranks')
    sources = _sides(args)
    from .pp_vpp import commands

    return commands.split_sides(
        args.split_rank or 0,
        args.split_cloud_rank or 0,
        args.num_cloud_vpp_chunks or 0,
        args.middle_ranks or [],
        sources,
        args.save_dir,
    )


def _sides(args: argparse.Namespace) -> dict[str, Path]:
    if args.load_dir is not None:
        _refuse(args, '--load-dir', 'load_dir_edge', 'load_dir_cloud')
        _need_sources(args)
        return {'edge': args.load_dir, 'cloud': args.load_dir}
    _need(args, 'load_dir_edge', 'load_dir_cloud')
    _need_sources(args)
    return {'edge': args.load_dir_edge, 'cloud': args.load_dir_cloud}


def _need(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name) is None:
            raise Misuse(f'{args.command}: needs --{name.replace("_", "-")}')


def _refuse(args: argparse.Namespace, flag: str, *names: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise Misuse(f'{flag} and --{name.replace("_", "-")} exclude each other')


def _need_sources(args: argparse.Namespace) -> None:
    for name in ('load_dir', 'load_dir_edge', 'load_dir_cloud'):
        root = getattr(args, name, None)
        if root is not None and not os.path.isdir(root):
            raise Misuse(f'{root}: no such directory')


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments; those of the process where None

    Returns:
        0, 1 after an error, 2 on wrong usage, 128 plus the number of a signal that stopped it
    """
    args = parser().parse_args(argv)
    reason = missing_packages()
    if reason is not None:
        return complain(reason)
    try:
        asked = request(args)
    except Misuse as error:
        return complain(error)
    try:
        return _run(asked, args)
    except KeyboardInterrupt:
        return 130


def _run(asked: 'Request', args: argparse.Namespace) -> int:
    from .common.errors import CheckpointError
    from .common.progress import format_bytes, format_seconds
    from .common.publish import Interrupted
    from .pp_vpp.convert import Options, execute, prepare
    from .pp_vpp.table import mapping_table, outputs_summary, trackers_summary

    options = Options(
        args.iteration,
        args.drop_optimizer,
        args.trust_checkpoints,
        args.workers,
        args.dry_run,
        args.overwrite,
    )
    start = time.perf_counter()
    try:
        prepared = prepare(asked, options)
        for note in prepared.notes:
            print(f'note: {note}', file=sys.stderr)
        if args.dry_run:
            written = f'{format_bytes(prepared.bytes)} would be written; nothing was (--dry-run)'
            outputs = [*outputs_summary(prepared), *trackers_summary(prepared)]
            plan = [mapping_table(prepared), *outputs, written]
            return 0 if tell('\n'.join(plan)) else 1
        execute(prepared, options)
    except CheckpointError as error:
        return complain(error)
    except Interrupted as stopped:
        complain(stopped)
        return stopped.exit_code
    seconds = format_seconds(time.perf_counter() - start)
    written = f'{format_bytes(prepared.bytes)} written in {seconds}'
    tell('\n'.join([*outputs_summary(prepared), written]))  # published, whoever reads this
    return 0


if __name__ == '__main__':
    sys.exit(main())
