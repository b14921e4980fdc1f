"""``python -m megatron_overlay``: what is active, over which megatron-core, found where."""

import os
import sys

import megatron_overlay
from megatron_overlay._finder import core_version
from megatron_overlay._guard import Upstream
from megatron_overlay._needs import NEEDS


def main() -> int:
    """Print the state; returns 0 when all of the overlay is active over a supported core, or 1."""
    if sys.argv[1:] in (['-h'], ['--help']):
        print('usage: python -m megatron_overlay [--version]\n')
        print(
            'Prints the state of the overlay in this environment; ends with 0 when all is active.'
        )
        return 0
    if sys.argv[1:] == ['--version']:
        print(f'megatron-checkpoint-toolkit {megatron_overlay.__version__}')
        return 0
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
        print(f'not active in plain processes: {_why_not_registered()}; ', end='')
        print('call megatron_overlay.activate() before the first import of megatron')
        return 1
    if not finder.files:
        print(f'out: no modules in {finder.tree}; from an archive it does not run')
        return 1
    upstream, left_out = Upstream(finder.upstream_spec), finder.left_out()
    print('active:' if not left_out else 'active in part:')
    for name in sorted(finder.files):
        print(f'  {_role(name, upstream, left_out)}')
    return bool(left_out)


def _why_not_registered() -> str:
    packages = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    start_up_file = os.path.join(packages, 'megatron_overlay.pth')
    if not os.path.exists(start_up_file):
        return 'not installed'
    return (
        f'{start_up_file} was not run, as python was started with -S, or finds the package by '
        f'PYTHONPATH (after `pip install --target`)'
    )


def _role(name: str, upstream: Upstream, left_out: dict[str, str]) -> str:
    package = name.rpartition('.')[0]
    if not upstream.exists(package):
        return f'absent    {name}: megatron-core came without {package}'
    if name in left_out:
        return f'out       {name}: {left_out[name]}'
    if 'extends' in NEEDS[name]:
        return f'extends   {name}'
    return f'replaces  {name}' if upstream.exists(name) else f'adds      {name}'


if __name__ == '__main__':
    sys.exit(main())
