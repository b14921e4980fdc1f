"""Start a module in processes of its own, as ``torchrun`` does."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TAIL = 6000


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def torchrun(
    nproc: int,
    target: str,
    *args: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
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
    environment = {
        **os.environ,
        'OMP_NUM_THREADS': '1',
        'PYTHONPATH': os.pathsep.join(
            filter(None, [str(REPOSITORY), os.environ.get('PYTHONPATH')])
        ),
        **(env or {}),
    }
    if nproc == 1:
        command = [sys.executable, '-m', target, *args]
        environment |= {
            'RANK': '0',
            'LOCAL_RANK': '0',
            'WORLD_SIZE': '1',
            'MASTER_ADDR': '127.0.0.1',
            'MASTER_PORT': str(free_port()),
        }
    else:
        launcher = ['torch.distributed.run', '--standalone', f'--nproc-per-node={nproc}']
        command = [sys.executable, '-m', *launcher, '-m', target, *args]
    process = subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
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
