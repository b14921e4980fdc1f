"""Train a tiny GPT or hybrid model on the CPU with ``megatron.training``'s own loop.

    python -m tests.cpu_megatron.pretrain {gpt,hybrid} [--cpu-log FILE] [--cpu-dump FILE]
        [--cpu-optimizer {torch_adam,fused_adam}] [megatron arguments]

Options of a tiny run are added where they aren't given (arguments.py). ``--cpu-log`` gets one JSON
line an iteration from the last pipeline stage, ``--cpu-dump`` a file a rank (recorder.py).
"""

import argparse
import os
import sys
from functools import partial
from typing import TYPE_CHECKING
from unittest import mock

import torch

import tests.cpu_megatron as cpu_megatron
from tests.cpu_megatron import simulated_devices
from tests.cpu_megatron.arguments import with_defaults

if TYPE_CHECKING:
    from tests.cpu_megatron.recorder import Record


def _options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog='tests.cpu_megatron.pretrain', allow_abbrev=False)
    parser.add_argument('kind', choices=['gpt', 'hybrid'])
    parser.add_argument('--cpu-log', default=os.environ.get('CPU_MEGATRON_LOG'))
    parser.add_argument('--cpu-dump', default=os.environ.get('CPU_MEGATRON_DUMP'))
    parser.add_argument('--cpu-optimizer', choices=['torch_adam', 'fused_adam'])
    return parser.parse_known_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run one training; the arguments are those after the module's name."""
    options, given = _options(sys.argv[1:] if argv is None else argv)
    if options.cpu_optimizer:
        os.environ['CPU_MEGATRON_OPTIMIZER'] = options.cpu_optimizer
    prepare(simulate_devices='--optimizer-cpu-offload' in given)
    record = run(options.kind, given, options.cpu_log)
    if options.cpu_dump:
        state = {'model': record.model, 'optimizer': record.optimizer}
        torch.save(state, f'{options.cpu_dump}.{torch.distributed.get_rank()}')


def prepare(simulate_devices: bool) -> None:
    """Install the CPU package and the overlay; once a process, before megatron is imported.

    On a GPU there is nothing to simulate.
    """
    cpu_megatron.install()
    cpu_megatron.activate_overlay()
    if simulate_devices and not cpu_megatron.on_gpu():
        simulated_devices.install()


def run(kind: str, given: list[str], log: str | None = None) -> 'Record':
    """Train once, with everything of megatron's that is global set up and taken down again.

    Args:
        kind: 'gpt' or 'hybrid'.
        given: megatron arguments.
        log: see :func:`tests.cpu_megatron.recorder.recording`.

    Returns:
        what this rank computed.
    """
    from megatron.core.enums import ModelType
    from megatron.training import training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from tests.cpu_megatron.models import model_from_args
    from tests.cpu_megatron.recorder import recording
    from tests.cpu_megatron.synthetic_data import datasets_from_args, forward_step

    with mock.patch.object(sys, 'argv', [sys.argv[0], *with_defaults(kind, given)]):
        args = parse_and_validate_args()
    try:
        with recording(training, log) as record:
            training.pretrain(
                pretrain_cfg_container_from_args(args),
                datasets_from_args,
                model_provider=partial(model_from_args, kind),
                model_type=ModelType.encoder_or_decoder,
                forward_step_func=forward_step,
            )
    finally:
        _take_down()
    return record


def _take_down() -> None:
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training.global_vars import destroy_global_vars

    parallel_state.destroy_model_parallel()
    unset_num_microbatches_calculator()
    destroy_rerun_state_machine()
    destroy_global_vars()


if __name__ == '__main__':
    main()
