"""Arguments are what they should be: a URL is never taken for a path, in no option of any tool."""

import argparse
from pathlib import Path

import pytest

from tools.checkpoint import convert_ckpt_pp_vpp, gpt_into_hybrid, inspect_checkpoint, resume_report
from tools.checkpoint.common.arguments import natural, positive, why_not_local
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.merge import cli
from tools.checkpoint.weighted_merge import merge_same_layout_dcp_metadata_checkpoints as merge

URL = 'msc://profile/run'
PARSERS = {
    'merge': cli.make_parser,
    'converter': convert_ckpt_pp_vpp.parser,
    'inspector': inspect_checkpoint.make_parser,
    'dry run': gpt_into_hybrid.make_parser,
    'resume report': resume_report.make_parser,
}
NO_PATHS = {'pattern', '--keep-fp32'}  # the arguments with text of any kind that names no file


def arguments(parser):
    """Every argument that takes a value, of subcommands too, with its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from arguments(command)
        elif action.nargs != 0 and not action.choices:
            yield parser, action


@pytest.mark.parametrize('tool', PARSERS)
def test_every_argument_that_takes_a_path_refuses_urls(tool, capsys):
    refused = 0
    for parser, action in arguments(PARSERS[tool]()):
        value = [URL] * (action.nargs if isinstance(action.nargs, int) else 1)
        try:
            parser._get_values(action, value)
        except argparse.ArgumentError as error:
            number = 'expected' in str(error) or 'invalid int value' in str(error)
            refused += f'{URL}: a URL (msc://), expected a path' in str(error)
            assert number, error
        else:
            assert (action.option_strings or [action.dest])[0] in NO_PATHS
    assert refused >= {'merge': 5, 'converter': 11, 'inspector': 2}.get(tool, 1)


@pytest.mark.parametrize('url', [URL, 's3://b/k', 'file:///ckpt', 'HF://x', f'{URL}/a:0.5'])
def test_urls(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert 'a URL' in why_not_local(url) and 'a URL' in why_not_local(Path(url))


def test_paths_that_look_like_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert why_not_local('./msc://x') is None
    for path in ('/a/msc://x', 'a:b', 'runs/a:0.5', '://x', 'iter_0000001:1', 'msc:'):
        assert why_not_local(path) is None and why_not_local(Path(path)) is None
    assert why_not_local('msc:/x') is None  # nobody writes a URL with one slash
    (tmp_path / 'msc:').mkdir()
    assert why_not_local(Path('msc:/x')) is None
    assert why_not_local('msc://x') is not None


def test_from_python_too(five, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = five[1][0]
    for inputs, options in (
        ([URL], {}),
        ([first], {'common_state_checkpoint': URL}),
        ([first], {'output_dir': URL}),
        ([first], {'output_dir': Path(URL)}),
    ):
        with pytest.raises(CheckpointError, match=r'a URL \(msc://\)'):
            merge(inputs, [1.0], **{'output_dir': tmp_path / 'out'} | options)
    for check in (
        inspect_checkpoint.inspect_checkpoint,
        lambda url: inspect_checkpoint.compare_checkpoints(url, first),
    ):
        with pytest.raises(CheckpointError, match=r'a URL \(msc://\)'):
            check(URL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('text', ['', '-1', '+1', ' 1', '1.0', '1e3', '0x1', '1_0', '٣', '1' * 19])
def test_what_is_no_natural_number(text):
    with pytest.raises(argparse.ArgumentTypeError):
        natural(text)


def test_natural_numbers():
    assert [natural('0'), natural('007'), natural('9' * 18)] == [0, 7, 10**18 - 1]
    with pytest.raises(argparse.ArgumentTypeError, match='positive'):
        positive('00')
    with pytest.raises(argparse.ArgumentTypeError, match='111111111…: expected no more than 18'):
        natural('1' * 100_000)
