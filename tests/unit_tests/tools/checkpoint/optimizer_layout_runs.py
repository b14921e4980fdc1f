"""Four ranks save models in both formats, with optimizer state of random numbers.

    torchrun --nproc-per-node 4 -m tests.unit_tests.tools.checkpoint.optimizer_layout_runs DIRECTORY

Nothing is trained: there are layouts whose forward pass needs a GPU.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.cpu_megatron.pretrain import prepare

BF16 = {'bf16': True}
MOE = {'num_moe_experts': 4, 'gated_linear_unit': True, **BF16}
WITHOUT_BIASES = {'normalization': 'RMSNorm', 'add_bias_linear': False, **BF16}
TP2_EP2 = {'tensor': 2, 'expert': 2}
# Parallel sizes, settings of the model, and what is in the names of frozen parameters.
CASES = {
    'EP 2, TP 2': (TP2_EP2, MOE, ()),
    'EP 2, TP 2, experts in whole': (
        {**TP2_EP2, 'expert_tensor': 1},
        {**MOE, 'expert_tensor_parallel_size': 1},
        (),
    ),
    'MTP with experts, EP 2, PP 2': (
        {'pipeline': 2, 'expert': 2},
        {**MOE, 'mtp_num_layers': 1, 'tied': False},
        (),
    ),
    'frozen router, EP 2, TP 2': (TP2_EP2, MOE, ('router',)),
    'frozen experts, EP 2, PP 2': ({'pipeline': 2, 'expert': 2}, MOE, ('experts',)),
    'frozen norms, TP 2, PP 2': ({'tensor': 2, 'pipeline': 2}, WITHOUT_BIASES, ('norm',)),
    'frozen embedding, PP 2, DP 2': ({'pipeline': 2}, {'tied': False, **BF16}, ('embedding',)),
    'frozen queries, DP 4': ({}, BF16, ('linear_qkv',)),
}


def main() -> None:
    """Save the cases."""
    prepare(simulate_devices=False)
    from tests.cpu_megatron.session import Training, distributed_optimizer, gpt, model_parallel

    for number, (name, (parallel, model, frozen)) in enumerate(CASES.items()):
        with model_parallel(**parallel):
            chunks = gpt(**model)
            for key, param in chunks[0].named_parameters():
                param.requires_grad = not any(part in key for part in frozen)
            run = Training.start(chunks, distributed_optimizer(**BF16))
            fill(run.optimizer, seed=100 * number + dist.get_rank())
            for kind in ('dp_reshardable', 'fully_reshardable'):
                run.save(Path(sys.argv[1]) / name / kind / 'iter_0000000', kind)


def fill(optimizer, seed: int) -> None:
    """Moments as if it had taken a step."""
    generator = torch.Generator().manual_seed(seed)
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for param in group['params']:
                moments = torch.randn(2, param.numel(), generator=generator)
                part.optimizer.state[param] = {
                    'step': torch.tensor(1.0),
                    'exp_avg': moments[0],
                    'exp_avg_sq': moments[1] ** 2,
                }


if __name__ == '__main__':
    main()
