"""Classes of optimizers that Megatron stores in common state, and that torch's allow-list lacks.

``HybridDeviceOptimizer`` (``--optimizer-cpu-offload``) keeps the classes that it is made of among
the settings of its parameter groups, and so they are saved with these.
"""

import sys

_CLASSES = {
    'torch.optim': ('Adam', 'AdamW', 'SGD'),
    'transformer_engine.pytorch.optimizers': ('FusedAdam', 'FusedSGD'),
    'apex.optimizers': ('FusedAdam', 'FusedSGD'),
}


def is_optimizer_class(name: str) -> bool:
    """Whether a class of that full name, such as ``torch.optim.adamw.AdamW``, is one of them."""
    return any(
        name.startswith(f'{package}.') and name.rpartition('.')[2] in classes
        for package, classes in _CLASSES.items()
    )


def imported_optimizer_classes() -> list[type]:
    """Those that an optimizer of this process can be made of."""
    return [
        getattr(sys.modules[package], name)
        for package, classes in _CLASSES.items()
        if package in sys.modules
        for name in classes
        if hasattr(sys.modules[package], name)
    ]
