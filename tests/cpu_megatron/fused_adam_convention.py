"""AdamW as Transformer Engine's FusedAdam keeps it: one ``step`` in the parameter group.

Megatron takes its Adam from TE, else from Apex, else from torch. Installed as ``apex.optimizers``,
this class is what its imports find on a machine that has neither, by megatron's own route.
"""

import sys
import types

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW (or Adam with L2, ``adam_w_mode=False``) whose state has the moments only."""

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
    ):
        if capturable:
            raise NotImplementedError('capturable needs a GPU')
        defaults = {
            'lr': lr,
            'bias_correction': bias_correction,
            'betas': betas,
            'eps': eps,
            'weight_decay': weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

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
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: Tensor, group: dict) -> None:
        state = self.state[param]
        if not state:
            state['exp_avg'] = torch.zeros_like(param)
            state['exp_avg_sq'] = torch.zeros_like(param)
        beta1, beta2 = group['betas']
        step = int(group['step'])
        grad = param.grad.to(param.dtype)
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


def install() -> None:
    """Let ``from apex.optimizers import FusedAdam`` find this class."""
    # without an ``apex`` beside it, whose presence would promise Apex's layer norms too
    optimizers = types.ModuleType('apex.optimizers')
    optimizers.FusedAdam = FusedAdam
    optimizers.FusedSGD = torch.optim.SGD
    sys.modules['apex.optimizers'] = optimizers
