"""What is known of a stored checkpoint, and in which format its optimizer state is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .checkpoint_keys import FP32_PARAM, PARAM, parse_key
from .checkpoint_layout import CheckpointLayout
from .format_names import FLATTENED, GATHERED, IN_BUCKETS, NO_STATE, PLAIN, TORCH_DIST
from .saved_arguments import arguments_in


@dataclass(frozen=True)
class StoredCheckpoint:
    """What is known of a checkpoint.

    Attributes:
        layout: as its keys tell; None where they aren't looked at.
        common: its common state; of that, ``args`` and ``content_metadata`` may be missing.
        format: ``torch_dist`` or another name of ``--ckpt-format``.
        release: it is a release, of which nothing but weights is loaded.
        directory: of its iteration, for messages; may be empty.
    """

    layout: CheckpointLayout | None
    common: Mapping[str, Any] = field(default_factory=dict)
    format: str = TORCH_DIST
    release: bool = False
    directory: str = ''

    @property
    def args(self) -> Any:
        """Saved arguments; without any where the checkpoint has none."""
        return arguments_in(self.common)


def is_layer_wise(args: Any) -> bool:
    """Whether the optimizer is distributed by layers.

    Megatron sets this instead of ``use_distributed_optimizer`` for Muon and the like.
    """
    return getattr(args, 'use_layer_wise_distributed_optimizer', False) is True


def needs_undistributed_optimizer(stored: StoredCheckpoint) -> bool:
    """Whether the stored state goes into a run without ``--use-distributed-optimizer`` only."""
    return stored_optimizer_format(stored) == PLAIN and not is_layer_wise(stored.args)


def stored_optimizer_format(stored: StoredCheckpoint) -> str:
    """Sharding type of the distributed optimizer's state, ``'plain'`` for another's, or ``'none'``.

    The keys decide where the content metadata, which isn't there in older checkpoints, can be
    wrong: an optimizer that is distributed by layers stores its state by parameter in any format.
    """
    layout, content = stored.layout, stored.common.get('content_metadata')
    content = content if isinstance(content, Mapping) else {}
    if layout is not None and not layout.has_optimizer:
        return NO_STATE
    if stored.format != TORCH_DIST:
        return stored.format
    found = content.get('distrib_optim_sharding_type')
    if not isinstance(found, str) or not found:
        found = '' if layout is None else _format_by_keys(layout)
        distributed = getattr(stored.args, 'use_distributed_optimizer', False) is True
        if not found and not content and distributed:
            # Upstream's rule for them.
            full = getattr(stored.args, 'ckpt_fully_parallel_save', False) is True
            found = FLATTENED if full else GATHERED
        return found or PLAIN
    in_buckets = layout is None or layout.optimizer_in_buckets
    return PLAIN if found == IN_BUCKETS and not in_buckets else found


def _format_by_keys(layout: CheckpointLayout) -> str:
    """The format where keys show it; empty where they don't.

    Main parameters by weight are ``param`` since `fully_reshardable`. Without content metadata
    upstream takes that for its forerunner, whose ``fp32_param`` an optimizer that isn't
    distributed has as well, but in the weight's own shape.
    """
    if layout.optimizer_in_buckets:
        return IN_BUCKETS
    for name, size in layout.sizes.items():
        key = parse_key(name)
        flattened = len(size) > len(layout.sizes.get(key.weight, size))
        if key.state == PARAM or (key.state == FP32_PARAM and flattened):
            return FLATTENED
    return ''
