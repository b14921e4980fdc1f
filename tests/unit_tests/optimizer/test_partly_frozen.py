"""Optimizer state of a part of a stack: refused by name in one format, right in the other."""

import json

import pytest

from tests.cpu_megatron import warm

FULLY, IN_BUCKETS = 'fully_reshardable', 'dp_reshardable'
FC1, FC2 = 'decoder.layers.mlp.linear_fc1.weight', 'decoder.layers.mlp.linear_fc2.bias'
EXPERTS = 'decoder.layers.mlp.experts.experts.linear_fc2.weight'
FOUR = 'layer {0} expert 0, layer {0} expert 1, layer {0} expert 2, layer {0} expert 3'
# The key, the parts with state, those without.
REFUSED = {
    'one bias': (FC2, 'layer 1', 'layer 0'),
    'one bias, DP': (FC2, 'layer 1', 'layer 0'),
    'one weight, TP': (FC1, 'layer 0', 'layer 1'),
    'gated': (FC1, 'layer 0', 'layer 1'),
    'whole stage': (FC2, 'layer 0, layer 1', 'layer 2, layer 3'),
    'router': ('decoder.layers.mlp.router.weight', 'layer 1', 'layer 0'),
    'experts of a layer': (EXPERTS, FOUR.format(1), FOUR.format(0)),
    'one local expert': (
        EXPERTS,
        'layer 0 expert 1, layer 0 expert 3, layer 1 expert 1, layer 1 expert 3',
        'layer 0 expert 0, layer 0 expert 2, layer 1 expert 0, layer 1 expert 2',
    ),
}


@pytest.fixture(scope='module')
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """For each case what it ended with, by rank."""
    work, found = tmp_path_factory.mktemp('frozen'), {}
    for ranks in (1, 2):
        results = work / f'{ranks}'
        warm.run(ranks, 'tests.unit_tests.optimizer.partly_frozen', str(results))
        by_rank = [json.loads((work / f'{ranks}.{rank}').read_text()) for rank in range(ranks)]
        found |= {case: [results[case] for results in by_rank] for case in by_rank[0]}
    return found


@pytest.mark.parametrize('case', REFUSED)
def test_state_of_a_part_is_refused_on_every_rank_before_anything_is_written(found, case):
    key, has, has_none = REFUSED[case]
    reason = (
        f'CheckpointingException: optimizer.state.param.{key}: the optimizer has state for {has}, '
        f'and none for {has_none} (frozen?); expected it for all or none of what {key} is stacked '
        f'of. '
    )
    for rank in found[f'{case} {FULLY}']:
        assert rank['save'] == (
            f'{reason}Save with --use-distributed-optimizer and without '
            f'--dist-ckpt-optim-fully-reshardable (dp_reshardable), or freeze all or none.'
        )
        assert rank['left'] == []
        assert rank['load'] == (
            f'{reason}Pass --no-load-optim to start the optimizer fresh, or freeze all or none.'
        )


@pytest.mark.parametrize('case', [*REFUSED, 'whole stack'])
def test_the_other_format_takes_it(found, case):
    for rank in found[f'{case} {IN_BUCKETS}']:
        assert rank['save'] == rank['load'] == ''


def test_state_of_a_whole_stack_goes_both_ways(found):
    (rank,) = found[f'whole stack {FULLY}']
    assert rank['save'] == rank['load'] == ''
