"""The meta-path finder behind :func:`megatron_overlay.activate`.

What every interpreter start loads: other modules are imported where megatron is.
"""

import _thread
import os
import sys

_NAMESPACE = 'megatron'
_MODULE_ATTRIBUTES = frozenset(
    f'__{name}__' for name in 'name doc package loader spec path file cached builtins'.split()
)


class OverlayFinder:
    """Maps dotted names under ``megatron`` to the overlay's files.

    Attributes:
        tree: directory that holds the overlay's ``megatron`` folder.
        supported_versions: ``MAJOR.MINOR`` of the megatron-core series it is tested on.
    """

    def __init__(self, tree: str, supported_versions: tuple[str, ...]):
        self.tree = tree
        self.supported_versions = supported_versions
        self._files: dict[str, str] | None = None
        self._left_out: dict[str, str] | None = None
        self._lock = _thread.RLock()
        self._looking = self._told = False

    @property
    def files(self) -> dict[str, str]:
        """Dotted module name -> path of the overlay's file."""
        if self._files is None:
            self._files = dict(_modules_below(self.tree))
        return self._files

    def find_spec(self, fullname, path=None, target=None):
        """Spec of the overlay's file for ``fullname``; None leaves the name to upstream."""
        if not fullname.startswith(_NAMESPACE + '.') or fullname not in self.files:
            return None
        with self._lock:
            # Other finders, asked for upstream's module, may ask this one.
            if self._looking or fullname in self._left_out_with_a_warning():
                return None
        import importlib.util

        spec = importlib.util.spec_from_file_location(fullname, self.files[fullname])
        loader = spec.loader  # type: ignore[union-attr]
        execute = loader.exec_module  # type: ignore[union-attr]
        loader.exec_module = lambda module: self._execute(module, execute)  # type: ignore
        return spec

    def _execute(self, module, execute) -> None:
        """Run the overlay's file; where it fails and upstream's own doesn't, that one stays.

        What a module defines doesn't tell all: what it imports may be missing in turn.
        """
        before = dict(vars(module))
        try:
            execute(module)
        except Exception as error:
            name, spec = module.__name__, self.upstream_spec(module.__name__)
            if spec is None:
                raise
            vars(module).clear()
            vars(module).update(before, __spec__=spec, __loader__=spec.loader, __file__=spec.origin)
            spec.loader.exec_module(module)
            import warnings

            from ._guard import left_out

            failed = {name: f'{type(error).__name__}: {error}'}
            with self._lock:
                self._left_out = left_out(list(self.files), self.upstream_spec, failed)
                self._told = True
            warnings.warn(self._warning(self._left_out), stacklevel=2)

    def left_out(self) -> dict[str, str]:
        """The modules that stay upstream's in this process -> what is in their way.

        All of them where megatron-core is of no supported version; else those that miss something
        they need of it, and what depends on them.
        """
        with self._lock:
            if self._left_out is None:
                self._looking = True
                try:
                    self._left_out = self._look()
                finally:
                    self._looking = False
            return self._left_out

    def _look(self) -> dict[str, str]:
        version, _ = core_version()
        if not self.supports(version):
            return dict.fromkeys(self.files, f'megatron-core {version or "of unknown version"}')
        try:
            from ._guard import left_out

            return left_out(list(self.files), self.upstream_spec)
        except Exception as error:  # what can't be looked at runs unmodified, too
            return dict.fromkeys(self.files, f'{type(error).__name__}: {error}')

    def _left_out_with_a_warning(self) -> dict[str, str]:
        left_out = self.left_out()
        if left_out and not self._told:
            self._told = True
            import warnings

            warnings.warn(self._warning(left_out), stacklevel=3)
        return left_out

    def _warning(self, left_out: dict[str, str]) -> str:
        version, location = core_version()
        if not self.supports(version):
            return (
                f'megatron_overlay stays out: it supports megatron-core '
                f'{" and ".join(self.supported_versions)}, and {location} is version '
                f'{version or "unknown"}. megatron-core runs unmodified.'
            )
        missing = {reason: None for reason in left_out.values() if reason[:8] != 'depends '}
        return (
            f'megatron_overlay stays out of {", ".join(sorted(left_out))}: {"; ".join(missing)} '
            f'in megatron-core {version}, {location}. These run unmodified; `python -m '
            f'megatron_overlay` lists what is in the way of each.'
        )

    def supports(self, version: str) -> bool:
        """Whether ``version`` is of a supported series, as a release or on the way to one.

        Checkouts of main bear a release's number for months before and after it.
        """
        return '.'.join(version.split('.')[:2]) in self.supported_versions

    def upstream_spec(self, name: str, path=None):
        """Spec of upstream's module ``name``, or None where upstream has no such module.

        Args:
            name: dotted.
            path: of the package that it lies in, where that may not have been imported.
        """
        parent = sys.modules.get(name.rpartition('.')[0])
        path = getattr(parent, '__path__', path)
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, None)
            # Packages without an `__init__.py` have no origin; what isn't there has neither.
            if spec is not None and (spec.origin or spec.submodule_search_locations) is not None:
                return spec
        return None


def execute_upstream(finder: OverlayFinder, name: str):
    """See :func:`megatron_overlay.upstream`."""
    from types import SimpleNamespace

    spec = finder.upstream_spec(name)
    if spec is None:
        raise ImportError(f'megatron-core {core_version()[0]} has no module {name}', name=name)
    namespace = vars(sys.modules[name])
    before = dict(namespace)
    code = spec.loader.get_code(name)
    namespace['__file__'] = spec.origin
    exec(code, namespace)
    upstream = {
        key: value
        for key, value in namespace.items()
        # On a reload the namespace still has the names that the overlay's file added.
        if key in code.co_names or key not in before or value is not before[key]
    }
    for key in _MODULE_ATTRIBUTES & before.keys():
        namespace[key] = before[key]
        upstream.pop(key, None)
    _show_source(sys.modules[name], spec.loader, upstream.values())
    return SimpleNamespace(**upstream)


def _show_source(module, loader, values) -> None:
    """Let ``inspect.getsource`` find upstream's classes.

    It looks for a class in the file of the module that has its name, the overlay's. So upstream's
    lines follow the overlay's in what ``linecache`` holds of that file.
    """
    import linecache

    try:
        own, theirs = (each.get_source(module.__name__) for each in (module.__loader__, loader))
    except (AttributeError, ImportError, OSError):  # a release without sources
        return
    lines = f'{own}\n{theirs}'.splitlines(keepends=True)
    linecache.cache[module.__file__] = len(own), None, lines, module.__file__
    for cls in values:
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            line = vars(cls).get('__firstlineno__')  # from Python 3.13 on
            if line is not None:
                cls.__firstlineno__ = line + len(own.splitlines()) + 1  # type: ignore[attr-defined]


def core_version() -> tuple[str, str]:
    """Version and directory of the megatron-core that this process imports.

    Reads ``package_info.py`` as text: importing ``megatron.core`` would import torch.

    Returns:
        ``('', '')`` where there is no megatron-core, ``('', directory)`` for one that doesn't
        tell its version.
    """
    import importlib.util

    try:
        spec = importlib.util.find_spec(f'{_NAMESPACE}.core')
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return '', ''
    directory = os.path.dirname(spec.origin)
    values = {}
    try:
        with open(os.path.join(directory, 'package_info.py'), encoding='utf-8') as file:
            for line in file:
                key, _, value = line.partition('=')
                values[key.strip()] = value.partition('#')[0].strip().strip('\'"')
    except OSError:
        pass
    numbers = [values[key] for key in ('MAJOR', 'MINOR', 'PATCH') if key in values]
    if len(numbers) < 3:
        return '', directory
    return '.'.join(numbers) + values.get('PRE_RELEASE', ''), directory


def _modules_below(tree: str):
    for directory, _, names in os.walk(os.path.join(tree, _NAMESPACE)):
        package = os.path.relpath(directory, tree).replace(os.sep, '.')
        for name in names:
            if name.endswith('.py'):
                yield f'{package}.{name[:-3]}', os.path.join(directory, name)
