r"""Convert legacy Megatron checkpoints between pipeline stages and virtual pipeline chunks.

From a shell::

    python tools/checkpoint/convert_ckpt_pp_vpp.py reshape --load-dir D --save-dir OUT \
        --pipeline-size 2 --virtual-size 2

From Python: ``main`` with the same words; or, to catch ``CheckpointError`` and see the plan,
``prepare`` and ``execute`` of ``pp_vpp.convert`` on a conversion that ``pp_vpp.commands`` makes.
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
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from .common.arguments import Parser, local_path, natural, positive
from .common.errors import CheckpointError
from .common.interrupt import ends_on_interrupt
from .common.quiet import import_quickly, missing_packages
from .common.stdout import complain, tell
from .pp_vpp import commands

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


_HOW_TO_MERGE = """\
Stages become virtual chunks. One of these, none of them with options of another:

  all ranks      --pipeline-size P --load-dir D --save-dir OUT
  edge and cloud --merge-stages 0,3 --merge-cloud-stages 1,2
  the same, with cloud ranks that keep one stage each
                 --merge-stages 0,3 --middle-stages 1,2

Edge and cloud read --load-dir D, or --load-dir-edge E and --load-dir-cloud C, and write
--save-dir-edge E and --save-dir-cloud C.
"""
_HOW_TO_SPLIT = """\
Chunks become stages again, in --save-dir. One of these, none of them with options of another:

  all ranks      --load-dir D
  edge and cloud --num-cloud-vpp-chunks K [--split-rank R] [--split-cloud-rank R]
  the same, with cloud ranks that keep one stage each
                 --middle-ranks 1,2 [--split-rank R]

Edge and cloud read --load-dir D, or --load-dir-edge E and --load-dir-cloud C.
"""
_HOW_TO_RESHAPE = """\
Any stages or chunks become any others: --load-dir D --save-dir OUT --pipeline-size P
--virtual-size V, where V 1 makes plain stages.
"""


class Misuse(ValueError):
    """Arguments that don't go together, or one that is missing."""


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


# Options by command: how the text is read, what stands for it in the help, the help itself.
_Options = dict[str, tuple[Callable[[str], Any], str, str]]

_MERGE: _Options = {
    'merge-stages': (
        _integers,
        '0,3',
        'stages that become chunks model0, model1, ... of edge rank 0',
    ),
    'merge-cloud-stages': (_integers, '1,2', 'stages that become chunks of cloud rank 0'),
    'middle-stages': (
        _integers,
        '1,2,3',
        'or: stages kept as cloud ranks 1, 2, 3, each in model0 beside an empty model1',
    ),
    'pipeline-size': (
        _positive,
        'P',
        'or: all stages become chunks of P ranks in interleaved order (rank r, chunk c holds stage '
        'c*P + r); takes --load-dir and --save-dir',
    ),
}
_SPLIT: _Options = {
    'split-rank': (
        _natural,
        'R',
        'edge rank whose model0 becomes stage 0 and whose model1 the last (default: 0)',
    ),
    'split-cloud-rank': (
        _natural,
        'R',
        'cloud rank whose model0, model1, ... become stages 1, 2, ... (default: 0)',
    ),
    'num-cloud-vpp-chunks': (_positive, 'K', 'number of chunks of that rank'),
    'middle-ranks': (_integers, '1,2,3', 'or: cloud ranks whose model0 becomes stage 1, 2, 3'),
}
_RESHAPE: _Options = {
    'pipeline-size': (_positive, 'P', 'pipeline ranks of the output'),
    'virtual-size': (_positive, 'V', 'chunks of each rank; 1 for plain stages'),
    'layers-per-chunk': (
        _integers,
        '3,2,2,3',
        'layers of each chunk in pipeline order: chunk 0 of every rank, then chunk 1, ... '
        '(default: equally many)',
    ),
}
_COMMON: _Options = {
    'iteration': (
        _natural,
        'N',
        'iteration to convert (default: the tracker of the (edge) source; `release` there means '
        'the release directory)',
    ),
    'workers': (_positive, 'N', 'rank files written at the same time (default: one a CPU)'),
}
_SWITCHES = {
    'drop-optimizer': 'convert without optimizer state',
    'overwrite': 'replace an output that exists, once the new one is complete',
    'dry-run': 'check everything, print the mapping and write nothing',
    'trust-checkpoints': 'load classes that are not on the allow-list, which can run code',
}
_LOAD = ('load-dir', 'load-dir-edge', 'load-dir-cloud')
_SAVE = ('save-dir', 'save-dir-edge', 'save-dir-cloud')


def parser() -> argparse.ArgumentParser:
    top = Parser(description=_DESCRIPTION)
    subparsers = top.add_subparsers(dest='command', required=True, metavar='COMMAND')
    for name, what, how, directories, options, required in (
        ('merge', 'PP to VPP', _HOW_TO_MERGE, _LOAD + _SAVE, _MERGE, ()),
        ('split', 'VPP to PP', _HOW_TO_SPLIT, _LOAD + _SAVE[:1], _SPLIT, ()),
        (
            'reshape',
            'any (PP, VPP) to any other',
            _HOW_TO_RESHAPE,
            _LOAD[:1] + _SAVE[:1],
            _RESHAPE,
            ('pipeline-size', 'virtual-size'),
        ),
    ):
        command = subparsers.add_parser(name, help=what, description=how)
        for directory in directories:
            verb, _, side = directory.partition('-dir')
            text = 'root of the source' if verb == 'load' else 'root of the output'
            text += side.replace('-', ', ')
            command.add_argument(f'--{directory}', type=_path, metavar='DIR', help=text)
        for option, (kind, metavar, text) in {**options, **_COMMON}.items():
            command.add_argument(
                f'--{option}', type=kind, metavar=metavar, help=text, required=option in required
            )
        for switch, text in _SWITCHES.items():
            command.add_argument(f'--{switch}', action='store_true', help=text)
    return top


def conversion(args: argparse.Namespace) -> commands.Conversion:
    """What the arguments ask for.

    Raises:
        Misuse: arguments that don't go together, or one that is missing
        CheckpointError: a source that is no directory
    """
    from .common.paths import refuse_no_directory

    made = {'merge': _merge, 'split': _split, 'reshape': _reshape}[args.command](args)
    for root in made.sources.values():
        refuse_no_directory(root)
    return made


def _reshape(args: argparse.Namespace) -> commands.Conversion:
    _need(args, 'load_dir', 'save_dir', 'pipeline_size', 'virtual_size')
    sizes = args.pipeline_size, args.virtual_size, args.layers_per_chunk
    return commands.reshape(*sizes, args.load_dir, args.save_dir)


def _merge(args: argparse.Namespace) -> commands.Conversion:
    sides = ('load_dir_edge', 'load_dir_cloud', 'save_dir_edge', 'save_dir_cloud')
    if args.pipeline_size is not None:
        stages = ('merge_stages', 'merge_cloud_stages', 'middle_stages')
        _refuse(args, '--pipeline-size', *stages, *sides)
        _need(args, 'load_dir', 'save_dir')
        return commands.merge_plain(args.pipeline_size, args.load_dir, args.save_dir)
    _refuse(args, '--merge-stages', 'save_dir')
    _need(args, 'merge_stages', 'save_dir_edge', 'save_dir_cloud')
    if args.merge_cloud_stages is not None:
        _refuse(args, '--merge-cloud-stages', 'middle_stages')
    elif args.middle_stages is None:
        raise Misuse('--merge-stages: needs --merge-cloud-stages or --middle-stages too')
    return commands.merge_sides(
        args.merge_stages,
        args.merge_cloud_stages or [],
        args.middle_stages or [],
        _sources(args),
        {'edge': args.save_dir_edge, 'cloud': args.save_dir_cloud},
    )


def _split(args: argparse.Namespace) -> commands.Conversion:
    _need(args, 'save_dir')
    options = [getattr(args, name.replace('-', '_')) for name in _SPLIT]
    if args.load_dir is not None and all(option is None for option in options):
        _refuse(args, '--load-dir', 'load_dir_edge', 'load_dir_cloud')
        return commands.split_plain(args.load_dir, args.save_dir)
    if args.middle_ranks is not None:
        _refuse(args, '--middle-ranks', 'split_cloud_rank', 'num_cloud_vpp_chunks')
    elif args.num_cloud_vpp_chunks is None:
        raise Misuse('split: needs --num-cloud-vpp-chunks or --middle-ranks')
    return commands.split_sides(
        args.split_rank or 0,
        args.split_cloud_rank or 0,
        args.num_cloud_vpp_chunks or 0,
        args.middle_ranks or [],
        _sources(args),
        args.save_dir,
    )


def _sources(args: argparse.Namespace) -> dict[str, Path]:
    if args.load_dir is not None:
        _refuse(args, '--load-dir', 'load_dir_edge', 'load_dir_cloud')
        return {'edge': args.load_dir, 'cloud': args.load_dir}
    _need(args, 'load_dir_edge', 'load_dir_cloud')
    return {'edge': args.load_dir_edge, 'cloud': args.load_dir_cloud}


def _need(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name) is None:
            raise Misuse(f'{args.command}: needs --{name.replace("_", "-")}')


def _refuse(args: argparse.Namespace, flag: str, *names: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise Misuse(f'{flag} and --{name.replace("_", "-")} exclude each other')


@ends_on_interrupt
def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 0, 1 on an error, 2 on wrong usage, 128 + n on signal n."""
    args = parser().parse_args(argv)
    reason = missing_packages()
    if reason is not None:
        return complain(reason)
    try:
        asked = conversion(args)
    except (Misuse, CheckpointError) as error:
        return complain(error)
    return _run(asked, args)


def _run(asked: commands.Conversion, args: argparse.Namespace) -> int:
    import_quickly('torch')
    from .common.progress import format_bytes, format_seconds
    from .common.publish import Interrupted
    from .pp_vpp.convert import Options, execute, prepare
    from .pp_vpp.table import mapping_table, outputs_summary, trackers_summary

    options = Options(**{option.name: getattr(args, option.name) for option in fields(Options)})
    start = time.perf_counter()
    try:
        checked = prepare(asked, options)
        for note in checked.notes:
            print(f'note: {note}', file=sys.stderr)
        if args.dry_run:
            written = f'{format_bytes(checked.bytes)} would be written; nothing was (--dry-run)'
            outputs = [*outputs_summary(checked), *trackers_summary(checked)]
            plan = [mapping_table(checked), *outputs, written]
            return 0 if tell('\n'.join(plan)) else 1
        execute(checked, options)
    except CheckpointError as error:
        return complain(error)
    except Interrupted as stopped:
        complain(stopped)
        return stopped.exit_code
    seconds = format_seconds(time.perf_counter() - start)
    written = f'{format_bytes(checked.bytes)} written in {seconds}'
    tell('\n'.join([*outputs_summary(checked), written]))  # published, whoever reads this
    return 0


if __name__ == '__main__':
    sys.exit(main())
