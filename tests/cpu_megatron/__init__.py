"""Real megatron-core training, saving and loading on a machine without a GPU.

For tests, examples and benchmarks only. ``install()`` makes ``torch.cuda`` answer for the CPU; the
megatron code that runs on top of it is the one in site-packages. With a CUDA device present nothing
is changed.
"""

import os

os.environ.setdefault('TORCHDYNAMO_DISABLE', '1')
os.environ.setdefault('CUDA_DEVICE_MAX_CONNECTIONS', '1')

_installed = False


def install() -> bool:
    """Prepare this process; call it before megatron is imported. Later calls do nothing.

    ``CPU_MEGATRON_OPTIMIZER=fused_adam`` in the environment gives megatron an Adam with FusedAdam's
    conventions instead of torch's.

    Returns:
        True when the CPU stands in for the GPU, False when a CUDA device is present.
    """
    global _installed
    if _installed:
        return True
    import torch

    if torch.cuda.is_available():
        return False
    from tests.cpu_megatron import (
        collectives,
        facade,
        fused_adam_convention,
        hooks,
        mamba_reference,
    )

    facade.install()
    collectives.install()
    mamba_reference.install()
    hooks.install()
    if os.environ.get('CPU_MEGATRON_OPTIMIZER', 'torch_adam') == 'fused_adam':
        fused_adam_convention.install()
    _installed = True
    return True


def activate_overlay() -> None:
    """Let the repository's overlay in, unless ``MEGATRON_OVERLAY=0`` asks for stock megatron."""
    import importlib.util

    if os.environ.get('MEGATRON_OVERLAY') == '0':
        return
    if importlib.util.find_spec('megatron_overlay') is not None:
        import megatron_overlay

        megatron_overlay.activate()
