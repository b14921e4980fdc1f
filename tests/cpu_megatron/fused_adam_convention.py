"""AdamW as Transformer Engine's FusedAdam keeps it: one ``step`` in the parameter group.

Megatron takes its Adam from TE, else from Apex, else from torch. Installed as ``apex.optimizers``,
this class is what its imports find on a machine that has neither, by megatron's own route.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW (or Adam with L2, ``adam_w_mode=False``) whose state has the moments only.

    With ``master_weights`` it also has a main parameter, in fp32, for each parameter, as megatron's
    precision-aware optimizer asks for.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
    ):
        if capturable:
            raise NotImplementedError('capturable needs a GPU')
        dtypes = {master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype}
        if store_param_remainders or dtypes != {torch.float32}:
            raise NotImplementedError('state in fp32 only')
        defaults = {
            'lr': lr,
            'bias_correction': bias_correction,
            'betas': betas,
            'eps': eps,
            'weight_decay': weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        self.gradient = 'decoupled_grad' if use_decoupled_grad else 'grad'

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None) -> None:
        """One update of every parameter that has a gradient; empty groups don't count steps."""
        if closure is not None:
            raise NotImplementedError('closures')
        for group in self.param_groups:
            if not group['params']:
                continue
            group['step'] = group.get('step', 0) + 1
            for param in group['params']:
                if not self.state[param]:
                    self.initialize_state(param, False)
                if getattr(param, self.gradient, None) is not None:
                    self._update(param, group)

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        """What a parameter's first step allocates; the remainders are not kept here."""
        state = self.state[param]
        dtype = torch.float32 if self.master_weights else param.dtype
        state['exp_avg'] = torch.zeros_like(param, dtype=dtype)
        state['exp_avg_sq'] = torch.zeros_like(param, dtype=dtype)
        if self.master_weights:
            state['master_param'] = param.detach().float().clone()

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        """A state as it is: what isn't fp32 would be converted."""
        return self.state[param][name]

    def set_scaled_state(self, param: Tensor, name: str, value: Tensor) -> None:
        """Copy a value into a state."""
        self.state[param].setdefault(name, torch.empty_like(value)).copy_(value)

    def load_state_dict(self, state_dict: dict) -> None:
        """torch's, which casts all state to the parameter's dtype, and then the state itself."""
        super().load_state_dict(state_dict)
        params = (param for group in self.param_groups for param in group['params'])
        numbers = (number for group in state_dict['param_groups'] for number in group['params'])
        for param, number in zip(params, numbers, strict=True):
            if number in state_dict['state']:
                self.state[param] = dict(state_dict['state'][number])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """torch's, and the same for the gradients of another dtype."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for param in group['params']:
                param.decoupled_grad = None

    def _update(self, model_param: Tensor, group: dict) -> None:
        state = self.state[model_param]
        param = state['master_param'] if self.master_weights else model_param
        beta1, beta2 = group['betas']
        step = int(group['step'])
        grad = getattr(model_param, self.gradient).to(param.dtype)
        if self.adam_w_mode:
            param.mul_(1 - group['lr'] * group['weight_decay'])
        else:
            grad = grad.add(param, alpha=group['weight_decay'])
        state['exp_avg'].lerp_(grad, 1 - beta1)
        state['exp_avg_sq'].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correction1 = correction2 = 1.0
        if group['bias_correction']:
            correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        denominator = (state['exp_avg_sq'] / correction2).sqrt_().add_(group['eps'])
        param.addcdiv_(state['exp_avg'], denominator, value=-group['lr'] / correction1)
        if self.master_weights:
            model_param.copy_(param)


def install() -> None:
    """Let ``from apex.optimizers import FusedAdam`` find this class."""
    # without an ``apex`` beside it, whose presence would promise Apex's layer norms too
    optimizers = types.ModuleType('apex.optimizers')
    optimizers.FusedAdam = FusedAdam
    optimizers.FusedSGD = torch.optim.SGD
    sys.modules['apex.optimizers'] = optimizers


@contextmanager
def found_in_transformer_engine() -> Iterator[None]:
    """Let this class be TE's inside the block: megatron looks there for a precision-aware one."""
    optimizers = types.ModuleType('transformer_engine.pytorch.optimizers')
    optimizers.FusedAdam = FusedAdam
    packages = {
        name: types.ModuleType(name)
        for name in ('transformer_engine', 'transformer_engine.pytorch')
    }
    packages['transformer_engine'].__version__ = '0.0.0'  # what megatron takes without one
    with mock.patch.dict(sys.modules, packages | {optimizers.__name__: optimizers}):
        yield
