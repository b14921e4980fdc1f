"""``torch.cuda`` without CUDA: every device is the CPU, streams and events are inert."""

import contextlib
import types
from typing import Any

import torch
import torch._dynamo  # noqa: F401  # reads torch.cuda when imported: has to see the real one
from torch.overrides import TorchFunctionMode

_CUDA_TYPE = {
    str(dtype): f'torch.cuda.{name}Tensor'
    for dtype, name in (
        (torch.float32, 'Float'),
        (torch.float64, 'Double'),
        (torch.float16, 'Half'),
        (torch.bfloat16, 'BFloat16'),
        (torch.uint8, 'Byte'),
        (torch.int8, 'Char'),
        (torch.int16, 'Short'),
        (torch.int32, 'Int'),
        (torch.int64, 'Long'),
        (torch.bool, 'Bool'),
    )
}


_real_is_available = torch.cuda.is_available


def cuda_is_real() -> bool:
    """Whether this machine has a CUDA device, whatever the facade answers."""
    return _real_is_available()


def on_cpu(device: Any) -> Any:
    """'cpu' for whatever names a CUDA device, anything else unchanged."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return 'cpu'
    if isinstance(device, str) and device.startswith('cuda'):
        return 'cpu'
    if isinstance(device, torch.device) and device.type == 'cuda':
        return 'cpu'
    return device


class CpuDevices(TorchFunctionMode):
    """Sends factories and ``Tensor.to`` that name a CUDA device to the CPU; nothing is pinned."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if kwargs:
            if 'device' in kwargs:
                kwargs['device'] = on_cpu(kwargs['device'])
            if kwargs.get('pin_memory'):
                kwargs['pin_memory'] = False
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], on_cpu(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


class InertStream:
    """A stream on which everything has already happened."""

    cuda_stream = 0
    stream_id = 0

    def __init__(self, *args, **kwargs):
        self.device = torch.device('cpu')

    def wait_stream(self, stream) -> None:
        pass

    def wait_event(self, event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event=None):
        return event or InertEvent()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info) -> None:
        pass


class InertEvent:
    """An event that has already been reached."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None) -> None:
        pass

    def wait(self, stream=None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end) -> float:
        return 0.0


_STREAM = InertStream()


def _get_rng_state(device=None) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device=None) -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _nothing(*args, **kwargs) -> None:
    pass


def _zero(*args, **kwargs) -> int:
    return 0


def _identity(self, *args, **kwargs):
    return self


_tensor_type = torch.Tensor.type


def _type(self, dtype=None, non_blocking=False, **kwargs):
    # the optimizers tell parameters apart by the name of their CUDA type
    if dtype is None:
        return _CUDA_TYPE.get(str(self.dtype), str(self.dtype))
    if isinstance(dtype, str):
        dtype = dtype.replace('torch.cuda.', 'torch.')
    return _tensor_type(self, dtype, non_blocking, **kwargs)


_PROPERTIES = types.SimpleNamespace(
    name='cpu',
    major=8,
    minor=0,
    multi_processor_count=1,
    total_memory=1 << 34,
    warp_size=32,
)


def install() -> None:
    """Replace what megatron reads of ``torch.cuda``, and switch the function mode on for good."""
    cuda = torch.cuda
    replaced = {
        'is_available': lambda: True,
        'is_initialized': lambda: False,
        'device_count': lambda: 1,
        'current_device': lambda: 0,
        'set_device': _nothing,
        'synchronize': _nothing,
        'empty_cache': _nothing,
        'init': _nothing,
        '_lazy_init': _nothing,
        '_lazy_call': lambda callback, **kwargs: callback(),
        'ipc_collect': _nothing,
        'Stream': InertStream,
        'Event': InertEvent,
        'stream': lambda stream=None: contextlib.nullcontext(stream),
        'set_stream': _nothing,
        'current_stream': lambda device=None: _STREAM,
        'default_stream': lambda device=None: _STREAM,
        'device': lambda device=None: contextlib.nullcontext(),
        'get_rng_state': _get_rng_state,
        'set_rng_state': _set_rng_state,
        'manual_seed': _manual_seed,
        'manual_seed_all': _manual_seed,
        'default_generators': (torch.default_generator,),
        'get_device_properties': lambda device=None: _PROPERTIES,
        'get_device_capability': lambda device=None: (_PROPERTIES.major, _PROPERTIES.minor),
        'get_device_name': lambda device=None: _PROPERTIES.name,
        'is_current_stream_capturing': lambda: False,
        'memory_stats': lambda device=None: {},
        'device_memory_used': _zero,
        'reset_peak_memory_stats': _nothing,
        'mem_get_info': lambda device=None: (_PROPERTIES.total_memory, _PROPERTIES.total_memory),
    }
    for name in ('allocated', 'reserved'):
        replaced[f'memory_{name}'] = replaced[f'max_memory_{name}'] = _zero
    for name, value in replaced.items():
        setattr(cuda, name, value)
    # torch's own code asks here, and would go on to a device that isn't there
    torch.accelerator.is_available = lambda: False
    torch.accelerator.current_accelerator = lambda check_available=False: None
    cuda.random.get_rng_state = _get_rng_state
    cuda.random.set_rng_state = _set_rng_state
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _zero
    torch.Tensor.cuda = torch.nn.Module.cuda = _identity
    torch.Tensor.pin_memory = _identity
    torch.Tensor.record_stream = _nothing
    torch.Tensor.type = _type
    CpuDevices().__enter__()
