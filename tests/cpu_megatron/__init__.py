"""Real megatron-core training, saving and loading on a machine without a GPU.

For tests, examples and benchmarks only. ``install()`` makes ``torch.cuda`` answer for the CPU; the
megatron code that runs on top of it is the one in site-packages. A GPU that is there is not used,
but in processes whose environment holds :data:`ON_GPU`: those have the real ``torch.cuda``.
"""

import os

os.environ.setdefault('TORCHDYNAMO_DISABLE', '1')
os.environ.setdefault('CUDA_DEVICE_MAX_CONNECTIONS', '1')

# The environment of a process that runs on a GPU, with the same results every time.
ON_GPU = {
    'CPU_MEGATRON_DEVICE': 'cuda',
    'CUBLAS_WORKSPACE_CONFIG': ':4096:8',
    'NCCL_ALGO': 'Ring',
    'NVTE_ALLOW_NONDETERMINISTIC_ALGO': '0',
}

_installed_adam = None


def on_gpu() -> bool:
    """Whether this process is to run on a GPU."""
    return os.environ.get('CPU_MEGATRON_DEVICE') == 'cuda'


def install() -> None:
    """Prepare this process; call it before megatron is imported. Later calls do nothing.

    ``CPU_MEGATRON_OPTIMIZER=fused_adam`` in the environment gives megatron an Adam with FusedAdam's
    conventions instead of torch's, unless it finds Transformer Engine's.

    Raises:
        RuntimeError: the process has been prepared with the other Adam.
    """
    global _installed_adam
    adam = os.environ.get('CPU_MEGATRON_OPTIMIZER', 'torch_adam')
    if _installed_adam not in (None, adam):
        raise RuntimeError(f'this process has {_installed_adam} already, {adam} comes too late')
    if _installed_adam:
        return
    from tests.cpu_megatron import (
        collectives,
        facade,
        fused_adam_convention,
        gated_delta_reference,
        hooks,
        mamba_reference,
    )

    if not on_gpu():
        facade.install()
        collectives.install()
    mamba_reference.install()
    gated_delta_reference.install()
    hooks.install()
    if adam == 'fused_adam':
        fused_adam_convention.install()
    _installed_adam = adam


def activate_overlay() -> None:
    """Let the repository's overlay in, unless ``MEGATRON_OVERLAY=0`` asks for stock megatron.

    Over a checkout that ``MEGATRON_LM`` names it goes in whatever the version: so is a release to
    come tried.
    """
    import importlib.util

    if os.environ.get('MEGATRON_OVERLAY') == '0':
        return
    if importlib.util.find_spec('megatron_overlay') is not None:
        import megatron_overlay
        from megatron_overlay._finder import core_version

        if os.environ.get('MEGATRON_LM'):
            series = '.'.join(core_version()[0].split('.')[:2])
            megatron_overlay.finder.supported_versions += (series,)
        megatron_overlay.activate()
