"""What the overlay's modules need of upstream, read off their own files.

    python -m tests.unit_tests.overlay.needs

writes it to ``megatron_overlay/_needs.py``, by which ``_guard.py`` decides. What a file asks for
first, with ``hasattr``, ``getattr`` or ``except ImportError``, is not a need.
"""

import ast
import textwrap
from pathlib import Path

from megatron_overlay import finder
from megatron_overlay._guard import Upstream

REPOSITORY = Path(__file__).resolve().parents[3]
TABLE = REPOSITORY / 'megatron_overlay' / '_needs.py'
HEADER = '''\
"""What each of the overlay's modules needs of upstream.

Written by ``python -m tests.unit_tests.overlay.needs`` from the modules themselves.

    extends: it runs upstream's module of its name.
    overlay: the overlay's modules that it can't do without; `.name` is in its own package.
    names: upstream's module -> what it imports from there, or uses of it.
    methods, attributes: upstream's class -> what it calls by `super()`, or uses of `self`.
    functions: functions and methods that can go in front of upstream's, with their parameters.
"""

# ruff: noqa: E501
# fmt: off
'''

_NOT_ON_IMPORT = ("__name__ == '__main__'", 'TYPE_CHECKING')


class Module:
    """One of the overlay's files.

    Attributes:
        extends: it runs upstream's module of its name.
        imports: module -> names.
        of_upstream: names that it uses of its upstream module.
        classes: upstream's class -> the class statement that amends it.
        defined: names at its top level.
    """

    def __init__(self, name: str, path: Path):
        self.name = name
        self.tree = ast.parse(path.read_text(encoding='utf-8'))
        nodes = list(_unguarded(self.tree))
        self.extends = any(
            isinstance(node, ast.Call) and ast.unparse(node.func) == 'megatron_overlay.upstream'
            for node in nodes
        )
        self.defined = set(_bound(self.tree))
        self.attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        self.asked = {
            node.args[1].value
            for node in nodes
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) in ('hasattr', 'getattr')
            and isinstance(node.args[1], ast.Constant)
        }
        self.imports: dict[str, set[str]] = {}
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imports.setdefault(alias.name, set())
            elif isinstance(node, ast.ImportFrom):
                source = '.'.join(name.split('.')[: -node.level]) + '.' if node.level else ''
                source = (source + (node.module or '')).strip('.')
                self.imports.setdefault(source, set()).update(alias.name for alias in node.names)
        self.of_upstream = {name for node in nodes for name in _attribute_of('upstream', node)}
        self.classes = {
            name: node
            for node in self.tree.body
            if isinstance(node, ast.ClassDef)
            for base in node.bases
            for name in _attribute_of('upstream', base)
        }

    def added_members(self) -> set[str]:
        """What only this module's classes give to upstream's."""
        return {
            name
            for cls in self.classes.values()
            for name in set(_bound(cls)) - _used(cls, 'super()')
            if not name.startswith('__')
        }


def table(modules: dict[str, Module], upstream) -> dict[str, dict]:
    """Needs of each module.

    Args:
        modules: of the overlay.
        upstream: what a supported megatron-core has. Members that it doesn't define are left out:
            they are those of torch's classes.
    """
    return {name: _needs(module, modules, upstream) for name, module in modules.items()}


def _needs(module: Module, modules: dict[str, Module], upstream) -> dict:
    overlay: set[str] = set()
    names: dict[str, set[str]] = {}
    if module.extends:
        names[module.name] = module.of_upstream - module.asked
    for source, imported in module.imports.items():
        if not source.startswith('megatron.'):
            continue
        for name in imported or {''}:
            if f'{source}.{name}' in modules:
                overlay.add(f'{source}.{name}')
            elif source in modules and (not name or name in modules[source].defined):
                overlay.add(source)
            elif name and upstream.exists(f'{source}.{name}'):
                names.setdefault(f'{source}.{name}', set()).update(
                    attribute
                    for node in ast.walk(module.tree)
                    for attribute in _attribute_of(name, node)
                )
            elif source not in modules or modules[source].extends:
                names.setdefault(source, set()).update([name] if name else [])
    for other in modules.values():
        if (
            # A class that one amends has a name that the other relies on.
            other.added_members() & (module.attributes - set(module.added_members()))
            or module.added_members() & (other.attributes - set(other.added_members()))
            # Training is built on core, and what amends it on what amends core.
            or (module.extends and _part(module) == 'training')
            and (other.extends and _part(other) == 'core')
        ):
            overlay.add(other.name)
    methods, attributes = {}, {}
    functions = {node.name: node for node in module.tree.body if isinstance(node, ast.FunctionDef)}
    for cls, node in module.classes.items():
        inherited, used = upstream.methods(module.name, cls), upstream.attributes(module.name, cls)
        own = set(_bound(node)) | {
            attribute.attr
            for attribute in ast.walk(node)
            if isinstance(attribute, ast.Attribute) and isinstance(attribute.ctx, ast.Store)
        }
        methods[cls] = (_used(node, 'super()') - module.asked) & inherited
        attributes[cls] = (_used(node, 'self') - own - module.asked) & used
        functions |= {
            f'{cls}.{method.name}': method
            for method in node.body
            if isinstance(method, ast.FunctionDef)
            and not any('property' in ast.unparse(each) for each in method.decorator_list)
        }
    package = module.name.rpartition('.')[0]
    needs = {
        'overlay': sorted(
            other.removeprefix(package) if other.rpartition('.')[0] == package else other
            for other in overlay - {module.name}
        ),
        'names': _sorted(names),
    }
    if module.extends:
        needs = (
            {'extends': True}
            | needs
            | {
                'methods': _sorted(methods),
                'attributes': _sorted(attributes),
                'functions': [
                    f'{name}({_parameters(node.args)})' for name, node in sorted(functions.items())
                ],
            }
        )
    return {key: value for key, value in needs.items() if value}


def _sorted(names: dict[str, set[str]]) -> dict[str, list[str]]:
    return {key: sorted(value) for key, value in sorted(names.items())}


def _part(module: Module) -> str:
    return module.name.split('.')[1]


def _unguarded(node: ast.AST):
    """The nodes below, but for what isn't run on import or copes with a missing name."""
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and ast.unparse(node.test) in _NOT_ON_IMPORT:
        children = list(node.orelse)
    elif isinstance(node, ast.Try) and any(map(_copes, node.handlers)):
        children = [*node.handlers, *node.orelse, *node.finalbody]
    yield node
    for child in children:
        yield from _unguarded(child)


def _copes(handler: ast.ExceptHandler) -> bool:
    caught = set() if handler.type is None else {ast.unparse(n) for n in ast.walk(handler.type)}
    return not caught or bool(caught & {'ImportError', 'ModuleNotFoundError', 'AttributeError'})


def _bound(node: ast.AST):
    """Names that the top level of a module or class body gives a value."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.AnnAssign) and child.value is None:
            pass
        elif isinstance(child, ast.alias):
            yield (child.asname or child.name).partition('.')[0]
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        else:
            yield from _bound(child)


def _used(node: ast.AST, of: str) -> set[str]:
    return {name for each in ast.walk(node) for name in _attribute_of(of, each)}


def _attribute_of(value: str, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return [node.attr] if ast.unparse(node.value) == value else []
    return []


def _parameters(arguments: ast.arguments) -> str:
    """Such as ``self, closure=, *args, **kwargs``."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    names = [each.arg + '=' * (index >= required) for index, each in enumerate(positional)]
    if arguments.vararg or arguments.kwonlyargs:
        names.append(f'*{arguments.vararg.arg if arguments.vararg else ""}')
    names += [each.arg for each in arguments.kwonlyargs]
    return ', '.join([*names, *([f'**{arguments.kwarg.arg}'] if arguments.kwarg else [])])


def overlay_modules(root: Path = REPOSITORY) -> dict[str, Module]:
    """The overlay's modules by name."""
    files = sorted((root / 'megatron').rglob('*.py'))
    names = ['.'.join(file.relative_to(root).with_suffix('').parts) for file in files]
    return {name: Module(name, file) for name, file in zip(names, files, strict=True)}


def source() -> str:
    """``_needs.py`` as it should be."""
    needs = table(overlay_modules(), Upstream(finder.upstream_spec))
    lines = [line for entry in needs.items() for line in _entry(*entry, '    ')]
    return '\n'.join([f'{HEADER}NEEDS: dict[str, dict] = {{', *lines, '}\n'])


def _entry(key: str, value, indent: str) -> list[str]:
    """Lines of an entry of a dict, as few as it takes."""
    start, inner = f'{indent}{key!r}: ', indent + '    '
    if len(line := f'{start}{value!r},') <= 100:
        return [line]
    if isinstance(value, dict):
        lines = [line for entry in value.items() for line in _entry(*entry, inner)]
        return [f'{start}{{', *lines, f'{indent}}},']
    words = ' '.join(f'{entry!r},'.replace(' ', '\0') for entry in value)
    filled = textwrap.fill(
        words, 100, initial_indent=inner, subsequent_indent=inner, break_long_words=False
    )
    return [f'{start}[', filled.replace('\0', ' '), f'{indent}],']


if __name__ == '__main__':
    TABLE.write_text(source(), encoding='utf-8')
