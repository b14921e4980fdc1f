"""Two kinds of memory on a machine that has one: what a tensor's ``is_cuda`` says is tracked.

``HybridDeviceOptimizer`` decides by ``param.is_cuda`` what it keeps where. Here a flag on the
tensor answers: results of operations on "GPU" tensors are "GPU" tensors, ``.cpu()`` and
``.to('cpu')`` of one are copies in "host memory", and ``.to('cuda')`` of a host tensor is a copy
on the "GPU". So the optimizer's own code runs with the copies, and without the aliasing, that it
has on a real GPU.
While it steps, an operation that mixes the two raises, as it would with a GPU, except where torch
allows it: ``copy_``, and 0-dim host tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MAY_MIX = {'copy_', '__set__', '__get__', 'set_', 'is_set_to', 'data_ptr'}


def on_gpu(tensor: Tensor) -> bool:
    """Whether the tensor is in the memory that stands for the GPU's."""
    return getattr(tensor, '_simulated_gpu', False)


def put_on_gpu(tensor: Tensor) -> Tensor:
    """Declare this very tensor a GPU tensor, as parameters of a model on a GPU are."""
    tensor._simulated_gpu = True
    return tensor


def _tensors(values) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _is_cuda_device(device) -> bool | None:
    """True and False for a device of either kind, None for what names no device."""
    if isinstance(device, bool) or device is None:
        return None
    if isinstance(device, int):
        return True
    if isinstance(device, str | torch.device):
        return str(device).startswith('cuda')
    return None


class SimulatedDevices(TorchFunctionMode):
    """Carries the flag through operations, and copies where a transfer would."""

    strict = False
    _device_is_of = None

    @contextmanager
    def device_of(self, tensor: Tensor):
        """Inside, whatever is moved to a device goes to the memory of the given tensor."""
        self._device_is_of = tensor
        try:
            yield
        finally:
            self._device_is_of = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, '__name__', '')
        if name == 'cpu':
            return self._transfer(args[0], args[0], False)
        if name == 'to' and args:
            return self._to(func, args, kwargs)
        given = list(_tensors([*args, *kwargs.values()]))
        flags = {on_gpu(tensor) for tensor in given if tensor.dim() > 0 or on_gpu(tensor)}
        if self.strict and len(flags) > 1 and name not in _MAY_MIX:
            raise RuntimeError(f'{name}: expected all tensors to be on the same device')
        result = func(*args, **kwargs)
        wanted = _is_cuda_device(kwargs.get('device'))
        if wanted if wanted is not None else True in flags:
            inputs = {id(tensor) for tensor in given}
            for tensor in _tensors([result]):
                if id(tensor) not in inputs:
                    put_on_gpu(tensor)
        return result

    def _to(self, func, args, kwargs):
        source, *rest = args
        wanted = [_is_cuda_device(value) for value in (*rest, kwargs.get('device'))]
        wanted = next((value for value in wanted if value is not None), on_gpu(source))
        if self._device_is_of is not None:
            wanted = on_gpu(self._device_is_of)
        return self._transfer(source, func(*args, **kwargs), wanted)

    def _transfer(self, source, result, wanted):
        if wanted != on_gpu(source) and result is source:
            result = source.clone()
        if result is not source:
            result._simulated_gpu = wanted
        return result


def _module_to_gpu(module, device=None):
    for param in module.parameters():
        put_on_gpu(param)
    return module


def install() -> None:
    """Simulate from here on; ``module.cuda()`` and HybridDeviceOptimizer's parameters are there."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    devices = SimulatedDevices()
    step = HybridDeviceOptimizer.step
    find_groups = HybridDeviceOptimizer._get_sub_optimizer_param_groups
    fit_to_param = torch.optim.Optimizer._process_value_according_to_param_policy

    def step_strictly(self, *args, **kwargs):
        devices.strict = True
        try:
            return step(self, *args, **kwargs)
        finally:
            devices.strict = False

    def with_parameters_on_gpu(self, offload_fraction):
        for group in self.param_groups:
            for param in group['params']:
                put_on_gpu(param)
        return find_groups(self, offload_fraction)

    def fit_to_param_and_its_memory(param, value, *args, **kwargs):
        # loaded state goes to param.device, which is the same device for both kinds of memory
        with devices.device_of(param):
            return fit_to_param(param, value, *args, **kwargs)

    torch.optim.Optimizer._process_value_according_to_param_policy = staticmethod(
        fit_to_param_and_its_memory
    )
    HybridDeviceOptimizer._get_sub_optimizer_param_groups = with_parameters_on_gpu
    HybridDeviceOptimizer.step = step_strictly
    # what a module moves again in its forward (the router of MoE does) stays the same tensor then
    torch.nn.Module.cuda = _module_to_gpu
    Tensor.is_cuda = property(on_gpu)
    devices.__enter__()
