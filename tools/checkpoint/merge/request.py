"""What a user asks for, by the names that the command line and the library share.

Nothing here needs torch, so that ``--help`` is there at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .inputs import Inputs

SAVE_DTYPES = ('same', 'float32', 'float16', 'bfloat16')
BYTE_ACCOUNTING = ('rank0', 'each-rank', 'all', 'none')


@dataclass(kw_only=True)
class Request:
    """What every command that writes a checkpoint on several ranks takes.

    Attributes:
        report: file that the caller writes when all is done; checked before anything is written
        threads: writer threads of each rank; None for torch's number of threads, at most
            ``MAX_THREADS``
        on_plan: shown what is known of the result, on rank 0, before anything is written
    """

    dry_run: bool = False
    verify: bool = False
    trust_checkpoints: bool = False
    threads: int | None = None
    report: Path | None = None
    on_plan: Callable[[Any], object] = field(default=lambda result: None)


@dataclass
class MergeRequest(Request):
    """What to merge and how; see the command line for the meaning of each.

    Attributes:
        inputs: finds the inputs; called on rank 0 only, whose word counts
    """

    inputs: 'Callable[[], Inputs]'
    output_dir: Path
    output_iteration: int | None = None
    save_dtype: str = 'same'
    keep_fp32: Sequence[str] = ()
    balance_rank_work: bool = False
    extra_state_source_index: int | None = None
    common_state_checkpoint: Path | None = None
    byte_accounting: str = 'rank0'
    model_only: bool = False
    allow_reshard: bool = False
    allow_nonfinite: bool = False
    save_integrity: bool = False
