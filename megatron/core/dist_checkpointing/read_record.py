"""What a load has read from storage, noted as it arrives.

A request can be passed over in silence: ``--dist-ckpt-strictness log_all`` drops entries, and DCP
leaves alone what no chunk of the checkpoint covers. The tensors then hold what they held before,
and nothing in the loaded state dict tells it from what was read.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.planner import ReadItem

# Key of a tensor, and where in it the shard begins.
Shard = tuple[str, tuple[int, ...]]

_current: 'ReadRecord | None' = None


class ReadRecord:
    """How many elements of which shards this rank's planners have put in place."""

    def __init__(self):
        self._elements: Counter[Shard] = Counter()

    def note(self, item: ReadItem) -> None:
        """Take down that ``item`` was read."""
        shard = item.dest_index.fqn, tuple(item.dest_index.offset or ())
        self._elements[shard] += math.prod(item.lengths)

    def check(self, requested: Mapping[Shard, int]) -> None:
        """Make sure that every requested shard was read, here or by a rank that shares its reads.

        All ranks have to call this, and all of them raise.

        Args:
            requested: elements to read of each of this rank's shards.

        Raises:
            CheckpointingException: some weren't read.
        """
        unread = [shard for shard, size in requested.items() if self._elements[shard] < size]
        if _on_any_rank(bool(unread)):
            # --ckpt-fully-parallel-load lets each rank read a part and pass it on.
            elsewhere = _gather([shard for shard in requested if shard not in set(unread)])
            unread = [shard for shard in unread if _digest(shard) not in elsewhere]
        failed = _on_any_rank(bool(unread))
        if unread:
            key, offset = unread[0]
            raise CheckpointingException(
                f'{key} (from {list(offset)}): the model needs {requested[unread[0]]} elements of '
                f'it and {self._elements[unread[0]]} were read from the checkpoint ({len(unread)} '
                f'such entries). They would stay as they were initialised: check that the '
                f'checkpoint is complete, and load with --dist-ckpt-strictness raise_unexpected.'
            )
        if failed:
            raise CheckpointingException('Another rank did not read all the entries it needs.')


class NotesReads:
    """Mixin of a DCP load planner, which tells the current record what arrives."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The planner's own."""
        super().commit_tensor(read_item, tensor)
        if _current is not None:
            _current.note(read_item)


@contextmanager
def recording_reads() -> Iterator[ReadRecord]:
    """Record what planners read in this block."""
    global _current
    outer, _current = _current, ReadRecord()
    try:
        yield _current
    finally:
        _current = outer


def _on_any_rank(flag: bool) -> bool:
    if not torch.distributed.is_initialized():
        return flag
    on_any = torch.tensor([flag], dtype=torch.uint8)
    if torch.distributed.get_backend() == 'nccl':
        on_any = on_any.cuda()
    torch.distributed.all_reduce(on_any, op=torch.distributed.ReduceOp.MAX)
    return bool(on_any.item())


def _gather(shards: list[Shard]) -> set[bytes]:
    """Digests of all ranks' shards; 8 bytes each, since there can be millions."""
    if not torch.distributed.is_initialized():
        return set()
    gathered = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, b''.join(map(_digest, shards)))
    return {part[i : i + 8] for part in gathered for i in range(0, len(part), 8)}


def _digest(shard: Shard) -> bytes:
    return hashlib.blake2b(repr(shard).encode(), digest_size=8).digest()
