"""The tools are built on the overlay, and nothing of the overlay on the tools."""

import ast
from pathlib import Path

from megatron_overlay import finder


def _imported_tools(source: str) -> list[str]:
    """Tools that a module imports, but for what it does when it is run as a program."""
    tree = ast.parse(source)
    as_program = {
        node
        for branch in tree.body
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "__name__ == '__main__'"
        for node in ast.walk(branch)
    }
    modules = [
        name
        for node in ast.walk(tree)
        if node not in as_program
        for name in (
            [node.module or '']
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    ]
    return [module for module in modules if 'tools' in module.split('.')]


def test_no_module_of_the_overlay_imports_a_tool():
    found = {name: _imported_tools(Path(file).read_text()) for name, file in finder.files.items()}
    assert len(found) > 10 and not any(found.values()), found


def test_an_import_of_a_tool_is_seen():
    source = 'try:\n    from tools.checkpoint.common import paths\nexcept ImportError: pass\n'
    assert _imported_tools(source) == ['tools.checkpoint.common']
