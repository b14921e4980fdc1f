"""GPT checkpoints with Transformer Engine's layers, into HybridModel's own stack spec.

TE's modules are built, saved and loaded here; nothing computes, which would need a GPU.
"""

from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop
from megatron.core.dist_checkpointing.checkpoint_layout import check_sources, read_checkpoint_layout
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch.distributed.checkpoint import FileSystemReader

from tests.cpu_megatron.session import model_parallel, tiny_config
from tests.cpu_megatron.whole_checkpoint import gpt_source, read_tensors

pytestmark = pytest.mark.te
SIZES = {'vocab_size': 64, 'max_sequence_length': 16, 'position_embedding_type': 'rope'}
METADATA = {'singleton_local_shards': False}


def build(kind, **config):
    experts = config.get('num_moe_experts')
    with mock.patch('torch.cuda.is_available', return_value=True):
        if kind == 'gpt':
            return GPTModel(
                tiny_config(**config),
                get_gpt_layer_with_transformer_engine_spec(num_experts=experts),
                **SIZES,
            )
        pattern = config.pop('pattern')
        return HybridModel(
            tiny_config(
                num_layers=len(pattern),
                is_hybrid_model=True,
                mamba_state_dim=8,
                mamba_head_dim=8,
                mamba_num_groups=2,
                **config,
            ),
            hybrid_stack_spec,
            hybrid_layer_pattern=pattern,
            **SIZES,
        )


def give_own_values(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def save(model, path):
    dist_checkpointing.save(model.sharded_state_dict(metadata=METADATA), str(path))


@pytest.mark.parametrize(
    'pattern, model',
    [
        ('M*-M*-', {}),
        (
            '*-M*-',
            {'gated_linear_unit': True, 'normalization': 'RMSNorm', 'add_bias_linear': False},
        ),
        ('*EM*E', {'num_moe_experts': 4, 'moe_grouped_gemm': False}),
    ],
)
def test_fused_layers_and_extra_state(pattern, model, tmp_path):
    for name in ('gpt', 'fresh', 'loaded'):
        (tmp_path / name).mkdir()
    with model_parallel():
        gpt = build('gpt', **model)
        give_own_values(gpt, 1)
        save(gpt, tmp_path / 'gpt')

        layout = read_checkpoint_layout(str(tmp_path / 'gpt'))
        stored = FileSystemReader(tmp_path / 'gpt').read_metadata().state_dict_metadata
        assert any('_extra_state' in key for key in stored)
        assert any(key.endswith('linear_qkv.layer_norm_weight') for key in stored)

        hybrid = build('hybrid', pattern=pattern, **model)
        give_own_values(hybrid, 2)
        save(hybrid, tmp_path / 'fresh')
        state = hybrid.sharded_state_dict(metadata=METADATA)
        maps = interop.gpt_compatible_layer_maps(pattern, layout)
        interop.retarget_sharded_state_dict_to_gpt_checkpoint(state, maps)
        check_sources(state, layout)
        hybrid.load_state_dict(
            dist_checkpointing.load(state, str(tmp_path / 'gpt'), strict='raise_all'), strict=True
        )
        save(hybrid, tmp_path / 'loaded')
    source, fresh, loaded = (read_tensors(tmp_path / n) for n in ('gpt', 'fresh', 'loaded'))
    for key, value in loaded.items():
        expected = gpt_source(source, key, pattern)
        assert torch.equal(value, fresh[key] if expected is None else expected), key
