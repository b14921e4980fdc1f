"""Ranks of a merge as forked processes: cheap enough to kill, blind and confuse them at will."""

import ctypes
import multiprocessing
import os
import queue
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.cpu_megatron.torchrun import free_port
from tools.checkpoint.common.errors import CheckpointError
from tools.checkpoint.convert_ckpt_optimizer import convert_optimizer
from tools.checkpoint.merge import accumulate
from tools.checkpoint.weighted_merge import (
    merge_same_layout_dcp_metadata_checkpoints as merge,
)

DEADLINE = 1200  # seconds; a hang, whatever else the machine is doing


def start(size: int, action: Callable[..., object], *arguments: object) -> dict[int, Any]:
    """Run ``action(rank, *arguments)`` in ``size`` ranks.

    Returns:
        rank to what it returned, or to ``'Error: message'``; ranks that died are absent

    Raises:
        AssertionError: a rank hangs
    """
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['tests.unit_tests.tools.checkpoint.merge_ranks'])
    results = context.Queue()
    environment = {
        'WORLD_SIZE': str(size),
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(free_port()),
    }
    ranks = [
        context.Process(target=_rank, args=(rank, environment, action, arguments, results))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    ends = time.monotonic() + DEADLINE
    while len(found) < size and time.monotonic() < ends:
        try:
            rank, value = results.get(timeout=0.2)
            found[rank] = value
        except queue.Empty:
            if not any(process.is_alive() for process in ranks) and results.empty():
                break
    hanging = [
        rank for rank, process in enumerate(ranks) if rank not in found and process.is_alive()
    ]
    for process in ranks:
        process.join(5)
        process.kill()
    assert not hanging, f'ranks {hanging} hang; the others: {found}'
    return found


def _rank(
    rank: int,
    environment: Mapping[str, str],
    action: Callable[..., object],
    arguments: tuple[object, ...],
    results: 'multiprocessing.Queue[Any]',
) -> None:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    try:
        value = action(rank, *arguments)
    except (CheckpointError, RuntimeError) as error:
        value = f'{type(error).__name__}: {error}'
    results.put((rank, value))
    results.close()
    results.join_thread()


def merges(rank: int, inputs: list[Path], weights: list[float], root: Path) -> list[object]:
    """Several merges in one process, plain, balanced, verified; nothing is left initialised."""
    outcome: list[object] = []
    for index, options in enumerate(
        [
            {},
            {'balance_rank_work': True},
            {'verify': True, 'save_integrity': True, 'byte_accounting': 'each-rank'},
        ]
    ):
        result = merge(inputs, weights, root / f'{index}', 5, **options)  # type: ignore[arg-type]
        assert not dist.is_initialized()
        outcome.append((result.bytes_read, result.rank_bytes, result.bytes_written))
    assert not torch.cuda.is_initialized()
    return outcome


def converts(rank: int, source: Path, target: Path) -> object:
    """An optimizer conversion: what was read, what was proven, and who read how much."""
    result = convert_optimizer(source, target, verify=True)
    return result.bytes_read, result.proven, result.rank_bytes


def merge_in_existing_groups(
    rank: int, backends: list[str | None], inputs: list[Path], weights: list[float], root: Path
) -> list[float]:
    """The caller's group is used, whatever its backend, and stays usable."""
    store, rank, size = next(dist.rendezvous('env://'))  # type: ignore[attr-defined]
    totals = []
    for index, backend in enumerate(backends):
        own = dist.PrefixStore(f'{index}', store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size)
        merge(inputs, weights, root / f'{index}')
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total, group=dist.new_group(backend='gloo'))
        totals.append(total.item())
        dist.destroy_process_group()
    return totals


def merge_blind(
    rank: int, blind: int, hidden: Path, inputs: list[Path], weights: list[float], root: Path
) -> str:
    """One rank doesn't see ``hidden``: it is in a mount namespace of its own."""
    mount = ['-t', 'tmpfs', 'tmpfs', str(hidden)]
    return _merge_mounted(rank, blind, mount, inputs, weights, root)


def merge_misled(
    rank: int,
    misled: int,
    path: Path,
    other: Path,
    inputs: list[Path],
    weights: list[float],
    root: Path,
) -> str:
    """One rank sees ``other`` at ``path``, as where that is a disk of each machine's own."""
    mount = ['--bind', str(other), str(path)]
    return _merge_mounted(rank, misled, mount, inputs, weights, root)


def convert_misled(rank: int, misled: int, path: Path, other: Path, root: Path) -> str:
    """The same in a conversion of optimizer state."""
    reason = _mount(rank == misled, ['--bind', str(other), str(path)])
    if reason:
        return reason
    convert_optimizer(path, root)
    return 'converted'


def _merge_mounted(
    rank: int, victim: int, mount: list[str], inputs: list[Path], weights: list[float], root: Path
) -> str:
    reason = _mount(rank == victim, mount)
    if reason:
        return reason
    merge(inputs, weights, root)
    return 'merged'


def _mount(in_own_namespace: bool, mount: list[str]) -> str:
    """Why it can't be done; empty where it is, or isn't asked for."""
    if in_own_namespace:
        if ctypes.CDLL(None).unshare(0x00020000) != 0:  # CLONE_NEWNS
            return 'cannot unshare'
        for command in (['mount', '--make-rprivate', '/'], ['mount', *mount]):
            if subprocess.run(command, capture_output=True).returncode:
                return 'cannot mount'
    return ''


def merge_and_die(
    rank: int, victim: int, inputs: list[Path], weights: list[float], root: Path
) -> str:
    """One rank is killed while it merges its second chunk."""
    right, calls = accumulate.ChunkMerger.merge, []

    def dying(self: Any, *arguments: Any) -> None:
        calls.append(arguments)
        if rank == victim and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        right(self, *arguments)

    accumulate.ChunkMerger.merge = dying  # type: ignore[method-assign]
    merge(inputs, weights, root)
    return 'merged'


def merge_with_read_error(
    rank: int, victim: int, inputs: list[Path], weights: list[float], root: Path
) -> str:
    """One rank meets a read error."""
    right, calls = os.preadv, []

    def failing(*arguments: Any) -> int:
        calls.append(arguments)
        if rank == victim and len(calls) == 2:
            raise OSError(5, 'Input/output error')
        return right(*arguments)

    os.preadv = failing
    merge(inputs, weights, root)
    return 'merged'
