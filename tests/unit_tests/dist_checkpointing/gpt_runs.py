"""GPT models that save, hybrid models that load what they saved, and sharded tensors by hand."""

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop
from megatron.core.dist_checkpointing.checkpoint_layout import check_sources, read_checkpoint_layout
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from tests.cpu_megatron.session import Training, distributed_optimizer, gpt, hybrid, model_parallel

MLA = {
    'multi_latent_attention': True,
    'q_lora_rank': 8,
    'kv_lora_rank': 12,
    'qk_head_dim': 8,
    'qk_pos_emb_head_dim': 4,
    'v_head_dim': 6,
    'rope_type': 'rope',
}
needs_latent_layers = pytest.mark.skipif(
    not hasattr(Symbols, 'MLA'), reason='HybridModel has no MLA layers before 0.19'
)


def sharded(key, shape=(2, 3), **kwargs):
    return ShardedTensor.from_rank_offsets(key, torch.randn(shape), **kwargs)


def save_gpt(path, layout_options=None, **model):
    """Train, save, and train on; returns the losses after the save."""
    with model_parallel():
        run = Training.start(gpt(**model), distributed_optimizer())
        run.train(2)
        if layout_options:
            save_state = run.state_dict

            def with_options(metadata, is_loading=False):
                return save_state(metadata | layout_options, is_loading)

            run.state_dict = with_options
        run.save(path)
        return run.train(2)


def load_into_hybrid(path, pattern, again, **model):
    """Load through the retargeted request, and save what arrived under the model's own keys.

    Returns:
        The layer maps, and the losses of the next steps.
    """
    layout = read_checkpoint_layout(str(path))
    maps = interop.gpt_compatible_layer_maps(pattern, layout)

    def prepare(state):
        for part in ('model', 'optimizer'):
            interop.retarget_sharded_state_dict_to_gpt_checkpoint(state[part], maps)
        parts = {part: state[part] for part in ('model', 'optimizer')}
        check_sources(parts, layout, with_mtp=bool(maps.mtp_pattern))
        return state

    with model_parallel(seed=99):
        run = Training.start(hybrid(pattern, **model), distributed_optimizer())
        run.load(path, prepare)
        run.save(again)
        return maps, run.train(2)
