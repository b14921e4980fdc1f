"""Tiny real models: GPTModel and HybridModel of megatron.core with local layer specs."""

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.spec_utils import import_module
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.cpu_megatron.latent_attention import gpt_latent_attention_layer_spec

HYBRID_SPEC = ['tests.cpu_megatron.hybrid_spec', 'hybrid_stack_spec']


def gpt_layer_spec(config: TransformerConfig, vp_stage: int | None = None):
    """Local spec of one layer, or of the stage's layers when some of them are MoE."""
    if config.num_moe_experts is not None:
        return get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization=config.normalization,
            vp_stage=vp_stage,
        )
    options = {'qk_layernorm': config.qk_layernorm, 'normalization': config.normalization}
    if config.multi_latent_attention:
        return gpt_latent_attention_layer_spec(**options)
    return get_gpt_layer_local_spec(**options)


def build_gpt(config: TransformerConfig, vp_stage: int | None = None, **options) -> GPTModel:
    """GPTModel; the options are its constructor's."""
    spec = gpt_layer_spec(config, vp_stage)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
    return GPTModel(config, spec, vp_stage=vp_stage, mtp_block_spec=mtp, **options)


def build_hybrid(
    config: TransformerConfig, spec=HYBRID_SPEC, vp_stage: int | None = None, **options
) -> HybridModel:
    """HybridModel; the options are its constructor's."""
    return HybridModel(config, import_module(spec), vp_stage=vp_stage, **options)


def model_from_args(
    kind: str,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection=None,
):
    """The model provider of ``pretrain``: kind 'gpt' or 'hybrid', everything else from the args."""
    from megatron.training import get_args
    from megatron.training.argument_utils import core_transformer_config_from_args

    args = get_args()
    config = config or core_transformer_config_from_args(args)
    options = {
        'vocab_size': args.padded_vocab_size,
        'max_sequence_length': args.max_position_embeddings,
        'pre_process': pre_process,
        'post_process': post_process,
        'parallel_output': True,
        'share_embeddings_and_output_weights': not args.untie_embeddings_and_output_weights,
        'position_embedding_type': args.position_embedding_type,
        'rotary_percent': args.rotary_percent,
        'rotary_base': args.rotary_base,
        'pg_collection': pg_collection,
    }
    if kind == 'gpt':
        return build_gpt(config, vp_stage, **options)
    return build_hybrid(
        config,
        args.spec or HYBRID_SPEC,
        vp_stage,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        **options,
    )
