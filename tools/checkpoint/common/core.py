"""What the tools use of megatron-core, imported without a word."""

from .quiet import quiet_imports

with quiet_imports():
    from megatron.core.dist_checkpointing.core import CheckpointingException

__all__ = ['CheckpointingException']
