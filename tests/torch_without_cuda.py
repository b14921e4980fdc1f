"""Installs a torch for the CPU from a registry that has it for CUDA only.

    python tests/torch_without_cuda.py VERSION

goes into the environment of that Python. Torch's wheel depends on three gigabytes of CUDA's
libraries, which a process without a GPU loads and never calls. Here one small library that has
their names stands for them; calling it returns at once, with no result.
"""

import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

# Called at import, GPU or not.
REAL = 'cuda-runtime', 'cuda-cupti'


def main(version: str) -> None:
    """Install that torch and what it needs on a CPU."""
    pip('--no-deps', f'torch=={version}')
    torch = distribution('torch')
    needs = [need.partition(';') for need in torch.requires or () if 'extra ==' not in need]
    pip(
        *(
            name.strip()
            for name, _, _ in needs
            if not name.startswith('nvidia-') or any(part in name for part in REAL)
        )
    )
    stand_in_for_cuda(Path(str(torch.locate_file('torch/lib'))))


def pip(*arguments: str) -> None:
    # Its complaints about what is left out are no news.
    command = [sys.executable, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check']
    run = subprocess.run([*command, *arguments], text=True, stderr=subprocess.PIPE)
    if run.returncode:
        sys.exit(run.stderr)


def stand_in_for_cuda(directory: Path) -> None:
    """Make a library of all that torch's own, in ``directory``, ask of CUDA's."""
    own = sorted(map(str, [*directory.glob('*.so'), *directory.parent.glob('_C.*.so')]))
    named = {
        name
        for name in re.findall(
            r'NEEDED.*\[(lib(?:cu|nccl|nv)[^]]*)\]', output('readelf', '-d', *own)
        )
        if not name.startswith(('libcudart', 'libcupti', 'libcuda.so'))  # the last is the driver
    }
    asked = re.findall(r' U ((?:cu|nccl|nv)\w*)(?:@(\S+))?', output('nm', '-D', *own))
    functions = {
        name: node for name, node in asked if not node.startswith(('libcudart', 'libcupti'))
    }
    nodes: dict[str, str] = {}  # versions of symbols
    for name, node in sorted(functions.items()):
        if node:
            nodes[node] = nodes.get(node, '') + f'{name};'
    versions = directory / 'no_cuda.map'
    versions.write_text(
        ''.join(f'{node} {{ global: {names} }};\n' for node, names in nodes.items())
    )
    library = directory / 'libno_cuda.so'
    subprocess.run(
        ['cc', '-shared', '-nostdlib', f'-Wl,--version-script={versions}', '-x', 'assembler', '-']
        + ['-o', str(library)],
        input=''.join(
            f'.globl {name}\n.type {name},@function\n{name}: ret\n' for name in functions
        ),
        text=True,
        check=True,
    )
    for name in named:
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(library.name)


def output(*command: str) -> str:
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


if __name__ == '__main__':
    main(sys.argv[1])
