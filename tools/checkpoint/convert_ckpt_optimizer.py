r"""Convert a checkpoint's optimizer state so that it loads into any parallel layout.

From a shell::

    python tools/checkpoint/convert_ckpt_optimizer.py --load-dir D --save-dir OUT
    torchrun --nproc-per-node 8 tools/checkpoint/convert_ckpt_optimizer.py \
        --load-dir D --save-dir OUT

From Python: ``convert_optimizer``.
"""

import os
import sys

if __package__ in (None, ''):  # run as a script
    sys.path.insert(0, os.path.realpath(f'{__file__}/../../..'))
    __package__ = 'tools.checkpoint'
if __name__ == '__main__':  # before the imports that take their time
    from .common.interrupt import end_on_interrupt

    end_on_interrupt()

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .common.interrupt import ends_on_interrupt

if TYPE_CHECKING:
    from .optimizer_layouts.report import ConversionResult

__all__ = ['convert_optimizer', 'main']


def convert_optimizer(
    load_dir: str | Path,
    save_dir: str | Path,
    iteration: int | None = None,
    *,
    dry_run: bool = False,
    verify: bool = False,
    trust_checkpoints: bool = False,
    threads: int | None = None,
    to: str = 'torch_dist',
) -> 'ConversionResult':
    """Convert a checkpoint's optimizer state into ``fully_reshardable``, or ``fsdp_dtensor``.

    Collective over the existing process group, or the one that RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT describe (gloo; left as it was found), or just this process.

    Args:
        load_dir: checkpoint directory, or a root with a tracker
        save_dir: root of the output's ``iter_XXXXXXX`` and tracker
        iteration: of the root; None for the one that the tracker names
        threads: writer threads of each rank; default: torch's number of threads, at most 4

        The others are the command line's flags of the same names.

    Returns:
        what was done, the same on every rank

    Raises:
        CheckpointError: (a ``ValueError``) anything wrong with the input, the files or the other
            ranks; nothing is published then
    """
    from .optimizer_layouts.prepare import ConversionRequest
    from .optimizer_layouts.run import run_conversion

    return run_conversion(
        ConversionRequest(
            load_dir=Path(load_dir),
            save_dir=Path(save_dir),
            iteration=iteration,
            dry_run=dry_run,
            verify=verify,
            trust_checkpoints=trust_checkpoints,
            threads=threads,
            to=to,
        )
    )


@ends_on_interrupt
def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 0, 1 on an error, 2 on wrong usage, 128 + n on signal n."""
    from .optimizer_layouts.cli import run

    return run(argv)


if __name__ == '__main__':
    sys.exit(main())
