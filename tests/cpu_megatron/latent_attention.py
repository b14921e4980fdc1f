"""Multi-latent attention without Transformer Engine, whose core attention megatron relies on there.

The local core attention takes keys and values of one size; this one is plain causal attention.
"""

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec


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
