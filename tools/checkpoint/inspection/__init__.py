"""What ``inspect_checkpoint.py`` is made of.

What a checkpoint's keys and its optimizer state mean is known to modules of the overlay, which has
to be active before the first import of megatron.
"""

import megatron_overlay

if not megatron_overlay.activate():
    raise ImportError(
        'MEGATRON_OVERLAY=0 in the environment keeps out the modules that know checkpoints; '
        'unset it to inspect one'
    )
