"""Runs of :mod:`resume_runs` whose asynchronous saves are written as late as they can be.

A persistent worker gets host tensors in shared memory and writes them while training goes on. Here
nothing is in another process: files are written when the run ends, from what was staged.
"""

from unittest import mock

from tests.cpu_megatron.pretrain import prepare
from tests.unit_tests.optimizer import resume_runs


class LateWriter:
    """In place of core's asynchronous callers: stages as they do, and waits with the rest."""

    def schedule_async_call(self, request) -> None:
        """Stage the tensors, as has happened when the run goes on."""
        self.request = request
        self.arguments = list(request.async_fn_args)
        self.arguments[1] = request.preload_fn()

    def is_current_async_call_done(self, blocking: bool, no_dist: bool) -> bool:
        """Write, where the run waits for it."""
        if blocking:
            self.request.async_fn(*self.arguments, **self.request.async_fn_kwargs)
        return blocking


def main() -> None:
    """Do the tasks with that writer."""
    prepare(simulate_devices=True)
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    with (
        mock.patch.object(AsyncCallsQueue, '_get_async_caller', lambda self: LateWriter()),
        mock.patch.object(AsyncCallsQueue, 'warmup_persistent_caller'),
    ):
        resume_runs.main()


if __name__ == '__main__':
    main()
