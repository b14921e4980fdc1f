"""The command line of a tool, as it runs from where this package lies."""

import os
import shlex
import shutil
import sys

import megatron_overlay

_HERE = os.path.dirname(os.path.abspath(__file__))
_CONSOLE = {
    'convert_ckpt_optimizer': 'megatron-convert-optimizer',
    'convert_ckpt_pp_vpp': 'megatron-convert-pp-vpp',
    'gpt_into_hybrid': 'megatron-gpt-into-hybrid',
    'inspect_checkpoint': 'megatron-inspect-checkpoint',
    'resume_report': 'megatron-resume-report',
    'weighted_merge': 'megatron-weighted-merge',
}


def command_of(tool: str) -> str:
    """What to type for ``tools/checkpoint/TOOL.py``, in the environment and directory there is.

    The console command where the package is installed and the shell finds it; else this Python with
    the module, or with the file of a checkout.
    """
    installed = os.path.isdir(os.path.join(_HERE, 'tools'))
    if installed and shutil.which(_CONSOLE[tool]):
        return _CONSOLE[tool]
    python = shutil.which('python')
    same = python is not None and os.path.abspath(python) == os.path.abspath(sys.executable)
    if installed:
        what = ['-m', f'megatron_overlay.tools.checkpoint.{tool}']
    else:
        script = os.path.join(megatron_overlay.finder.tree, 'tools', 'checkpoint', f'{tool}.py')
        below = os.path.relpath(script)
        what = [script if below.startswith(os.pardir) else below]
    return shlex.join(['python' if same else sys.executable, *what])
