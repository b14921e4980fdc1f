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


@fact(13, 'also where ranks have lists of other lengths')
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
