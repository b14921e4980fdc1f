"""Multi-latent attention without Transformer Engine, whose core attention megatron relies on there.

The local core attention takes keys and values of one size; this one is plain causal attention.
"""

from dataclasses import fields
from importlib import import_module

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

# HybridModel's sparse attention since megatron-core 0.19, where it has latent attention, too.
_ABSORBED = 'megatron.core.transformer.experimental_attention_variant.absorbed_mla'


class CoreAttention(torch.nn.Module):
    """Causal attention whose values may have another size than the keys."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **options):
        super().__init__()
        self.scale = options['softmax_scale']

    def forward(self, query, key, value, attention_mask, **options):
        """Context of shape [sequence, batch, heads * value size], from [sequence, batch, heads, …].

        Every query sees the keys up to its own position, whatever the mask says.
        """
        query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale
        )
        return context.permute(2, 0, 1, 3).flatten(2)


def gpt_latent_attention_layer_spec(**options) -> ModuleSpec:
    """Megatron's local layer spec with MLA, whose entries have the names that TE's have."""
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, **options)
    spec.submodules.self_attention.submodules.core_attention = CoreAttention
    spec.submodules.sharded_state_dict_keys_map = {
        'pre_mlp_layernorm.': 'mlp.linear_fc1.layer_norm_'
    }
    return spec


class DuplicatedLinear(torch.nn.Linear):
    """A linear layer that every rank has whole, built with the arguments of TE's."""

    def __init__(self, input_size, output_size, *, config, init_method, bias, **options):
        super().__init__(input_size, output_size, bias=bias, dtype=config.params_dtype)
        init_method(self.weight)

    def forward(self, x):
        """Output, and no bias to be added later."""
        return super().forward(x), None


def sparse_attention_spec(**options) -> ModuleSpec:
    """Megatron's sparse attention (DSA), which only computes with kernels for GPUs."""
    latent = gpt_latent_attention_layer_spec(**options).submodules.self_attention
    linears = vars(latent.submodules) | {
        'core_attention': ModuleSpec(
            module=dsa.DSAttention,
            submodules=dsa.DSAttentionSubmodules(
                indexer=ModuleSpec(
                    module=dsa.DSAIndexer,
                    submodules=dsa.DSAIndexerSubmodules(
                        linear_wq_b=DuplicatedLinear,
                        linear_wk=DuplicatedLinear,
                        k_norm=WrappedTorchNorm,
                        linear_weights_proj=DuplicatedLinear,
                    ),
                )
            ),
        )
    }
    attention, submodules = latent.module, type(latent.submodules)
    if hasattr(Symbols, 'MLA'):
        absorbed = import_module(_ABSORBED)
        attention = absorbed.AbsorbedMLASelfAttention
        submodules = absorbed.AbsorbedMLASelfAttentionSubmodules
    known = {field.name for field in fields(submodules)}
    return ModuleSpec(
        module=attention,
        params=latent.params,
        submodules=submodules(**{name: part for name, part in linears.items() if name in known}),
    )
