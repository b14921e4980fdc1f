"""One run that tries to load one checkpoint after the other, and records what it is told.

    python -m tests.unit_tests.training.refusals OUT CASES [pretrain arguments]

CASES is JSON: name -> arguments to set for that attempt (``load`` among them). OUT gets JSON: name
-> the error's type and message, and whether the attempt left every weight as it was.
"""

import json
import sys
from pathlib import Path

import torch

from tests import cpu_megatron


def main() -> None:
    """See above."""
    out, cases, *arguments = sys.argv[1:]
    cpu_megatron.install()
    cpu_megatron.activate_overlay()
    from megatron.training import checkpointing, get_args, training

    from tests.cpu_megatron import pretrain
    from tests.cpu_megatron.recorder import model_state

    def try_all(model, optimizer, scheduler, **kwargs):
        args, outcomes = get_args(), {}
        before = model_state(model)
        for name, settings in json.loads(cases).items():
            original = {key: getattr(args, key) for key in settings}
            for key, value in settings.items():
                setattr(args, key, value)
            try:
                checkpointing.load_checkpoint(model, optimizer, scheduler, **kwargs)
                error = None
            except Exception as raised:
                error = f'{type(raised).__name__}: {raised}'
            after = model_state(model)
            untouched = all(torch.equal(before[key], after[key]) for key in before)
            outcomes[name] = {'error': error, 'untouched': untouched}
            for key, value in original.items():
                setattr(args, key, value)
        if torch.distributed.get_rank() == 0:
            Path(out).write_text(json.dumps(outcomes))
        sys.exit(0)

    training.load_checkpoint = try_all
    pretrain.main([*arguments, '--load=unused'])


if __name__ == '__main__':
    main()
