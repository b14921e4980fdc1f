"""Extends an installed or checked-out megatron-core, without editing or copying it.

The overlay's own ``megatron/`` tree mirrors upstream's. A file in it either adds a module that
upstream lacks, replaces one, or extends one: an extending file begins with
``upstream = megatron_overlay.upstream(__name__)`` and then redefines a few of upstream's names.

This package is imported at every interpreter start where it is installed, so it imports nothing
but what the interpreter has loaded by then.
"""

import os
import sys

from ._finder import OverlayFinder, execute_upstream

__version__ = '0.1.0'
__all__ = ['activate', 'upstream']

SUPPORTED_VERSIONS = ('0.18', '0.19')

_HERE = os.path.dirname(os.path.abspath(__file__))
_INSTALLED_TREE = os.path.join(_HERE, 'tree')
_TREE = _INSTALLED_TREE if os.path.isdir(_INSTALLED_TREE) else os.path.dirname(_HERE)

# Modules of core that the overlay makes reports of: python -m MODULE CHECKPOINT
_REPORTS = (
    'megatron.core.dist_checkpointing.gpt_checkpoint_interop',
    'megatron.core.optimizer.distrib_optimizer',
)

finder = OverlayFinder(_TREE, SUPPORTED_VERSIONS)


def activate() -> bool:
    """Put the overlay's modules in front of megatron-core's for the rest of this process.

    Calling it again changes nothing. ``MEGATRON_OVERLAY=0`` in the environment keeps it off.

    Returns:
        True when the overlay is active from here on. Whether it applies also depends on the
        megatron-core version, which is looked at when the first of its modules is imported.

    Raises:
        RuntimeError: a module that the overlay extends has been imported already, so that parts
            of the process would go on with upstream's names.
    """
    if os.environ.get('MEGATRON_OVERLAY') == '0':
        return False
    if finder in sys.meta_path:
        return True
    # Interpreters start without megatron, and then needn't look at the overlay's files.
    late = 'megatron' in sys.modules and [name for name in finder.files if name in sys.modules]
    if late:
        raise RuntimeError(
            f'megatron_overlay.activate() was called after {late[0]} had been imported; '
            f'call it before the first import of megatron.'
        )
    sys.meta_path.insert(0, finder)
    words = sys.orig_argv
    if any(words[at - 1] == '-m' for at, word in enumerate(words) if word in _REPORTS):
        _hush_imports()
    return True


def _hush_imports() -> None:
    """Keep what importing core warns of, before the report begins, from burying the report."""
    import logging
    import warnings

    warnings.simplefilter('ignore')
    logging.getLogger('torch.utils.cpp_extension').setLevel(logging.ERROR)


def upstream(name: str):
    """Run upstream's module ``name`` in the calling overlay module's own namespace.

    Upstream's functions then look up their globals in the overlay's module, and so see every
    name that the overlay file redefines after this call.

    Args:
        name: the caller's ``__name__``.

    Returns:
        A namespace with the module's names as upstream defined them.

    Raises:
        ImportError: the installed megatron-core has no module of that name.
    """
    return execute_upstream(finder, name)
