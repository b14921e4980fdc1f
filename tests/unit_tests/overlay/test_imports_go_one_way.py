"""The tools are built on the overlay, and nothing of the overlay on the tools."""

from pathlib import Path

from megatron_overlay import finder
from tests.unit_tests.overlay.needs import Module


def test_no_module_of_the_overlay_imports_a_tool():
    imported = {
        source
        for name, file in finder.files.items()
        for source in Module(name, Path(file)).imports
        if 'tools' in source.split('.')
    }
    assert not imported


def test_an_import_of_a_tool_is_seen(tmp_path):
    file = tmp_path / 'module.py'
    file.write_text('try:\n    from tools.checkpoint.common import paths\nexcept ImportError: pass\n')
    assert 'tools.checkpoint.common' in Module('megatron.core.module', file).imports
