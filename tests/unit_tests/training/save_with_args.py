"""A run whose checkpoints carry arguments that it doesn't have.

    python -m tests.unit_tests.training.save_with_args CHANGES [pretrain arguments]

CHANGES is JSON: argument -> value at the time of saving.
"""

import json
import sys
from unittest import mock

from tests import cpu_megatron


def main() -> None:
    """See above."""
    changes, *arguments = sys.argv[1:]
    cpu_megatron.install()
    cpu_megatron.activate_overlay()
    from megatron.training import checkpointing, get_args, training

    from tests.cpu_megatron import pretrain

    def save(*args, **kwargs):
        with mock.patch.multiple(get_args(), create=True, **json.loads(changes)):
            checkpointing.save_checkpoint(*args, **kwargs)

    training.save_checkpoint = save
    pretrain.main(arguments)


if __name__ == '__main__':
    main()
