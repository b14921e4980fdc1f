"""A pure-torch stand-in for the two things that ``MambaMixer`` takes from ``mamba_ssm``.

Both follow their definition (a depthwise causal convolution, the state-space recurrence one
position after the other, a gated RMS norm): slow, readable, differentiable.
"""

import sys
import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm_gated(
    x: Tensor,
    weight: Tensor,
    z: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
) -> Tensor:
    """RMS norm over groups of ``group_size`` last-dimension values, gated by ``silu(z)``.

    Args:
        x: [..., d].
        weight: [d].
        z: [..., d] or None for no gate.
        eps: added to the mean square.
        group_size: a divisor of d; None for one group.
        norm_before_gate: gate the result of the norm rather than its input.

    Returns:
        [..., d] in the dtype of ``x``; computed in fp32 at least.
    """
    dtype = x.dtype
    wide = torch.promote_types(dtype, torch.float32)
    x = x.to(wide)
    gate = None if z is None else F.silu(z.to(wide))
    if gate is not None and not norm_before_gate:
        x = x * gate
    groups = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    out = groups.flatten(-2) * weight.to(wide)
    if gate is not None and norm_before_gate:
        out = out * gate
    return out.to(dtype)


class RMSNorm(nn.Module):
    """The gated RMS norm as a module, with ``mamba_ssm``'s constructor."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter('bias', None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return rms_norm_gated(x, self.weight, z, self.eps, self.group_size, self.norm_before_gate)


def state_space_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None
) -> Tensor:
    """h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t];  y[t] = C[t] h[t] + D x[t].

    Args:
        x: [batch, length, heads, head_dim].
        dt: [batch, length, heads], positive.
        A: [heads], negative.
        B, C: [batch, length, groups, state]; heads of a group share them.
        D: [heads] or [heads, head_dim], or None.

    Returns:
        y: [batch, length, heads, head_dim].
    """
    batch, length, heads, head_dim = x.shape
    B = B.repeat_interleave(heads // B.shape[2], dim=2)
    C = C.repeat_interleave(heads // C.shape[2], dim=2)
    decay = torch.exp(dt * A)
    state = x.new_zeros(batch, heads, head_dim, B.shape[-1])
    y = []
    for t in range(length):
        update = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        state = decay[:, t, :, None, None] * state + update
        y.append((state * C[:, t, :, None, :]).sum(-1))
    out = torch.stack(y, dim=1)
    if D is not None:
        out = out + x * (D if D.dim() == 2 else D[:, None])
    return out


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor | None,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float('inf')),
    return_final_states: bool = False,
    activation: str = 'silu',
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """Everything between ``in_proj`` and ``out_proj`` of a Mamba-2 layer, for training.

    Args:
        zxbcdt: [batch, length, 2 d + 2 groups*state + heads], the output of ``in_proj``.
        conv1d_weight, conv1d_bias: [d + 2 groups*state, width] and [d + 2 groups*state].
        dt_bias, A: [heads].
        D: [heads] or [heads, head_dim].
        rmsnorm_weight: [d]; None gates without a norm.
        headdim: needed when D is [heads].

    Returns:
        [batch, length, d].

    Raises:
        NotImplementedError: for packed sequences, initial states and a fused output projection,
            which training on the CPU doesn't use.
    """
    for unused in (initial_states, seq_idx, outproj_weight, outproj_bias):
        if unused is not None:
            raise NotImplementedError('packed sequences, states and a fused output projection')
    if return_final_states or activation not in ('silu', 'swish'):
        raise NotImplementedError('final states and other activations')
    heads = dt_bias.shape[0]
    d = heads * (D.shape[1] if D is not None and D.dim() == 2 else headdim)
    conv_dim, width = conv1d_weight.shape
    state = (conv_dim - d) // (2 * ngroups)
    z, xBC, dt = zxbcdt.split([d, conv_dim, heads], dim=-1)

    xBC = F.conv1d(
        F.pad(xBC.transpose(1, 2), (width - 1, 0)),
        conv1d_weight.to(xBC.dtype)[:, None],
        None if conv1d_bias is None else conv1d_bias.to(xBC.dtype),
        groups=conv_dim,
    )
    x, B, C = F.silu(xBC).transpose(1, 2).split([d, ngroups * state, ngroups * state], dim=-1)

    wide = torch.promote_types(zxbcdt.dtype, torch.float32)
    dt = F.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(*dt_limit)
    y = state_space_scan(
        x.to(wide).unflatten(-1, (heads, -1)),
        dt,
        A.to(wide),
        B.to(wide).unflatten(-1, (ngroups, state)),
        C.to(wide).unflatten(-1, (ngroups, state)),
        None if D is None else D.to(wide),
    ).flatten(-2)
    if rmsnorm_weight is None:
        return (y * F.silu(z.to(wide))).to(zxbcdt.dtype)
    return rms_norm_gated(
        y.to(zxbcdt.dtype), rmsnorm_weight, z, rmsnorm_eps, d // ngroups, norm_before_gate
    )


def install() -> None:
    """Put the modules that ``MambaMixer`` imports into ``sys.modules``."""
    contents = {
        'mamba_ssm': {'__version__': '2.2.4'},
        'mamba_ssm.ops': {},
        'mamba_ssm.ops.triton': {},
        'mamba_ssm.ops.triton.layernorm_gated': {'RMSNorm': RMSNorm},
        'mamba_ssm.ops.triton.ssd_combined': {
            'mamba_chunk_scan_combined': None,
            'mamba_split_conv1d_scan_combined': mamba_split_conv1d_scan_combined,
        },
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes)
        sys.modules[name] = module
