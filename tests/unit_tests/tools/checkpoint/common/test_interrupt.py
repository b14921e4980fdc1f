"""Ctrl-C while a command imports what it needs, which takes most of the time of a look."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.unit_tests.tools.checkpoint.documented_commands import REPOSITORY
from tools.checkpoint.common.interrupt import ends_on_interrupt

# A module that takes the exception for something else, as torch does here and there.
MODULE = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except BaseException:
    raise RecursionError('made of an interrupt')
"""
COMMANDS = [
    'inspect_checkpoint .',
    'gpt_into_hybrid . *-',
    'resume_report .',
    'weighted_merge --merge-inputs .:1 --merge-output out',
    'convert_ckpt_optimizer --load-dir . --save-dir out',
    'convert_ckpt_pp_vpp merge --load-dir . --save-dir out --pipeline-size 2',
]


@pytest.mark.usefixtures('default_signal_handlers')
@pytest.mark.parametrize('module', ['torch', 'pathlib'])  # the largest, and one of the first
@pytest.mark.parametrize('command', COMMANDS)
def test_an_interrupted_import_is_one_line(command, module, tmp_path):
    (tmp_path / module).mkdir()
    (tmp_path / module / '__init__.py').write_text(MODULE)
    tool, *words = command.split()
    as_console = f'from tools.checkpoint.console import {tool}; {tool}()'
    for program in [REPOSITORY / 'tools/checkpoint' / f'{tool}.py'], ['-c', as_console]:
        run = subprocess.run(
            [sys.executable, *program, *words],
            cwd=tmp_path,
            env=os.environ | {'PYTHONPATH': f'{tmp_path}:{REPOSITORY}'},
            text=True,
            capture_output=True,
        )
        assert (run.returncode, run.stderr, run.stdout) == (130, 'error: stopped by SIGINT\n', '')


@pytest.mark.usefixtures('default_signal_handlers')
def test_a_program_that_calls_a_command_keeps_its_handlers():
    found = []

    @ends_on_interrupt
    def main(argv=None):
        found.append(signal.getsignal(signal.SIGINT))
        return 3

    assert main() == 3 and found.pop() is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    in_a_thread = threading.Thread(target=main)
    in_a_thread.start()
    in_a_thread.join()
    assert found.pop() is signal.default_int_handler
    for own in signal.SIG_IGN, lambda *_: None:
        signal.signal(signal.SIGINT, own)
        assert main() == 3 and found.pop() is own is signal.getsignal(signal.SIGINT)


@pytest.mark.usefixtures('default_signal_handlers')
def test_a_program_goes_on(capsys):
    """It is told of the interrupt by the status, and its process does not end."""

    @ends_on_interrupt
    def main(argv=None):
        os.kill(os.getpid(), signal.SIGINT)
        return 0

    assert main(['.']) == main(argv=['.']) == 130
    assert capsys.readouterr().err == 'error: stopped by SIGINT\n' * 2
