"""``torchrun`` for many tiny runs: their ranks have megatron loaded when they start.

They are forked from a server, one for each of the settings that megatron is imported under.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping

from tests import cpu_megatron
from tests.cpu_megatron.torchrun import TAIL, environment, free_port, of_rank, torchrun

# What is decided when megatron is imported.
_DECIDES_IMPORTS = ('CPU_MEGATRON_OPTIMIZER', 'MEGATRON_OVERLAY')
_LONGEST_REQUEST = 1 << 18


def run(
    nproc: int,
    target: str,
    *args: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 1200,
) -> str:
    """Run ``python -m target args`` in ``nproc`` ranks, as ``torchrun`` does.

    Args, and what is raised, are those of ``torchrun``, which runs it where a GPU is used.

    Returns:
        stdout and stderr of all ranks together.
    """
    variables = environment(env)
    if 'CPU_MEGATRON_DEVICE' in variables:
        return torchrun(nproc, target, *args, env=env, timeout=timeout).stdout
    server = _server(tuple((name, variables.get(name)) for name in _DECIDES_IMPORTS))
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile('w+') as output, ours:
        request = json.dumps([nproc, target, args, variables]).encode()
        socket.send_fds(server, [request], [theirs.fileno(), output.fileno()])
        theirs.close()
        ours.settimeout(timeout)
        try:
            outcome = ours.recv(100).decode() or 'ended with its server'
        except TimeoutError:
            outcome = f'took more than {timeout} s'
        output.seek(0)
        printed = output.read()
    if outcome != 'done':
        raise AssertionError(f'{target} {outcome}\n{printed[-TAIL:]}')
    return printed


@functools.cache
def _server(imported_under: tuple[tuple[str, str | None], ...]) -> socket.socket:
    """Where requests go; the server ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    given = {name: value for name, value in imported_under if value is not None}
    process = subprocess.Popen(
        [sys.executable, '-m', 'tests.cpu_megatron.warm', str(theirs.fileno())],
        env=environment(given),
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)  # runs first
    return ours


def serve(requests: socket.socket) -> None:
    """Fork a process for each request, which forks the ranks; return when nobody can ask."""
    cpu_megatron.install()
    cpu_megatron.activate_overlay()
    for module in (
        'megatron.training.training',
        'megatron.training.argument_utils',
        'tests.cpu_megatron.recorder',
        'tests.cpu_megatron.session',
    ):
        __import__(module)
    # megatron collects garbage several times a run; what is imported is none
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST, 2)
        if not request:
            return
        connection, output = descriptors
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _launch(socket.socket(fileno=connection), output, *json.loads(request))
            os._exit(0)
        os.close(connection)
        os.close(output)


def _launch(
    connection: socket.socket, output: int, nproc: int, target: str, args: list, variables: dict
) -> None:
    """Fork the ranks and tell what became of them; end them when one fails or nobody listens."""
    os.environ.clear()
    os.environ.update(variables)
    port, ranks = free_port(), {}
    for rank in range(nproc):
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.environ.update(of_rank(rank, nproc, port))
            os._exit(_run_module(target, args, output))
        ranks[pid] = rank
    failed = ''
    while ranks and not failed and not select.select([connection], [], [], 0.02)[0]:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            failed = f'exited with {code} on rank {rank}' if code else ''
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError):
        connection.send((failed or 'done').encode())


def _run_module(target: str, args: list[str], output: int) -> int:
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    sys.argv = [target, *args]
    code: object = 0
    try:
        runpy.run_module(target, run_name='__main__', alter_sys=True)
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == '__main__':
    serve(socket.socket(fileno=int(sys.argv[1])))
