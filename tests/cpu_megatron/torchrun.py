"""Start a module in processes of its own, as ``torchrun`` does."""

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TAIL = 6000
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def free_port() -> int:
    """A TCP port nobody listens on right now.

    Below the ports that the system deals out by itself, so that no connection takes it meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(('127.0.0.1', port))
            return port


def environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """The variables of a run: this process's and, on top, those given."""
    # megatron keeps its choice of attention in NVTE_ variables, which a run would inherit.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith('NVTE_')}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get('PYTHONPATH')]))
    return {**inherited, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': path, **(env or {})}


def of_rank(rank: int, nproc: int, port: int) -> dict[str, str]:
    """The variables that make a process one rank of a run on this machine."""
    return {
        'RANK': str(rank),
        'LOCAL_RANK': str(rank),
        'WORLD_SIZE': str(nproc),
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(port),
    }


def torchrun(
    nproc: int,
    target: str,
    *args: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 1200,
) -> subprocess.CompletedProcess:
    """Run ``python -m target args`` in ``nproc`` processes over gloo; one process runs directly.

    Args:
        nproc: number of ranks.
        target: dotted module name; the repository is on the path.
        args: its arguments.
        env: variables set on top of this process's.
        timeout: seconds, after which every process of the run is killed.

    Returns:
        the completed process, with stdout and stderr together as text in ``stdout``.

    Raises:
        AssertionError: the run failed or took too long; the message ends with its output's tail.
    """
    variables = environment(env)
    if nproc == 1:
        command = [sys.executable, '-m', target, *args]
        variables |= of_rank(0, 1, free_port())
    else:
        launcher = ['torch.distributed.run', '--standalone', f'--nproc-per-node={nproc}']
        command = [sys.executable, '-m', *launcher, '-m', target, *args]
    process = subprocess.Popen(
        command,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_end_with_the_caller,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f'{target} took more than {timeout} s\n{output[-TAIL:]}') from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode != 0:
        raise AssertionError(f'{target} exited with {process.returncode}\n{output[-TAIL:]}')
    return subprocess.CompletedProcess(command, process.returncode, output, '')


def _end_with_the_caller() -> None:
    # Nobody else ends the run when the process that waits for it is killed.
    if sys.platform == 'linux':
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def two_at_once(calls: Iterable[Callable[[], object]]) -> None:
    """Make the calls, each a :func:`torchrun` that waits, two at a time; raise the first error."""
    with ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(call) for call in calls]:
            call.result()
