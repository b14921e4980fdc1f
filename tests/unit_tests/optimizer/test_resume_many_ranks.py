"""Optimizer state on four data-parallel ranks, then two, then eight."""

import pytest
import torch

from tests.unit_tests.optimizer.resume_runs import launch, read_records, whole_tensors

COMMON = [
    *('--bf16', '--use-distributed-optimizer', '--global-batch-size', '16'),
    *('--overlap-grad-reduce', '--ddp-bucket-size', '3000'),  # several buckets
    *('--lr-decay-iters', '9', '--override-opt-param-scheduler'),
]
FORMATS = {
    'dp_reshardable': [],
    'fully_reshardable': ['--dist-ckpt-optim-fully-reshardable'],
}
RANKS = (4, 2, 8)  # each goes on for three iterations from where the one before stopped


@pytest.fixture(scope='module')
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp('ranks')
    for place, ranks in enumerate(RANKS):
        tasks = []
        for sharding_type, options in FORMATS.items():
            directory = work / sharding_type
            save = ['--save', f'{directory}_{ranks}', '--save-interval', '3']
            load = ['--load', f'{directory}_{RANKS[place - 1]}'] if place else []
            until = ['--train-iters', str(3 * (place + 1))]
            tasks.append(
                {
                    'name': sharding_type,
                    'kind': 'gpt',
                    'arguments': [*COMMON, *options, *save, *load, *until],
                    'iteration': 3 * place,
                    'result': f'{directory}_{ranks}.record',
                }
            )
        launch(ranks, tasks, work / f'{ranks}.json', CPU_MEGATRON_OPTIMIZER='fused_adam')
    return work


@pytest.mark.parametrize('sharding_type', FORMATS)
def test_each_begins_with_what_the_one_before_ended_with(work, sharding_type):
    of_each = [read_records(work / f'{sharding_type}_{ranks}.record') for ranks in RANKS]
    assert [len(records) for records in of_each] == list(RANKS)
    for place, (before, after) in enumerate(zip(of_each, of_each[1:], strict=False), 1):
        iterations = [step['iteration'] for step in after[0]['steps']]
        assert iterations == [3 * place + 1, 3 * place + 2, 3 * place + 3]
        saved, loaded = whole_tensors(before, 'trained'), whole_tensors(after)
        assert saved.keys() == loaded.keys()
        assert not [key for key, value in saved.items() if not torch.equal(value, loaded[key])]
    fresh, trained = whole_tensors(of_each[0]), whole_tensors(of_each[0], 'trained')
    assert not any(torch.equal(value, trained[key]) for key, value in fresh.items())
