"""Training in this process, without the arguments machinery: for unit tests of single steps.

with model_parallel(pipeline=1):
    run = Training.start(gpt(), distributed_optimizer(bf16=True))
    run.train(3)
    run.save(path, 'fully_reshardable')
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import unwrap_model

from tests.cpu_megatron.models import build_gpt, build_hybrid
from tests.cpu_megatron.synthetic_data import SyntheticTokens, forward_step

VOCAB_SIZE = 64
SEQ_LENGTH = 16
MICRO_BATCH_SIZE = 2


@contextlib.contextmanager
def model_parallel(
    tensor: int = 1,
    pipeline: int = 1,
    virtual: int | None = None,
    expert: int = 1,
    expert_tensor: int | None = None,
    seed: int = 1234,
) -> Iterator[None]:
    """Process group (from torchrun's environment, else one process) and megatron's groups.

    The process group outlives the block. So do megatron's groups where there is one rank, which has
    the same ones in every block: what a model's backward hooks hold is never freed, and every group
    of gloo has threads that go on polling.
    """
    one_process = 'RANK' not in os.environ
    if not torch.distributed.is_initialized():
        place = {'store': torch.distributed.HashStore(), 'rank': 0, 'world_size': 1}
        torch.distributed.init_process_group(
            'gloo', timeout=timedelta(minutes=20), **(place if one_process else {})
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=virtual,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
            create_gloo_process_groups=True,
            distributed_timeout_minutes=20,
        )
    seed_everything(seed)
    try:
        yield
    finally:
        # megatron keeps its choice of attention there, and holds the next model to it
        for name in [name for name in os.environ if name.startswith('NVTE_')]:
            del os.environ[name]
        if torch.distributed.get_world_size() > 1:
            parallel_state.destroy_model_parallel()
        unset_num_microbatches_calculator()


def seed_everything(seed: int) -> None:
    """Fresh random state, as at the start of a run."""
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _params_dtype(options: dict) -> torch.dtype:
    half = (('bf16', torch.bfloat16), ('fp16', torch.float16))
    return next((dtype for name, dtype in half if options.get(name)), torch.float32)


def tiny_config(**options) -> TransformerConfig:
    """TransformerConfig of a few thousand parameters for the current parallel state."""
    params_dtype = _params_dtype(options)
    defaults = {
        'num_layers': 2,
        'hidden_size': 32,
        'ffn_hidden_size': 64,
        'num_attention_heads': 4,
        'use_cpu_initialization': True,
        'gradient_accumulation_fusion': False,
        'attention_dropout': 0.0,
        'hidden_dropout': 0.0,
        'init_method_std': 0.05,
        'masked_softmax_fusion': False,
        'bias_activation_fusion': False,
        'bias_dropout_fusion': False,
        'apply_rope_fusion': False,
        'persist_layer_norm': False,
        'params_dtype': params_dtype,
        'pipeline_dtype': params_dtype,
        'tensor_model_parallel_size': parallel_state.get_tensor_model_parallel_world_size(),
        'pipeline_model_parallel_size': parallel_state.get_pipeline_model_parallel_world_size(),
        'virtual_pipeline_model_parallel_size': (
            parallel_state.get_virtual_pipeline_model_parallel_world_size()
        ),
        'expert_model_parallel_size': parallel_state.get_expert_model_parallel_world_size(),
    }
    if options.get('num_moe_experts'):
        defaults |= {'add_bias_linear': False, 'moe_router_topk': 2}
    kind = MLATransformerConfig if options.get('multi_latent_attention') else TransformerConfig
    return kind(**(defaults | options))


def _chunks(build: Callable, config: TransformerConfig, **options) -> list:
    virtual = config.virtual_pipeline_model_parallel_size
    chunks = []
    for vp_stage in range(virtual or 1):
        stage = vp_stage if virtual else None
        model = build(
            config,
            vp_stage=stage,
            vocab_size=VOCAB_SIZE,
            max_sequence_length=SEQ_LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=False, vp_stage=stage
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=False, vp_stage=stage
            ),
            **options,
        )
        half = config.bf16 or config.fp16
        chunks.append(Float16Module(config, model) if half else model)
    return chunks


def gpt(tied: bool = True, position_embedding_type: str = 'rope', **config) -> list:
    """This rank's chunks of a tiny GPTModel; ``config`` goes to :func:`tiny_config`."""
    return _chunks(
        build_gpt,
        tiny_config(**config),
        share_embeddings_and_output_weights=tied,
        position_embedding_type=position_embedding_type,
    )


def hybrid(pattern: str, tied: bool = True, position_embedding_type: str = 'rope', **config):
    """This rank's chunks of a tiny HybridModel with the given layer pattern."""
    config = {
        'num_layers': sum(symbol != '|' for symbol in pattern.partition('/')[0]),
        'mtp_num_layers': pattern.count('/') or None,
        'is_hybrid_model': True,
        'mamba_state_dim': 8,
        'mamba_head_dim': 8,
        'mamba_num_groups': 2,
    } | config
    return _chunks(
        build_hybrid,
        tiny_config(**config),
        hybrid_layer_pattern=pattern,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=position_embedding_type,
    )


def distributed_optimizer(**options) -> OptimizerConfig:
    """OptimizerConfig of Adam in the distributed optimizer."""
    return OptimizerConfig(
        **{
            'optimizer': 'adam',
            'lr': 1e-2,
            'weight_decay': 0.01,
            'clip_grad': 1.0,
            'params_dtype': _params_dtype(options),
            'use_distributed_optimizer': True,
            **options,
        }
    )


@dataclass
class Training:
    """A model under DDP with its optimizer, and how far it has come."""

    model: list
    optimizer: Any
    config: TransformerConfig
    iteration: int = 0
    losses: list[float] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        chunks: list,
        optimizer_config: OptimizerConfig,
        bucket_size: int | None = None,
    ) -> 'Training':
        """Wrap the chunks in DDP and build the optimizer."""
        config = chunks[0].config
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=optimizer_config.use_distributed_optimizer,
            grad_reduce_in_fp32=(
                optimizer_config.fp16 or not optimizer_config.use_precision_aware_optimizer
            ),
            bucket_size=bucket_size,
            overlap_grad_reduce=bucket_size is not None,
        )
        model = [
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=False)
            for chunk in chunks
        ]
        optimizer = get_megatron_optimizer(optimizer_config, model)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        if bucket_size is not None:
            syncs = [chunk.no_sync for chunk in model]
            config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        return cls(model, optimizer, config)

    def train(self, steps: int, num_microbatches: int = 2) -> list[float]:
        """Train on the next samples; returns the steps' losses (empty off the last stage)."""
        return [loss for _ in range(steps) for loss in self._step(num_microbatches)]

    def _step(self, num_microbatches: int) -> list[float]:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        iterators = [self._microbatches(num_microbatches) for _ in self.model]
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.model if len(self.model) > 1 else self.model[0],
            num_microbatches=num_microbatches,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
            decoder_seq_length=SEQ_LENGTH,
            forward_only=False,
        )
        self.optimizer.step()
        self.iteration += 1
        losses = [float(result['lm loss'][0]) for result in results]
        step = [sum(losses)] if losses else []
        self.losses += step
        return step

    def _microbatches(self, number: int) -> Iterator[dict[str, torch.Tensor]]:
        samples = SyntheticTokens(1 << 30, SEQ_LENGTH, VOCAB_SIZE)
        rank = parallel_state.get_data_parallel_rank()
        world = parallel_state.get_data_parallel_world_size()
        for microbatch in range(number):
            first = ((self.iteration * number + microbatch) * world + rank) * MICRO_BATCH_SIZE
            batch = [samples[first + i] for i in range(MICRO_BATCH_SIZE)]
            yield {name: torch.stack([sample[name] for sample in batch]) for name in batch[0]}

    def state_dict(self, metadata: dict, is_loading: bool = False) -> dict[str, Any]:
        """Sharded state of model and optimizer, as ``megatron.training`` asks for it."""
        metadata = metadata | {
            'dp_cp_group': parallel_state.get_data_parallel_group(with_context_parallel=True)
        }
        state = {
            'model' if len(self.model) == 1 else f'model{index}': chunk.sharded_state_dict(
                metadata=metadata
            )
            for index, chunk in enumerate(unwrap_model(self.model))
        }
        state['optimizer'] = self.optimizer.sharded_state_dict(
            dict(state), is_loading=is_loading, metadata=metadata
        )
        return state | {'iteration': self.iteration}

    def save(self, path: str | Path, sharding_type: str = 'fully_reshardable') -> None:
        """``dist_checkpointing.save`` of everything into an empty or new directory."""
        metadata = {
            'distrib_optim_sharding_type': sharding_type,
            'singleton_local_shards': False,
            'chained_optim_avoid_prefix': True,
        }
        if sharding_type == 'fully_reshardable':
            metadata['distrib_optim_fully_reshardable_mem_efficient'] = False
        if torch.distributed.get_rank() == 0:
            Path(path).mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(self.state_dict(metadata), str(path), content_metadata=metadata)
        torch.distributed.barrier()

    def load(self, path: str | Path, prepare: Callable[[dict], dict] = lambda state: state) -> None:
        """``dist_checkpointing.load`` of everything; ``prepare`` may change the request first."""
        metadata = dist_checkpointing.load_content_metadata(str(path))
        request = prepare(self.state_dict(metadata, is_loading=True))
        state = dist_checkpointing.load(request, str(path))
        for index, chunk in enumerate(unwrap_model(self.model)):
            chunk.load_state_dict(state['model' if len(self.model) == 1 else f'model{index}'])
        self.optimizer.load_state_dict(state['optimizer'])
        self.iteration = state['iteration']
