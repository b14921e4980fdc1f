"""``python -m megatron_overlay``: what is active, over which megatron-core, found where."""

import os
import sys

import megatron_overlay
from megatron_overlay._finder import core_version


def main() -> int:
    """Print the state of the overlay in this environment.

    Returns:
        0 when the overlay is active over a supported megatron-core, else 1.
    """
    finder = megatron_overlay.finder
    version, location = core_version()
    print(f'megatron_overlay {megatron_overlay.__version__}, tree {finder.tree}')
    if not location:
        print('megatron-core: not found; install it or put a Megatron-LM checkout on the path')
        return 1
    print(f'megatron-core {version or "of unknown version"}, {location}')
    if os.environ.get('MEGATRON_OVERLAY') == '0':
        print('off: MEGATRON_OVERLAY=0')
        return 1
    if not finder.supports(version):
        print(f'out: supported are releases of {" and ".join(finder.supported_versions)}')
        return 1
    if finder not in sys.meta_path:
        print('not active in plain processes: not installed; call megatron_overlay.activate()')
        return 1
    print('active:')
    for name, path in sorted(finder.files.items()):
        print(f'  {_role(name, path, location)}  {name}')
    return 0


def _role(name: str, path: str, core: str) -> str:
    with open(path, encoding='utf-8') as file:
        if 'megatron_overlay.upstream(' in file.read():
            return 'extends '
    root = os.path.dirname(os.path.dirname(core))
    exists = os.path.exists(os.path.join(root, *name.split('.')) + '.py')
    return 'replaces' if exists else 'adds    '


if __name__ == '__main__':
    sys.exit(main())
