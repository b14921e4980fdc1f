"""A hybrid run that saves its state around ``load_checkpoint``, then goes on training.

    python -m tests.unit_tests.dist_checkpointing.load_and_save_again RECORD [pretrain arguments]

``RECORD/fresh`` gets the initialised model, ``RECORD/loaded`` what ``load_checkpoint`` made of
model and optimizer, both by megatron's own ``save_checkpoint``: a test compares whole tensors.
"""

import sys

from tests import cpu_megatron


def main() -> None:
    """The first argument is RECORD, the rest is what ``tests.cpu_megatron.pretrain`` takes."""
    record, *arguments = sys.argv[1:]
    cpu_megatron.install()
    cpu_megatron.activate_overlay()
    from megatron.training import checkpointing, get_args, training

    from tests.cpu_megatron import pretrain

    def recording_load(model, optimizer, scheduler, *args, **kwargs):
        save(f'{record}/fresh', model, None, None)
        loaded = checkpointing.load_checkpoint(model, optimizer, scheduler, *args, **kwargs)
        has_moments = not get_args().no_load_optim
        save(f'{record}/loaded', model, optimizer if has_moments else None, scheduler)
        return loaded

    def save(path, model, optimizer, scheduler):
        megatron_args = get_args()
        before = megatron_args.save, megatron_args.ckpt_format
        megatron_args.save, megatron_args.ckpt_format = path, 'torch_dist'
        checkpointing.save_checkpoint(1, model, optimizer, scheduler, 0)
        megatron_args.save, megatron_args.ckpt_format = before

    training.load_checkpoint = recording_load
    pretrain.main(arguments)


if __name__ == '__main__':
    main()
