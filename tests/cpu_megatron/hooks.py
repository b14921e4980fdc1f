"""What has to change inside megatron modules, applied right after each of them is imported."""

import functools
import importlib.util
import logging
import queue
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

from tests.cpu_megatron import on_gpu


def _norm_without_te(module: ModuleType) -> None:
    # HybridStack's final norm is hard-wired to TE's
    if importlib.util.find_spec('transformer_engine') is None:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        module.TENorm = WrappedTorchNorm


def _plain_results_queue(module: ModuleType) -> None:
    # the default is a multiprocessing manager, which takes seconds to start and re-imports __main__
    module._results_queue = queue.Queue()


def _helpers_are_compiled(module: ModuleType) -> None:
    # the wheel ships them compiled, without the Makefile
    module.compile_helpers = lambda: None


def _quiet_rng_tracker(module: ModuleType) -> None:
    # the tracker's generator is the CPU's here, so drawing from it changes "the CPU state"
    logging.getLogger(module.__name__).addFilter(
        lambda record: 'CPU RNG state changed' not in record.getMessage()
    )


def _help_texts_once(module: ModuleType) -> None:
    # parsed out of the sources of some thirty classes, twice for every run in a process
    find = module.ArgumentGroupFactory._get_field_docstrings
    found = {}

    def find_once(self, config_class):
        if config_class not in found:
            found[config_class] = find(self, config_class)
        return found[config_class]

    module.ArgumentGroupFactory._get_field_docstrings = find_once


def _no_inference_layers(module: ModuleType) -> None:
    # from 0.20 on asked of every layer of MTP, in terms of classes that TE's are the bases of
    if importlib.util.find_spec('transformer_engine') is None:
        module.is_inference_column_parallel_linear = lambda layer: False


def _no_driver(module: ModuleType) -> None:
    # Triton before 3.4 (torch before 2.8) looks for a GPU where a kernel is defined
    if not on_gpu():
        module.driver.set_active(SimpleNamespace(get_benchmarker=lambda: None))


AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    'megatron.core.models.hybrid.hybrid_block': _norm_without_te,
    'megatron.core.dist_checkpointing.strategies.filesystem_async': _plain_results_queue,
    'megatron.core.datasets.utils': _helpers_are_compiled,
    'megatron.core.tensor_parallel.inference_layers': _no_inference_layers,
    'megatron.core.tensor_parallel.random': _quiet_rng_tracker,
    'megatron.training.argument_utils': _help_texts_once,
    'triton.runtime.driver': _no_driver,
}


class AfterImport:
    """A meta-path finder that lets the others find a module and runs a hook once it is executed."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        hook = AFTER_IMPORT.get(name)
        if hook is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader.exec_module = functools.partial(_execute, spec.loader.exec_module, hook)
                return spec
        return None


def _execute(exec_module, hook, module: ModuleType) -> None:
    exec_module(module)
    hook(module)


def install() -> None:
    """Register the finder; modules that are already there get their hook now."""
    sys.meta_path.insert(0, AfterImport())
    for name, hook in AFTER_IMPORT.items():
        if name in sys.modules:
            hook(sys.modules[name])
