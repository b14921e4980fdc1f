"""Each fact of facts.py: as it should be with the overlay, wrong with ``MEGATRON_OVERLAY=0``."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.cpu_megatron import warm
from tests.cpu_megatron.torchrun import two_at_once

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
    '8 weights_only_load',
    '8 weights_loaded_behind_the_optimizer',
    '9 dummy_step_leaves_nothing',
    '9 gradients_are_left_alone',
    '10 several_buckets',
    '11 loaded_before_the_first_step',
    '11 saved_before_the_first_step',
    '14 default_dtype_takes_no_part',
    '12 mixed_group',
}
NAMES = {
    ('torch_adam', 1): EVERYWHERE | {'3 step_is_not_shared'},
    ('fused_adam', 1): EVERYWHERE
    | {
        '4 step_is_not_pinned',
        '4 step_is_saved_without_host_part',
        '6 unstepped_precision_aware_optimizer',
    },
    **{
        (adam, 2): {
            '2 leaked_step_on_two_ranks',
            '13 empty_group_on_a_rank',
            '13 rank_without_parameters',
        }
        for adam in ADAMS
    },
}


@pytest.fixture(scope='module')
def results(tmp_path_factory) -> dict[tuple[str, int], dict]:
    """The table of each launch."""
    files = {launch: tmp_path_factory.mktemp('facts') / 'results' for launch in NAMES}
    two_at_once(partial(_run, *launch, file) for launch, file in files.items())
    return {launch: json.loads(file.read_text()) for launch, file in files.items()}


def _run(adam: str, nproc: int, file: Path) -> None:
    warm.run(
        nproc,
        'tests.unit_tests.optimizer.facts',
        *('--results', str(file)),
        env={'CPU_MEGATRON_OPTIMIZER': adam},
    )


@pytest.mark.parametrize(
    ('adam', 'nproc', 'name'),
    [(*launch, name) for launch, names in NAMES.items() for name in sorted(names)],
)
def test_fact(results, adam, nproc, name):
    holds, text, found = results[adam, nproc][name]
    assert holds, f'{text}: {found}'


@pytest.mark.parametrize(('adam', 'nproc'), NAMES)
def test_no_fact_is_left_out(results, adam, nproc):
    assert results[adam, nproc].keys() == NAMES[adam, nproc]
