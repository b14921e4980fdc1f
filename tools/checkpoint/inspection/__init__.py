"""What ``inspect_checkpoint.py`` is made of.

What a checkpoint's keys and its optimizer state mean is known to modules of the overlay, which has
to be active before the first import of megatron.
"""

from ..common.overlay import LOAD_MODULES, why_not_active

_reason = why_not_active(*LOAD_MODULES)
if _reason:
    raise ImportError(_reason)
