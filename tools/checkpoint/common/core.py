"""What the tools use of megatron-core, imported without a word.

Importing core names every optional package that is absent; none matters to these tools.
"""

import logging
import warnings

_cpp_extension = logging.getLogger('torch.utils.cpp_extension')
_level = _cpp_extension.level
_cpp_extension.setLevel(logging.ERROR)
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from megatron.core.dist_checkpointing.core import (
        CheckpointingConfig,
        CheckpointingException,
        save_config,
    )
_cpp_extension.setLevel(_level)

__all__ = ['CheckpointingConfig', 'CheckpointingException', 'save_config']
