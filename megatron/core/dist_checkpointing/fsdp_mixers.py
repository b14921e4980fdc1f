"""Mamba mixers in ``fsdp_dtensor``, whose parameters core's load takes for what they are called.

Rows of ``in_proj`` and of the convolution are those of the first tensor-parallel rank, then those
of the second, and a run with other ranks would cut them elsewhere: the shapes are the same. The
convolution is a module up to core 0.18 and two parameters from 0.19 on, and a load passes over what
has another name.
"""

from typing import Any

import megatron_overlay
from megatron_overlay._guard import Upstream

from .format_names import FSDP_DTENSOR
from .optimizer_load import conversion_command
from .stored_checkpoint import StoredCheckpoint

_UPSTREAM = 'megatron.core.ssm.mamba_mixer', 'MambaMixer'
# How the names of the convolution begin, in the order of releases.
MODULE, PARAMETERS = 'mixer.conv1d.', 'mixer.conv1d_'


def mixer_refusal(stored: StoredCheckpoint, args: Any) -> str:
    """Why a run would read a checkpoint's Mamba layers wrong or in part; empty where it doesn't.

    Args:
        stored: the checkpoint, of a model of the run's own kind.
        args: of the run.
    """
    keys = stored.layout.keys if stored.layout is not None else ()
    of_mixers = [key for key in keys if '.mixer.' in key]
    if stored.format != FSDP_DTENSOR or not of_mixers:
        return ''
    saved, own = (getattr(of, 'tensor_model_parallel_size', None) for of in (stored.args, args))
    if None not in (saved, own) and saved != own:
        why = (
            f'the rows of its Mamba layers are in the order of {saved} tensor-parallel ranks, and '
            f'the run has {own}, which would take them for others. Pass '
            f'--tensor-model-parallel-size {saved}'
        )
    elif not any(convolution() in key for key in of_mixers):
        why = (
            'its Mamba layers have their convolution under the name of another release of '
            f'megatron-core; this one, which calls it {convolution()}…, would leave its own as '
            'initialised. Load it with that release'
        )
    else:
        return ''
    return f'{stored.directory}: {why}, or convert it: {conversion_command(stored.directory)}'


def convolution() -> str:
    """How the names of a mixer's convolution begin in this megatron-core; empty without one."""
    names = Upstream(megatron_overlay.finder.upstream_spec).attributes(*_UPSTREAM)
    return (PARAMETERS if 'conv1d_weight' in names else MODULE) if names else ''
