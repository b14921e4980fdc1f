"""Checkpoints that megatron-core wrote, of every kind that the inspector tells apart."""

import argparse
import queue

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from tests.cpu_megatron import session

TRACKER = 'latest_checkpointed_iteration.txt'
EXPERTS = {
    'bf16': True,
    'num_moe_experts': 4,
    'moe_router_load_balancing_type': 'none',
    'moe_router_score_function': 'sigmoid',
    'moe_router_enable_expert_bias': True,
}


def write_runs(root):
    """Checkpoints by name, each of a run of one or two steps or of a model alone."""
    filesystem_async._results_queue = queue.Queue()  # instead of a manager process of 3 s
    with session.model_parallel():
        run = session.Training.start(
            session.gpt(bf16=True), session.distributed_optimizer(bf16=True)
        )
        run.train(1)
        run.save(root / 'gpt/iter_0000001')
        run.train(1)
        run.save(root / 'gpt/iter_0000002')
        run.save(root / 'buckets', 'dp_reshardable')
        save_plain(session.gpt(), root / 'plain')
        run = session.Training.start(
            session.gpt(**EXPERTS), session.distributed_optimizer(bf16=True)
        )
        run.train(1)
        run.save(root / 'moe run')
        for name, model in {
            'moe': session.gpt(**EXPERTS),
            'mixed': session.gpt(**EXPERTS, moe_layer_freq=[0, 1]),
            'hybrid': session.hybrid('M*-M*E', **EXPERTS),
        }.items():
            (root / name).mkdir()
            module = getattr(model[0], 'module', model[0])
            dist_checkpointing.save(
                {
                    'model': module.sharded_state_dict(),
                    'iteration': 7,
                    'args': argparse.Namespace(
                        tensor_model_parallel_size=2,
                        pipeline_model_parallel_size=4,
                        virtual_pipeline_model_parallel_size=None,
                        world_size=16,
                    ),
                },
                str(root / name),
            )
    (root / 'gpt' / TRACKER).write_text('2\n')
    return root


def save_plain(chunks, path):
    """With an optimizer that isn't distributed, as ``megatron.training`` saves it."""
    config = session.distributed_optimizer(use_distributed_optimizer=False)
    run = session.Training.start(chunks, config)
    run.train(1)
    path.mkdir()
    metadata = {'singleton_local_shards': False, 'chained_optim_avoid_prefix': True}
    dist_checkpointing.save(run.state_dict(metadata), str(path), content_metadata=metadata)
