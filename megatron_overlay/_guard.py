"""Which of the overlay's modules fit the megatron-core that is there, by what its modules define.

What the overlay uses of upstream stands in ``_needs.py``. What upstream has is read off the
compiled code of its modules, which the import system keeps; nothing of megatron is executed.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from opcode import opmap
from types import CodeType

from ._needs import NEEDS

_OPTIMIZED, _VARARGS, _VARKEYWORDS = 0x1, 0x4, 0x8  # flags of a code object, as in `inspect`
SpecOf = Callable[[str, Sequence[str] | None], ModuleSpec | None]


def left_out(
    modules: list[str], spec_of: SpecOf, failed: dict[str, str] | None = None
) -> dict[str, str]:
    """Find the modules that can't go over this megatron-core.

    Args:
        modules: dotted names of the overlay's modules.
        spec_of: finds upstream's module of a name on the path of its package.
        failed: of ``modules``, with what ended their import.

    Returns:
        Module -> what is in its way.
    """
    upstream = Upstream(spec_of)
    # What lies in a package that upstream doesn't come with can't be imported anyway.
    known = {
        name: NEEDS.get(name, {}) for name in modules if upstream.exists(name.rpartition('.')[0])
    }
    there = {name for name in modules if upstream.exists(name)}
    out = dict(failed or {})
    for name, needs in known.items():
        reason = next(_unmet(upstream, name, needs), None)
        if reason:
            out.setdefault(name, reason)
    depends = {
        name: {
            name.rpartition('.')[0] + other if other.startswith('.') else other
            for other in needs.get('overlay', ())
        }
        for name, needs in known.items()
    }
    for name, needs in known.items():
        # Where the overlay's goes over a module that this one imports, upstream imports it too.
        for imported in there & depends[name] if 'extends' in needs else ():
            if imported in known and 'extends' not in known[imported]:
                depends[imported].add(name)
    todo = [(name, f'depends on {name}: {reason}') for name, reason in out.items()]
    while todo:
        cause, reason = todo.pop(0)
        for name, others in depends.items():
            if name not in out and cause in others:
                out[name] = reason
                todo.append((name, reason))
    return out


def _unmet(upstream: 'Upstream', module: str, needs: dict) -> Iterator[str]:
    for source, names in needs.get('names', {}).items():
        there = upstream.exists(source) if source != module else upstream.scan(source) is not None
        if not there:
            yield f'there is no module {source}'
        for name in names:
            if not upstream.defines(source, name):
                yield f'{source} has no {name}'
    for kind, find in ('methods', upstream.methods), ('attributes', upstream.attributes):
        for cls, names in needs.get(kind, {}).items():
            for name in sorted(set(names) - find(module, cls) if names else ()):
                yield f'{module}.{cls} has no {name}'
    for function in needs.get('functions', ()):
        name, _, parameters = function.removesuffix(')').partition('(')
        functions = upstream.functions(module, name)
        if functions and not any(takes(parameters, code) for code in functions):
            yield f'{module}.{name} takes other parameters: {", ".join(_positional(functions[0]))}'


def takes(parameters: str, code: CodeType) -> bool:
    """Whether a function of the overlay can stand where upstream has the function ``code``.

    Args:
        parameters: its own, such as ``self, closure=, *args, **kwargs``.
        code: upstream's.
    """
    own = parameters.split(', ') if parameters else []
    stars = [name for name in own if name.startswith('*')]
    split = own.index(stars[0]) if stars else len(own)
    positional, keywords = own[:split], {name.rstrip('=') for name in own[split:]}
    rest = any(star.strip('*') and not star.startswith('**') for star in stars)
    rest_by_name = any(star.startswith('**') for star in stars)
    theirs = _positional(code)
    by_name = code.co_varnames[len(theirs) : len(theirs) + code.co_kwonlyargcount]
    same = all(a.rstrip('=') == b for a, b in zip(positional, theirs, strict=False))
    optional = all(name.endswith('=') for name in positional[len(theirs) :])
    return (
        (same and optional)
        and (rest or rest_by_name or keywords.issuperset(theirs[len(positional) :]))
        and (rest_by_name or keywords.union(n.rstrip('=') for n in positional).issuperset(by_name))
        and (rest or not code.co_flags & _VARARGS)
        and (rest_by_name or not code.co_flags & _VARKEYWORDS)
    )


def _positional(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount]


class Upstream:
    """What megatron-core's modules define."""

    def __init__(self, spec_of: SpecOf):
        self._spec_of = spec_of
        self._specs: dict[str, ModuleSpec | None] = {}
        self._scans: dict[str, _Scan | None] = {}
        self._bodies: dict[tuple[str, str], list[_Scan]] = {}

    def exists(self, module: str) -> bool:
        if module not in self._specs:
            parent = module.rpartition('.')[0]
            package = self._specs[parent] if parent and self.exists(parent) else None
            path = None if package is None else package.submodule_search_locations
            missing = parent and path is None
            self._specs[module] = None if missing else self._spec_of(module, path)
        return self._specs[module] is not None

    def scan(self, module: str) -> '_Scan | None':
        """What the module's code defines; None where there is no module, or not as Python."""
        if module not in self._scans:
            self._scans[module] = None
            spec = self._specs[module] if self.exists(module) else None
            try:
                code = spec.loader.get_code(module)  # type: ignore[union-attr]
            except Exception:  # whoever imports it gets to see that
                code = None
            if spec is not None and code is not None:
                is_package = spec.submodule_search_locations is not None
                package = module if is_package else module.rpartition('.')[0]
                self._scans[module] = _Scan(code, package)
        return self._scans[module]

    def defines(self, module: str, name: str) -> bool:
        scan = self.scan(module)
        return scan is not None and (
            name in scan.stored
            or self.exists(f'{module}.{name}')
            or any(self.defines(source, name) for source in scan.stars if source != module)
        )

    def bodies(self, module: str, name: str) -> 'list[_Scan]':
        """A class and then its bases, as far as they are megatron's."""
        if (module, name) not in self._bodies:
            found = self._bodies[module, name] = []  # also ends a circle
            for home, body in self._resolve(module, name):
                if not body.co_flags & _OPTIMIZED:
                    found.append(_Scan(body))
                    scan = self.scan(home)
                    for base in scan.bases.get(body.co_name, ()) if scan else ():
                        found += self.bodies(home, base)
        return self._bodies[module, name]

    def methods(self, module: str, cls: str) -> set[str]:
        """Names that the bodies of a class and its bases bind."""
        return set().union(*(body.stored for body in self.bodies(module, cls)))

    def attributes(self, module: str, cls: str) -> set[str]:
        """Names that a class and its bases use in any way."""
        return set().union(*(_names_in(body.code) for body in self.bodies(module, cls)))

    def functions(self, module: str, name: str) -> list[CodeType]:
        """Code of ``function``, or of ``Class.method`` where the first class that has it has it."""
        cls, _, function = name.rpartition('.')
        if not cls:
            found = [code for _, code in self._resolve(module, function)]
            return [code for code in found if code.co_flags & _OPTIMIZED]
        for body in self.bodies(module, cls):
            if function in body.codes:
                return body.codes[function]
        return []

    def _resolve(self, module: str, name: str, hops: int = 9) -> list[tuple[str, CodeType]]:
        """Modules and code objects that ``name`` can stand for in ``module``."""
        scan = self.scan(module)
        if scan is None or not hops:
            return []
        name, _, attribute = name.partition('.')
        source, imported = scan.imports.get(name, ('', ''))
        if attribute:
            submodule = f'{source}.{imported}' if imported else source
            return self._resolve(submodule, attribute, hops - 1) if source else []
        own = [(module, code) for code in scan.codes.get(name, ())]
        if own or not source.startswith('megatron.'):
            return own
        return self._resolve(source, imported, hops - 1)


class _Scan:
    """What the code of a module or class body does with names at its top level.

    Attributes:
        codes: name -> code of the functions and classes of that name.
        stored: names that it binds.
        imports: name -> module that it is imported from, and the name there.
        stars: modules that all names are imported from.
        bases: class -> names of its bases, and keyword arguments of the statement.
    """

    def __init__(self, code: CodeType, package: str = ''):
        self.code = code
        self.codes: dict[str, list[CodeType]] = {}
        for inner in _codes(code):
            self.codes.setdefault(inner.co_name, []).append(inner)
        self.stored: set[str] = set()
        self.imports: dict[str, tuple[str, str]] = {}
        self.stars: list[str] = []
        self.bases: dict[str, list[str]] = {}
        module = ''
        constants: list = [0, None]
        imported: tuple[str, str] | None = None
        bases: list[str] | None = None
        for op, argument in _instructions(code):
            if op == _LOAD_CONST:
                constants = [constants[-1], code.co_consts[argument]]
            elif op == _LOAD_SMALL_INT:
                constants = [constants[-1], argument]
            elif op == _IMPORT_NAME:
                level, fromlist = constants
                module = _absolute(code.co_names[argument], level, package)
                if fromlist == ('*',):
                    self.stars.append(module)
                imported = None if fromlist else (module, '')
            elif op == _IMPORT_FROM and imported != (module, ''):
                imported = (module, code.co_names[argument])
            elif op == _LOAD_BUILD_CLASS:
                bases = []
            elif op == _LOAD_NAME and bases is not None:
                bases.append(code.co_names[argument])
            elif op == _LOAD_ATTR and bases:
                bases[-1] += '.' + code.co_names[argument >> 1]
            elif op == _STORE_NAME:
                name = code.co_names[argument]
                self.stored.add(name)
                if imported is not None:
                    self.imports[name], imported = imported, None
                if bases is not None:
                    self.bases[name], bases = bases, None


_LOAD_CONST, _LOAD_NAME, _LOAD_ATTR, _STORE_NAME, _IMPORT_NAME, _IMPORT_FROM, _LOAD_BUILD_CLASS = (
    opmap[name]
    for name in (
        *('LOAD_CONST', 'LOAD_NAME', 'LOAD_ATTR', 'STORE_NAME'),
        *('IMPORT_NAME', 'IMPORT_FROM', 'LOAD_BUILD_CLASS'),
    )
)
_LOAD_SMALL_INT = opmap.get('LOAD_SMALL_INT')  # from Python 3.14 on
_EXTENDED_ARG = opmap['EXTENDED_ARG']


def _instructions(code: CodeType) -> Iterator[tuple[int, int]]:
    extended = 0
    pairs = iter(code.co_code)
    for op, argument in zip(pairs, pairs, strict=True):
        argument |= extended
        extended = argument << 8 if op == _EXTENDED_ARG else 0
        yield op, argument


def _absolute(module: str, level: int, package: str) -> str:
    if not level:
        return module
    base = '.'.join(package.split('.')[: 1 - level or None])
    return f'{base}.{module}' if module else base


def _codes(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _names_in(code: CodeType) -> set[str]:
    return set(code.co_names).union(*map(_names_in, _codes(code)))
