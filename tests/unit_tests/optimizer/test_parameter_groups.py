"""Groups of parameters of a run and of a checkpoint, matched by their settings."""

from types import SimpleNamespace
from unittest import mock

import pytest
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer.optimizer import groups_alike
from megatron.training.group_schedules import settled_groups

KEYS = ('wd_mult', 'lr_mult', 'max_lr')
OWN = [{'wd_mult': 0.0, 'lr_mult': 1.0, 'max_lr': 1e-3}, {'wd_mult': 1.0, 'lr_mult': 1.0}]


def test_groups_are_found_in_any_order_and_by_either_name():
    stored = [
        {'pre_wd_mult': 1.0, 'pre_lr_mult': 1.0, 'max_lr': None, 'step': 1},
        {'wd_mult': 0.0, 'lr_mult': 1.0, 'max_lr': 1e-3, 'step': 2},
    ]
    assert [group['step'] for group in groups_alike(OWN, stored, KEYS)] == [2, 1]


def test_a_group_that_is_not_stored_is_named_in_one_line():
    stored = [{'wd_mult': 0.0, 'lr_mult': 1.0, 'max_lr': 5e-4}, OWN[1]]
    with pytest.raises(CheckpointingException) as error:
        groups_alike(OWN, stored, KEYS)
    assert str(error.value) == (
        'The checkpoint has no group of parameters with wd_mult 0.0, lr_mult 1.0, max_lr 0.001; '
        'it has wd_mult 1.0, lr_mult 1.0; wd_mult 0.0, lr_mult 1.0, max_lr 0.0005. Give the run '
        'the same learning rate and weight decay settings (--lr, --min-lr, …), or say whose '
        "count: the run's (--override-opt-param-scheduler) or the checkpoint's "
        '(--use-checkpoint-opt-param-scheduler), or pass --no-load-optim.'
    )


@pytest.mark.parametrize(('option', 'rates'), [('override', [2e-3, 5e-3]), ('use_checkpoint', [1])])
def test_groups_end_with_the_rates_that_the_option_says(option, rates):
    """Upstream's 0.20 gives every group one rate after the load, which is not each group's own."""
    groups = [{'max_lr': 2e-3, 'lr': 0.0}, {'max_lr': 5e-3, 'lr': 0.0}]
    optimizer, scheduler = SimpleNamespace(param_groups=groups), mock.Mock()
    args = SimpleNamespace(finetune=False, no_load_optim=False)
    setattr(args, f'{option}_opt_param_scheduler', True)
    with settled_groups(optimizer, scheduler, args):
        optimizer.param_groups = [{'max_lr': 1} for _ in groups]
        assert not scheduler.step.called
    assert sorted({group['max_lr'] for group in optimizer.param_groups}) == rates
    scheduler.step.assert_called_once_with(increment=0)
