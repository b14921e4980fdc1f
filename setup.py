"""Builds a wheel that owns no path of megatron-core: the overlay's tree goes below its package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

START_UP_FILE = 'megatron_overlay.pth'
# It must not end, nor say anything, where the package has been removed and this file has not.
START_UP_LINE = (
    r"import sys; exec('try:\n import megatron_overlay\n megatron_overlay.activate()\n"
    r"except Exception:\n pass')"
    '\n'
)


def packages_below(folder: str, prefix: str) -> dict[str, str]:
    """Package name below ``prefix`` -> folder, for every folder with Python files in it."""
    folders = {file.parent for file in Path(folder).rglob('*.py')}
    return {f'{prefix}.{".".join(path.parts)}': str(path) for path in sorted(folders)}


class BuildWithStartUpFile(build_py):
    """Adds the file that registers the finder at interpreter start."""

    def run(self):
        if not self.editable_mode:
            # Files that have left the tree since the last build would be in the wheel.
            shutil.rmtree(Path(self.build_lib, 'megatron_overlay'), ignore_errors=True)
        super().run()
        self._start_up_file().write_text(START_UP_LINE)

    def get_outputs(self, include_bytecode=1):
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, str(self._start_up_file())]

    def _start_up_file(self) -> Path:
        # An editable wheel takes nothing from the build; what it holds is there as if installed.
        install = self.get_finalized_command('install') if self.editable_mode else None
        return Path(install.install_purelib if install else self.build_lib, START_UP_FILE)


package_dir = {
    'megatron_overlay': 'megatron_overlay',
    **packages_below('megatron', 'megatron_overlay.tree'),
    **packages_below('tools', 'megatron_overlay'),
}

setup(
    packages=list(package_dir), package_dir=package_dir, cmdclass={'build_py': BuildWithStartUpFile}
)
