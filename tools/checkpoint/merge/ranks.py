"""The ranks of a merge: one process, ``torchrun``, ``srun``, or a group that exists already.

Every step that may fail on some rank ends in an agreement: all ranks go on, or all raise the same
error. Collectives run over gloo; NCCL is never initialised.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ..common.errors import CheckpointError
from ..common.publish import Interrupted

T = TypeVar('T')

TIMEOUT = timedelta(minutes=30)
_ENVIRONMENT = ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')


class RankLost(CheckpointError):
    """Another rank can't be reached any more."""


@dataclass
class Ranks:
    """This process among the ranks of a merge.

    What all ranks do together raises ``RankLost`` where one is gone.

    Attributes:
        rank, size: as in ``torch.distributed``
        group: gloo group of all ranks; None for one process
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def agree(self, action: Callable[[], T], *, root_only: bool = False) -> T | None:
        """Run ``action`` and go on only if it succeeded on every rank.

        Args:
            root_only: run it on rank 0 only; the others return None

        Raises:
            CheckpointError: it failed somewhere; the same message on every rank
        """
        result: T | None = None
        error: BaseException | None = None
        try:
            if not root_only or self.rank == 0:
                result = action()
        except OSError as caught:
            error = CheckpointError(f'{caught.filename}: {caught.strerror or caught}')
        except (Exception, Interrupted) as caught:
            error = caught
        if self.group is None:
            if error is not None:
                raise error
            return result
        text = None if error is None else _describe(error)
        self._raise_first(self.gather_everywhere(text), error)
        return result

    def _raise_first(self, messages: Sequence[str | None], own: BaseException | None) -> None:
        failed = {rank: text for rank, text in enumerate(messages) if text is not None}
        if not failed:
            return
        if isinstance(own, Interrupted):
            raise own
        texts = list(dict.fromkeys(failed.values()))
        ranks = ', '.join(map(str, failed))
        where = '' if list(failed) == [0] else f' (rank {ranks} of {self.size})'
        raise CheckpointError(texts[0] + where) from own

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""
        if self.group is None:
            return value  # type: ignore[return-value]
        values = [value]
        with self._reaching():
            root = dist.get_global_rank(self.group, 0)
            dist.broadcast_object_list(values, src=root, group=self.group)
        return values[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T] | None:
        """Each rank's value, on rank 0."""
        if self.group is None:
            return [value]
        values: list[T] | None = [value] * self.size if self.rank == 0 else None
        with self._reaching():
            root = dist.get_global_rank(self.group, 0)
            dist.gather_object(value, values, dst=root, group=self.group)
        return values

    def gather_everywhere(self, value: T) -> list[T]:
        """Each rank's value, on every rank."""
        if self.group is None:
            return [value]
        values: list[T | None] = [None] * self.size
        with self._reaching():
            dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def scatter(self, values: Sequence[T] | None) -> T:
        """The value that rank 0 has for this rank."""
        if self.group is None:
            assert values is not None
            return values[0]
        received: list[T | None] = [None]
        with self._reaching():
            dist.scatter_object_list(
                received,
                list(values) if values is not None else None,
                src=dist.get_global_rank(self.group, 0),
                group=self.group,
            )
        return received[0]  # type: ignore[return-value]

    def scatter_evenly(self, values: Sequence[T] | None) -> Sequence[T]:
        """This rank's part of rank 0's values, which every ``size``-th is."""
        return self.scatter(
            None if values is None else [values[rank :: self.size] for rank in range(self.size)]
        )

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLost(
                f"another rank of {self.size} stopped or can't be reached; nothing was published"
            ) from error


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The ranks that this process belongs to, for the length of a merge.

    A group that exists is used (through a gloo group of its own where it is another backend's);
    else RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT start one; else this is rank 0 of 1.

    Raises:
        CheckpointError: some but not all of the four are set, or the group doesn't come about
    """
    if dist.is_available() and dist.is_initialized():
        yield from _existing_group()
        return
    given = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    if int(given.get('WORLD_SIZE', '1')) == 1:
        yield Ranks()
        return
    missing = [name for name in _ENVIRONMENT if name not in given]
    if missing:
        raise CheckpointError(
            f'WORLD_SIZE is {given["WORLD_SIZE"]}, but {", ".join(missing)} not set; set them, '
            'or start with torchrun'
        )
    yield from _own_group(int(given['RANK']), int(given['WORLD_SIZE']))


def _existing_group() -> Iterator[Ranks]:
    size = dist.get_world_size()
    if size == 1:
        yield Ranks()
        return
    usable = 'cpu:gloo' in dist.get_backend_config().split(',')
    own = None if usable else dist.new_group(backend='gloo', timeout=TIMEOUT)
    try:
        yield Ranks(dist.get_rank(), size, own or dist.group.WORLD)
    finally:
        if own is not None:
            _destroy(own)


_former: dist.ProcessGroup | None = None


def _destroy(group: dist.ProcessGroup) -> None:
    """Destroy a group, and keep the object until there is another.

    Its destructor waits for a thread that may be about to drop a tensor, for which that needs the
    interpreter's lock; torch 2.6 doesn't let go of it there. Later the thread has nothing to drop.
    """
    global _former
    _former = group
    dist.destroy_process_group(group)


_store: dist.Store | None = None
_merges = 0


def _own_group(rank: int, size: int) -> Iterator[Ranks]:
    """A group for this merge only, so that a caller may make its own afterwards."""
    global _store, _merges
    try:
        if _store is None:
            _store, rank, size = next(dist.rendezvous('env://', rank, size, timeout=TIMEOUT))
        _merges += 1
        dist.init_process_group(
            'gloo',
            store=dist.PrefixStore(f'weighted_merge/{_merges}', _store),
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
        )
    except (RuntimeError, ValueError, dist.DistError) as error:
        raise CheckpointError(f"rank {rank} of {size} can't join the others: {error}") from error
    ranks = Ranks(rank, size, dist.group.WORLD)
    try:
        yield ranks
    finally:
        _destroy(ranks.group)


def _describe(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    expected = isinstance(error, (CheckpointError, Interrupted))
    return text if expected else f'{type(error).__name__}: {text}'
