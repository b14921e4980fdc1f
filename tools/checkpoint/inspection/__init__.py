"""What ``inspect_checkpoint.py`` is made of.

What a checkpoint's keys and its optimizer state mean is known to modules of the overlay, which has
to be active before the first import of megatron.
"""

from ..common.overlay import why_not_active

_reason = why_not_active(
    'megatron.core.dist_checkpointing.hybrid_checkpoint_interop',
    'megatron.core.dist_checkpointing.saved_arguments',
    'megatron.core.optimizer.resume_report',
)
if _reason:
    raise ImportError(_reason)
