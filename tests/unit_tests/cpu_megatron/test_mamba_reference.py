import pytest
import torch
import torch.nn.functional as F

from tests.cpu_megatron.mamba_reference import RMSNorm, mamba_split_conv1d_scan_combined


def _inputs(ngroups, d_has_head_dim, dtype=torch.float64):
    batch, length, heads, head_dim, state, width = 2, 7, 4, 3, 5, 4
    d, conv = heads * head_dim, heads * head_dim + 2 * ngroups * state
    make = torch.Generator().manual_seed(7)

    def values(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)

    return {
        'zxbcdt': values(batch, length, d + conv + heads),
        'conv1d_weight': values(conv, width),
        'conv1d_bias': values(conv),
        'dt_bias': values(heads),
        'A': -values(heads).exp(),
        'D': values(heads, head_dim) if d_has_head_dim else values(heads),
        'headdim': None if d_has_head_dim else head_dim,
        'ngroups': ngroups,
        'chunk_size': 4,
    }


def _selective_scan(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, headdim, ngroups, chunk_size
):
    """One scalar state at a time, written from the equations and sharing nothing with the code."""
    heads = len(dt_bias)
    head_dim = headdim or D.shape[1]
    d, (conv, width) = heads * head_dim, conv1d_weight.shape
    n = (conv - d) // 2 // ngroups
    out = torch.zeros(*zxbcdt.shape[:2], d, dtype=torch.float64)
    for b, sequence in enumerate(zxbcdt.double()):
        z, raw, dt = sequence[:, :d], sequence[:, d : d + conv], sequence[:, d + conv :]
        mixed = torch.zeros_like(raw)
        for t in range(len(sequence)):
            for c in range(conv):
                total = conv1d_bias[c].double()
                for k in range(width):
                    if t - width + 1 + k >= 0:
                        total = total + conv1d_weight[c, k] * raw[t - width + 1 + k, c]
                mixed[t, c] = total * torch.sigmoid(total)
        for h in range(heads):
            group = h // (heads // ngroups)
            for p in range(head_dim):
                i = h * head_dim + p
                states = [0.0] * n
                for t in range(len(sequence)):
                    step = torch.log1p(torch.exp(dt[t, h] + dt_bias[h].double()))
                    x, y = mixed[t, i], 0.0
                    for s in range(n):
                        B = mixed[t, d + group * n + s]
                        C = mixed[t, d + ngroups * n + group * n + s]
                        states[s] = torch.exp(step * A[h]) * states[s] + step * B * x
                        y = y + C * states[s]
                    skip = D[h, p] if D.dim() == 2 else D[h]
                    out[b, t, i] = (y + skip * x) * z[t, i] * torch.sigmoid(z[t, i])
    return out


@pytest.mark.parametrize('ngroups', [1, 2])
@pytest.mark.parametrize('d_has_head_dim', [False, True])
def test_the_reference_is_the_selective_scan(ngroups, d_has_head_dim):
    inputs = _inputs(ngroups, d_has_head_dim)
    # other order of summation in fp64: a few ulp
    torch.testing.assert_close(
        mamba_split_conv1d_scan_combined(**inputs),
        _selective_scan(**inputs),
        rtol=1e-12,
        atol=1e-12,
    )


def test_bf16_is_computed_in_fp32():
    inputs = _inputs(2, True, torch.bfloat16)
    inputs['A'] = inputs['A'].float()
    out = mamba_split_conv1d_scan_combined(**inputs)
    assert out.dtype == torch.bfloat16
    # the convolution's output is rounded to bf16 (8 bits), everything after it isn't
    torch.testing.assert_close(
        out.double(), _selective_scan(**inputs).double(), rtol=0.05, atol=0.05
    )


def test_gradients_reach_every_input():
    inputs = _inputs(2, False)
    leaves = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    for leaf in leaves:
        leaf.requires_grad_()
    mamba_split_conv1d_scan_combined(**inputs).square().sum().backward()
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in leaves)


@pytest.mark.parametrize('norm_before_gate', [False, True])
def test_gated_rms_norm(norm_before_gate):
    norm = RMSNorm(6, eps=1e-3, group_size=3, norm_before_gate=norm_before_gate).double()
    make = torch.Generator().manual_seed(3)
    x, z, weight = (torch.randn(6, generator=make, dtype=torch.float64) for _ in range(3))
    norm.weight.data.copy_(weight)
    value = x if norm_before_gate else x * F.silu(z)
    expected = torch.cat(
        [part / ((part**2).sum() / 3 + 1e-3) ** 0.5 for part in (value[:3], value[3:])]
    )
    expected = expected * weight * (F.silu(z) if norm_before_gate else 1)
    torch.testing.assert_close(norm(x, z), expected)
