"""Builds a wheel that owns no path of megatron-core: the overlay's tree goes below its package."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

START_UP_FILE = 'megatron_overlay.pth'
START_UP_LINE = 'import megatron_overlay; megatron_overlay.activate()\n'


def packages_below(folder: str, prefix: str) -> dict[str, str]:
    """Package name below ``prefix`` -> folder, for every folder with Python files in it."""
    folders = {file.parent for file in Path(folder).rglob('*.py')}
    return {f'{prefix}.{".".join(path.parts)}': str(path) for path in sorted(folders)}


class BuildWithStartUpFile(build_py):
    """Adds the file that registers the finder at interpreter start."""

    def run(self):
        super().run()
        Path(self.build_lib, START_UP_FILE).write_text(START_UP_LINE)

    def get_outputs(self, include_bytecode=1):
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib, START_UP_FILE))]


package_dir = {
    'megatron_overlay': 'megatron_overlay',
    **packages_below('megatron', 'megatron_overlay.tree'),
    **packages_below('tools', 'megatron_overlay'),
}

setup(
    packages=list(package_dir), package_dir=package_dir, cmdclass={'build_py': BuildWithStartUpFile}
)
