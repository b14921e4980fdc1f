"""The overlay's modules without megatron-core, for tools that read checkpoints.

``megatron_overlay.standalone.dist_checkpointing.load_plan`` is the file of
``megatron.core.dist_checkpointing.load_plan``, run under this name: it needs neither that core is
installed nor seconds to import it. A module of the overlay can be read so if it names its
neighbours relatively, and imports what it needs of upstream (to build requests, say) only where its
``__name__`` begins with ``megatron.``.
"""

import os

import megatron_overlay

__path__ = [os.path.join(megatron_overlay.finder.tree, 'megatron', 'core')]
