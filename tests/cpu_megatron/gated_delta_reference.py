"""A pure-torch stand-in for what megatron's gated delta net takes from ``fla``: its definition."""

import sys
import types

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **unused
) -> tuple[Tensor, None]:
    """Depthwise causal convolution, then SiLU, of ``x`` [batch, length, d] by ``weight`` [d, w]."""
    width = weight.shape[1]
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    out = F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0])
    return F.silu(out).transpose(1, 2), None


def l2norm(x: Tensor, eps: float = 1e-6, **unused) -> Tensor:
    """``x`` with a last dimension of length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **unused
) -> tuple[Tensor, None]:
    """S[t] = exp(g[t]) S[t-1] (1 - beta[t] k[t] k[t]') + beta[t] v[t] k[t]';  y[t] = S[t] q[t].

    Args:
        q, k: [batch, length, heads, key_dim]; ``q`` is scaled by key_dim ** -0.5.
        v: [batch, length, heads, value_dim].
        g, beta: [batch, length, heads].

    Returns:
        y: [batch, length, heads, value_dim], and no state.
    """
    q = q * q.shape[-1] ** -0.5
    state = v.new_zeros(*v.shape[:1], *v.shape[2:], k.shape[-1])
    y = []
    for t in range(v.shape[1]):
        state = state * torch.exp(g[:, t])[..., None, None]
        known = (state * k[:, t, :, None]).sum(-1)
        update = beta[:, t, :, None] * (v[:, t] - known)
        state = state + update[..., None] * k[:, t, :, None]
        y.append((state * q[:, t, :, None]).sum(-1))
    return torch.stack(y, dim=1).to(v.dtype), None


def install() -> None:
    """Put the modules that ``GatedDeltaNet`` imports into ``sys.modules``."""
    contents = {
        'fla': {},
        'fla.modules': {},
        'fla.modules.convolution': {'causal_conv1d': causal_conv1d},
        'fla.modules.l2norm': {'l2norm': l2norm},
        'fla.ops': {},
        'fla.ops.gated_delta_rule': {'chunk_gated_delta_rule': chunk_gated_delta_rule},
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes)
        sys.modules[name] = module
