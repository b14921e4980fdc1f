"""Whether the overlay's modules are what a process gets."""

# What decides about loads; the rest that decides is imported by it.
LOAD_MODULES = (
    'megatron.core.dist_checkpointing.load_plan',
    'megatron.core.dist_checkpointing.serialization',
)


def why_not_active(*modules: str) -> str | None:
    """Activate the overlay, where megatron hasn't been imported yet.

    Args:
        modules: of the overlay, which are asked for.

    Returns:
        Why a process in this environment doesn't get all of them; None where it does.
    """
    import megatron_overlay
    from megatron_overlay._finder import core_version

    try:
        if not megatron_overlay.activate():
            return 'MEGATRON_OVERLAY=0 keeps this package out of the run; unset it.'
    except RuntimeError as error:
        return str(error)
    version, location = core_version()
    if not location:
        return 'megatron-core: not found; install it or put a Megatron-LM checkout on the path.'
    finder = megatron_overlay.finder
    core = f'megatron-core {version or "of unknown version"} in {location}'
    if not finder.supports(version):
        return f'{core}: supported are {" and ".join(finder.supported_versions)}.'
    for module in modules:
        if module in finder.left_out():
            return f'{core}: {module} stays out: {finder.left_out()[module]}.'
    return None
