"""The commands of an installed package, by the names of their files.

Ctrl-C ends them in one line from their first import on.
"""

import importlib
from functools import partial

from .common.interrupt import end_on_interrupt


def _run(tool: str) -> int:
    end_on_interrupt()
    return importlib.import_module(f'.{tool}', __package__).main()


convert_ckpt_optimizer = partial(_run, 'convert_ckpt_optimizer')
convert_ckpt_pp_vpp = partial(_run, 'convert_ckpt_pp_vpp')
gpt_into_hybrid = partial(_run, 'gpt_into_hybrid')
inspect_checkpoint = partial(_run, 'inspect_checkpoint')
resume_report = partial(_run, 'resume_report')
weighted_merge = partial(_run, 'weighted_merge')
