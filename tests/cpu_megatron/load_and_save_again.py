"""A hybrid run that saves its state around ``load_checkpoint``, then goes on training.

    python -m tests.cpu_megatron.load_and_save_again RECORD [pretrain arguments]

``RECORD/fresh`` gets the initialised model, ``RECORD/loaded`` what ``load_checkpoint`` made of
model and optimizer, both by megatron's own ``save_checkpoint``: a test compares whole tensors.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch


@contextmanager
def recording_loads(record: str | Path) -> Iterator[None]:
    """Save around every ``load_checkpoint`` of training inside the block."""
    from megatron.training import checkpointing, get_args, training

    def recording_load(model, optimizer, scheduler, *args, **kwargs):
        save('fresh', model, None, None)
        loaded = checkpointing.load_checkpoint(model, optimizer, scheduler, *args, **kwargs)
        has_moments = not get_args().no_load_optim
        save('loaded', model, optimizer if has_moments else None, scheduler)
        return loaded

    def save(name, model, optimizer, scheduler):
        into = {'save': f'{record}/{name}', 'ckpt_format': 'torch_dist'}
        with mock.patch.multiple(get_args(), **into):
            checkpointing.save_checkpoint(1, model, optimizer, scheduler, 0)

    with mock.patch.object(training, 'load_checkpoint', recording_load):
        yield


def main() -> None:
    """The first argument is RECORD, the rest is what ``tests.cpu_megatron.pretrain`` takes."""
    from tests import cpu_megatron

    record, *arguments = sys.argv[1:]
    # Memory that nobody initialised then holds NaN instead of what happens to be there.
    torch.use_deterministic_algorithms(True, warn_only=True)
    cpu_megatron.install()
    cpu_megatron.activate_overlay()
    from tests.cpu_megatron import pretrain

    with recording_loads(record):
        pretrain.main(arguments)


if __name__ == '__main__':
    main()
