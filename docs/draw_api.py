"""Write the page of importable functions, from their docstrings.

    python docs/draw_api.py

Writes ``docs/api.md``. Imports nothing of what it describes.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / 'docs' / 'api.md'
API = {
    'tools.checkpoint.weighted_merge': (
        'merge_same_layout_dcp_metadata_checkpoints',
        'checkpoint_coefficients',
    ),
    'tools.checkpoint.convert_ckpt_optimizer': ('convert_optimizer',),
    'tools.checkpoint.inspect_checkpoint': ('inspect_checkpoint', 'compare_checkpoints'),
    'megatron.core.dist_checkpointing.checkpoint_layout': ('read_checkpoint_layout',),
    'megatron.core.dist_checkpointing.gpt_checkpoint_interop': (
        'GPTCompatLayerMaps',
        'gpt_compatible_layer_maps',
        'retarget_sharded_state_dict_to_gpt_checkpoint',
        'retarget_fsdp_state_dict_to_gpt_checkpoint',
    ),
    'megatron_overlay': ('activate',),
}
HEAD = """\
# Functions

What can be imported. All else may change in any version.

`tools.checkpoint.…` is the name in a checkout; where the package is installed it is
`megatron_overlay.tools.checkpoint.…`. The module of each command also has `main(argv)`, which
returns the exit status. What training gets from the overlay has megatron-core's own names, and
isn't listed.

Written by `python docs/draw_api.py` from the docstrings.
"""
SECTION = re.compile(r'^(Args|Attributes|Returns|Raises):\n', re.MULTILINE)
ENTRY = re.compile(r'^(\S.*?): +', re.MULTILINE)


def page() -> str:
    """The text of ``docs/api.md``."""
    return '\n'.join([HEAD, *(line for module in API for line in describe(module))])


def describe(module: str) -> Iterator[str]:
    """The part of a module."""
    yield f'## `{module}`\n'
    for name in API[module]:
        node = find(module, name)
        yield f'### `{name}`\n'
        yield f'```python\n{signature(node)}\n```\n'
        yield markdown(ast.get_docstring(node) or '')


def find(module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """The statement that defines a name, in the module or where that imports it from."""
    path = REPOSITORY.joinpath(*module.split('.'))
    package = path if path.is_dir() else path.parent
    path = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
    for node in ast.parse(path.read_text(encoding='utf-8')).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            above = package.parents[node.level - 2] if node.level > 1 else package
            return find('.'.join([*above.relative_to(REPOSITORY).parts, node.module or '']), name)
    raise LookupError(f'{path} has no {name}')


def signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    """A definition as code, a parameter a line where one line is too long."""
    if isinstance(node, ast.ClassDef):
        fields = [ast.unparse(child) for child in node.body if isinstance(child, ast.AnnAssign)]
        return '\n    '.join([f'class {node.name}:', *fields])
    returns = f' -> {ast.unparse(node.returns).strip("'")}' if node.returns else ''
    line = f'{node.name}({ast.unparse(node.args)}){returns}'
    if len(line) <= 90:
        return line
    arguments = node.args
    plain = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    parts = [parameter(*pair) for pair in zip(plain, defaults, strict=True)]
    if arguments.vararg or arguments.kwonlyargs:
        parts.append(f'*{parameter(arguments.vararg) if arguments.vararg else ""}')
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parts += [parameter(*pair) for pair in by_name]
    if arguments.kwarg:
        parts.append(f'**{parameter(arguments.kwarg)}')
    return '\n'.join([f'{node.name}(', *(f'    {part},' for part in parts), f'){returns}'])


def parameter(argument: ast.arg, default: ast.expr | None = None) -> str:
    """One parameter as code."""
    text = ast.unparse(argument)
    if default is None:
        return text
    return f'{text}{" = " if argument.annotation else "="}{ast.unparse(default)}'


def markdown(docstring: str) -> str:
    """A docstring in Google's style as Markdown."""
    summary, *sections = SECTION.split(docstring)
    parts = [summary.strip()]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        *indented, rest = re.split(r'\n(?=\S)', body, maxsplit=1) if '\n' in body else (body, '')
        block = dedent('\n'.join(indented) if indented else rest)
        parts.append(f'{title}:\n\n{entries(title, block.strip())}')
    text = '\n\n'.join(parts).replace('``', '`')
    return re.sub(r':class:`(\w+)`', r'`\1`', text) + '\n'


def entries(title: str, block: str) -> str:
    """The body of a section, as a list where it names things."""
    if title == 'Returns' or not ENTRY.match(block):
        return block
    return ENTRY.sub(lambda found: f'- `{found[1]}`: ', block).replace('\n    ', '\n  ')


if __name__ == '__main__':
    PAGE.write_text(page(), encoding='utf-8')
