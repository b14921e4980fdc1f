"""Values that walks over them never, or hardly ever, come to the end of."""

from argparse import Namespace

import pytest
import torch

from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.common.nesting import Endless, refuse_endless
from tools.checkpoint.common.safe_load import load_torch


def loop():
    value = {'a': [Namespace()]}
    value['a'][0].b = value
    return value


def chain(length, links):
    value = [1]
    for _ in range(length):
        value = [value] * links
    return value


@pytest.mark.parametrize(
    ('value', 'reason'),
    [
        (loop(), 'contains itself'),
        (chain(60, 2), 'shared values'),
        (chain(10_000, 1), 'levels deep'),
        ([[0] * 100_000] * 1000, 'shared values'),
    ],
)
def test_endless_values(value, reason, tmp_path):
    with pytest.raises(Endless, match=reason):
        refuse_endless(value)
    if reason != 'levels deep':  # which Python can't save
        torch.save(value, tmp_path / 'file')
        with pytest.raises(CheckpointError, match=f'file: .*{reason}.*damaged'):
            load_torch(tmp_path / 'file')


def test_shared_parts_are_no_loop():
    part = [1, {'b': ()}]
    refuse_endless({'a': part, 'c': [part, part], 'd': Namespace(e=part, f=(part, part))})
    refuse_endless(chain(15, 2))
    refuse_endless(chain(150, 1))
    refuse_endless(3)
