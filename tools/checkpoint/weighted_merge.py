r"""Merge the model tensors of several ``torch_dist`` checkpoints as a weighted sum.

From a shell::

    python tools/checkpoint/weighted_merge.py --merge-inputs A:0.5 B:0.5 --merge-output OUT
    torchrun --nproc-per-node 8 tools/checkpoint/weighted_merge.py --merge-inputs ROOT \
        --start-checkpoint 8000 --end-checkpoint 10000 --merge-style minus-sqrt --merge-output OUT

From Python: ``merge_same_layout_dcp_metadata_checkpoints`` and ``checkpoint_coefficients``.
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
from typing import TYPE_CHECKING, Any

from .common.interrupt import ends_on_interrupt
from .merge.schedules import checkpoint_coefficients

if TYPE_CHECKING:
    from .merge.report import MergeResult

__all__ = ['checkpoint_coefficients', 'main', 'merge_same_layout_dcp_metadata_checkpoints']


def merge_same_layout_dcp_metadata_checkpoints(
    input_dirs: Sequence[str | Path],
    weights: Sequence[float],
    output_dir: str | Path,
    output_iteration: int | None = None,
    save_dtype: str = 'same',
    merge_style: str | None = None,
    balance_rank_work: bool = False,
    *,
    normalize: bool = False,
    common_state_checkpoint: str | Path | None = None,
    **options: Any,
) -> 'MergeResult':
    """Merge checkpoints into a new one.

    Collective over the existing process group, or the one that RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT describe (gloo; left as it was found), or just this process.

    Args:
        input_dirs: checkpoint directories, or roots with a tracker, in the order of accumulation
        weights: one for each, rounded to fp32 and used as they are
        output_dir: where to write; with ``output_iteration`` the root of its ``iter_XXXXXXX``
        output_iteration: iteration of the output; also written to the tracker
        save_dtype: ``same``, ``float32``, ``float16`` or ``bfloat16``
        merge_style: name of the weights' schedule, for the provenance only
        balance_rank_work: share out chunks over ranks by size
        normalize: scale the weights to sum 1
        common_state_checkpoint: checkpoint that common state and ``_extra_state`` come from
        options: ``keep_fp32``, ``extra_state_source_index``, ``byte_accounting``, ``model_only``,
            ``allow_reshard``, ``allow_nonfinite``, ``trust_checkpoints``, ``verify``,
            ``save_integrity``, ``dry_run``: the command line's flags of these names; ``threads``:
            writer threads of each rank, by default torch's number of threads, at most 4

    Returns:
        what was done, the same on every rank: ``output_dir``, ``inputs``, ``weights``,
        ``averaged_tensors``, ``bytes_read``, ``bytes_written``, ``timings``, ``warnings``, …

    Raises:
        CheckpointError: (a ``ValueError``) anything wrong with the inputs, the files or the other
            ranks; nothing is published then
    """
    from .merge.inputs import explicit_inputs
    from .merge.request import MergeRequest
    from .merge.run import run_merge

    given = None if common_state_checkpoint is None else Path(common_state_checkpoint)
    return run_merge(
        MergeRequest(
            inputs=lambda: explicit_inputs(
                input_dirs, weights, style=merge_style, normalize=normalize
            ),
            output_dir=Path(output_dir),
            output_iteration=output_iteration,
            save_dtype=save_dtype,
            balance_rank_work=balance_rank_work,
            common_state_checkpoint=given,
            **options,
        )
    )


@ends_on_interrupt
def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 0, 1 on an error, 2 on wrong usage, 128 + n on signal n."""
    from .merge.cli import run

    return run(argv)


if __name__ == '__main__':
    sys.exit(main())
