"""The meta-path finder behind :func:`megatron_overlay.activate`, and the version guard."""

import importlib.machinery
import importlib.util
import os
import sys
from types import SimpleNamespace

_NAMESPACE = 'megatron'
_MODULE_ATTRIBUTES = frozenset(
    f'__{name}__' for name in 'name doc package loader spec path file cached builtins'.split()
)


class OverlayFinder:
    """Maps dotted names under ``megatron`` to the overlay's files.

    Attributes:
        tree: directory that holds the overlay's ``megatron`` folder.
        supported_versions: ``MAJOR.MINOR`` strings of the megatron-core releases it applies to.
    """

    def __init__(self, tree: str, supported_versions: tuple[str, ...]):
        self.tree = tree
        self.supported_versions = supported_versions
        self._files: dict[str, str] | None = None
        self._applies: bool | None = None

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
        if not self.applies():
            return None
        return importlib.util.spec_from_file_location(fullname, self.files[fullname])

    def applies(self) -> bool:
        """Whether this process's megatron-core is a supported version; warns once when not."""
        if self._applies is None:
            version, location = core_version()
            self._applies = self.supports(version)
            if not self._applies:
                import warnings

                warnings.warn(
                    f'megatron_overlay stays out: it supports megatron-core '
                    f'{" and ".join(self.supported_versions)}, and {location} is version '
                    f'{version or "unknown"}. megatron-core runs unmodified.',
                    stacklevel=2,
                )
        return self._applies

    def supports(self, version: str) -> bool:
        """Whether ``version`` is a release of a supported series; a pre-release is not."""
        series, _, patch = version.rpartition('.')
        return series in self.supported_versions and patch.isdigit()

    def upstream_spec(self, name: str):
        """Spec of upstream's module ``name``, or None where upstream has no such module."""
        parent = sys.modules.get(name.rpartition('.')[0])
        path = getattr(parent, '__path__', None)
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, None)
            if spec is not None and spec.origin is not None:
                return spec
        return None


def execute_upstream(finder: OverlayFinder, name: str) -> SimpleNamespace:
    """See :func:`megatron_overlay.upstream`."""
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
    return SimpleNamespace(**upstream)


def core_version() -> tuple[str, str]:
    """Version and directory of the megatron-core that this process imports.

    Reads ``package_info.py`` as text: importing ``megatron.core`` would import torch.

    Returns:
        ``('', '')`` where there is no megatron-core, ``('', directory)`` for one that doesn't
        tell its version.
    """
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
