"""A HybridStack of megatron's own modules without Transformer Engine.

The layer norms are modules of their own here and parts of the following linear layer in TE; the key
maps give their checkpoint entries TE's names, as GPT's local spec does.
"""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from tests.cpu_megatron.latent_attention import (
    gpt_latent_attention_layer_spec,
    sparse_attention_spec,
)

_mamba = ModuleSpec(
    module=MambaLayer,
    submodules=MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(
            module=MambaMixer,
            submodules=MambaMixerSubmodules(
                in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
            ),
        ),
        mamba_bda=get_bias_dropout_add,
    ),
)

_attention = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={'attn_mask_type': AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=DotProductAttention,
                linear_proj=RowParallelLinear,
                q_layernorm=IdentityOp,
                k_layernorm=IdentityOp,
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={
            'input_layernorm.': 'self_attention.linear_qkv.layer_norm_',
        },
    ),
)

# Its norms are parts of other modules in TE; nothing but a checkpoint of its own has them.
_gated_delta_net = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(
            module=GatedDeltaNet,
            submodules=GatedDeltaNetSubmodules(
                in_proj=ColumnParallelLinear,
                out_norm=WrappedTorchNorm,
                out_proj=RowParallelLinear,
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
    ),
)

_mlp = ModuleSpec(
    module=MLPLayer,
    submodules=TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=ModuleSpec(
            module=MLP,
            submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        ),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={'pre_mlp_layernorm.': 'mlp.linear_fc1.layer_norm_'},
    ),
)

_moe = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={'pre_mlp_layernorm.': 'mlp.linear_fc1.layer_norm_'},
    ),
)

# Its norm is no part of a linear layer in TE either.
_latent_attention = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=gpt_latent_attention_layer_spec().submodules.self_attention,
        self_attn_bda=get_bias_dropout_add,
    ),
)

_sparse_attention = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=sparse_attention_spec(),
        self_attn_bda=get_bias_dropout_add,
    ),
)

# The stack of a depth is built from the pattern.
_mtp = ModuleSpec(
    module=MultiTokenPredictionBlock,
    submodules=MultiTokenPredictionBlockSubmodules(
        layer_specs=[get_mtp_layer_spec(None, use_transformer_engine=False)]
    ),
)

hybrid_stack_spec = ModuleSpec(
    module=HybridStack,
    submodules=HybridStackSubmodules(
        mamba_layer=_mamba,
        attention_layer=_attention,
        gdn_layer=_gated_delta_net,
        dsa_layer=_sparse_attention,
        mlp_layer=_mlp,
        moe_layer=_moe,
        mtp_block_spec=_mtp,
        # Before 0.19 HybridStack has no such layer.
        **({'mla_layer': _latent_attention} if hasattr(Symbols, 'MLA') else {}),
    ),
)
