"""Weighted merge: usage, help, and a standard output that takes nothing."""

import sys

import pytest

from tests.unit_tests.tools.checkpoint.merge_words import cli
from tools.checkpoint.weighted_merge import main


def test_output_that_can_not_be_shown(five, tmp_path, capsys, monkeypatch):
    """One line; a plan that nobody saw is a failure, an output that is published is none."""
    out = tmp_path / 'out'
    line = "error: standard output can't be written: No space left on device\n"
    for dry, code in ((['--dry-run'], 1), ([], 0)):
        with open('/dev/full', 'w') as full:
            monkeypatch.setattr(sys, 'stdout', full)
            assert cli(f'--merge-inputs {five[1][0]}:1 --merge-output {out}', *dry) == code
        assert capsys.readouterr().err == line
    assert out.exists()


USUAL = '--merge-inputs a:1 --merge-output o'


@pytest.mark.parametrize(
    'words',
    [
        '--unknown',
        '--merge-inputs a:1',
        '--merge-output o',
        f'{USUAL} --merge-style sqrt',
        f'{USUAL} --coefficients w.json',
        f'{USUAL} --ckpt-format fsdp_dtensor',
        f'{USUAL} --min-checkpoints 0',
        f'{USUAL} --min-checkpoints -1',
        f'{USUAL} --min-iteration-interval -5',
        f'{USUAL} --extra-state-source-index -1',
        f'{USUAL} --output-iteration -7',
        f'{USUAL} --output-iteration 9223372036854775808',
        f'{USUAL} --start-checkpoint -5',
        f'{USUAL} --end-checkpoint -5',
        f'{USUAL} --start-checkpoint x',
        '--merge-inputs a b --merge-output o --start-checkpoint 1 --end-checkpoint 2',
    ],
)
def test_wrong_usage_exits_with_2(words):
    with pytest.raises(SystemExit) as caught:
        cli(words)
    assert caught.value.code == 2


def test_no_arguments_are_wrong_usage_and_help_is_complete(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    with pytest.raises(SystemExit):
        main(['--help'])
    text = ' '.join(capsys.readouterr().out.split())
    for part in ('OLDEST', '--coefficient-seed', '--keep-fp32', '--trust-checkpoints', 'torchrun'):
        assert part in text
