"""State that stock stored under names of others: right in its layout, refused in another."""

import pytest
import torch

from tests.cpu_megatron import warm

FORMATS = ('fully_reshardable', 'dp_reshardable')
RUNS = 'tests.unit_tests.optimizer.mixed_groups'


@pytest.fixture(scope='module', params=['torch_adam', 'fused_adam'])
def work(request, tmp_path_factory):
    work, adam = tmp_path_factory.mktemp('mixed'), {'CPU_MEGATRON_OPTIMIZER': request.param}
    warm.run(1, RUNS, 'save', str(work), env={'MEGATRON_OVERLAY': '0', **adam})
    for ranks in (1, 2):
        warm.run(ranks, RUNS, 'load', str(work), env=adam)
    return work


@pytest.mark.parametrize('kind', FORMATS)
def test_it_goes_where_it_belongs(work, kind):
    losses, weights = torch.load(work / 'stock')
    found_losses, found = torch.load(work / 'loaded by 0 of 1')[kind]
    assert found_losses == losses
    assert weights.keys() == found.keys()
    assert all(torch.equal(weights[key], found[key]) for key in weights)


@pytest.mark.parametrize('kind', FORMATS)
def test_with_another_data_parallel_size_every_rank_refuses_it(work, kind):
    for rank in (0, 1):
        error, _ = torch.load(work / f'loaded by {rank} of 2')[kind]
        assert error.startswith('CheckpointingException: The main parameters of the checkpoint are')
        assert '--no-load-optim' in error and '\n' not in error
