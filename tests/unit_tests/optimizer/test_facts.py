"""Each fact of facts.py: as it should be with the overlay, wrong with ``MEGATRON_OVERLAY=0``."""

import functools
import json
import tempfile
from pathlib import Path

import pytest

from tests.cpu_megatron.torchrun import torchrun

ADAMS = ('torch_adam', 'fused_adam')
EVERYWHERE = {
    '1 step_is_not_reset',
    '2 leaked_step_on_one_rank',
    '5 masters_are_not_stale',
    '6 unstepped_optimizer',
    '7 plain_adam',
    '7 fp32_parameters',
    '7 offload_not_precision_aware',
    '7 fp32_parameters_of_hybrid_device_optimizer',
    '11 weights_only_load',
    '11 weights_loaded_behind_the_optimizer',
    '12 dummy_step_leaves_nothing',
    '13 several_buckets',
}
NAMES = {
    ('torch_adam', 1): EVERYWHERE | {'3 step_is_not_shared'},
    ('fused_adam', 1): EVERYWHERE | {'4 step_is_not_pinned', '4 step_is_saved_without_host_part'},
    **{(adam, 2): {'13 leaked_step_on_two_ranks', '13 empty_group_on_a_rank'} for adam in ADAMS},
}


@functools.cache
def _results(adam: str, nproc: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as directory:
        torchrun(
            nproc,
            'tests.unit_tests.optimizer.facts',
            *('--results', str(Path(directory) / 'results')),
            env={'CPU_MEGATRON_OPTIMIZER': adam},
            timeout=120,
        )
        return [
            json.loads((Path(directory) / f'results.{rank}').read_text()) for rank in range(nproc)
        ]


@pytest.mark.parametrize(
    ('adam', 'nproc', 'name'),
    [(*launch, name) for launch, names in NAMES.items() for name in sorted(names)],
)
def test_fact(adam, nproc, name):
    for result in _results(adam, nproc):
        holds, text, found = result[name]
        assert holds, f'{text}: {found}'


@pytest.mark.parametrize(('adam', 'nproc'), NAMES)
def test_no_fact_is_left_out(adam, nproc):
    assert _results(adam, nproc)[0].keys() == NAMES[adam, nproc]
