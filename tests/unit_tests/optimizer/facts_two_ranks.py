"""Facts that differ between ranks, on two of them."""

import torch

from tests.cpu_megatron.session import model_parallel
from tests.unit_tests.optimizer.fact_runs import (
    FORMATS,
    fact,
    offload,
    resumed,
    resumed_with_leaked_step,
    start,
)


@fact(2, 'also where ranks have lists of other lengths')
def leaked_step_on_two_ranks(path):
    resumed_with_leaked_step(path)


@fact(13, 'a parameter group that is empty on one of the ranks')
def empty_group_on_a_rank(path):
    # embedding and output layer, at the ends of the buffer, get a group of their own
    for index, options in enumerate(({}, offload(0.5), offload(1.0))):
        options = {'decoupled_lr': 1e-3, **options}
        with model_parallel():
            groups = start(**options).optimizer.param_groups
        empty = torch.tensor([any(not group['params'] for group in groups)], dtype=torch.int)
        torch.distributed.all_reduce(empty)
        assert empty == 1, f'{empty.item()} ranks have an empty group: one should'
        for sharding_type in FORMATS:
            resumed(path / f'{sharding_type}{index}', sharding_type, **options)


def all_frozen_but(*trained: str):
    """What leaves only parameters with the given names to train."""

    def freeze(model: torch.nn.Module) -> None:
        for name, param in model.named_parameters():
            param.requires_grad = name.endswith(trained)

    return freeze


@fact(13, 'a rank that has no parameter with state, in one of the buckets or in all')
def rank_without_parameters(path):
    small, large = 'final_layernorm.weight', 'linear_proj.weight'
    fully, in_buckets = FORMATS
    for index, (sharding_type, trained, options) in enumerate(
        (
            (in_buckets, (small,), {}),
            (in_buckets, (small,), {'before': 0, **offload(0.5)}),
            (in_buckets, (small, large), {'bucket_size': 1}),
            (fully, (small,), {}),
            (fully, (small, large), {'bucket_size': 1, **offload(1.0)}),
        )
    ):
        options = {'prepare_model': all_frozen_but(*trained), **options}
        whole, _ = resumed(path / str(index), sharding_type, **options)
        own = len(whole.optimizer.get_parameters())
        both = torch.tensor([own, -own])
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MIN)
        fewest, most = both[0].item(), -both[1].item()
        assert fewest == 0 or len(trained) > 1, f'every rank has {fewest} parameters or more'
        assert fewest < most, f'all ranks have {most} parameters'
