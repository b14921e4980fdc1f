"""One process of load.py: ``load_checkpoint`` of a real run, timed, then the end.

    python -m benchmarks.timed_load LOADS [arguments of tests.cpu_megatron.pretrain]

Prints a JSON line per load: seconds, seconds of processor time, MiB that the process held at most
during the load, and MiB that it holds after it.
"""

import gc
import json
import sys
import time
from pathlib import Path

from tests import cpu_megatron


def main() -> None:
    """The first argument is the number of loads, the rest is what ``pretrain`` takes."""
    loads, *arguments = sys.argv[1:]
    cpu_megatron.install()
    cpu_megatron.activate_overlay()
    from megatron.training import checkpointing, get_args, training

    from tests.cpu_megatron import pretrain

    def timed_load(*load_arguments, **options):
        args = get_args()
        gc.freeze()  # a load collects garbage; going through all that is imported isn't its own
        for _ in range(int(loads)):
            # load_checkpoint wants to be the first one in its process.
            args.consumed_train_samples = args.consumed_valid_samples = 0
            gc.collect()
            reset_peak()
            start, processor_start = time.perf_counter(), time.process_time()
            checkpointing.load_checkpoint(*load_arguments, **options)
            seconds = time.perf_counter() - start
            processor = time.process_time() - processor_start
            memory_used = {'peak': memory('VmHWM'), 'held': memory('VmRSS')}
            measured = {'s': seconds, 'processor': processor, **memory_used}
            print('LOAD', json.dumps(measured))
        sys.exit()

    training.load_checkpoint = timed_load
    pretrain.main(arguments)


def reset_peak() -> None:
    """Let VmHWM start again from what the process holds now."""
    Path('/proc/self/clear_refs').write_text('5')


def memory(field: str) -> float:
    """MiB in a field of /proc/self/status."""
    for line in Path('/proc/self/status').read_text().splitlines():
        if line.startswith(f'{field}:'):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


if __name__ == '__main__':
    main()
