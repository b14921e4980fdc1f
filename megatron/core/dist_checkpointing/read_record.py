"""What a load has read from storage, noted as it arrives.

A request can be passed over in silence: ``--dist-ckpt-strictness log_all`` drops entries, and DCP
leaves alone what no chunk of the checkpoint covers. The tensors then hold what they held before,
and nothing in the loaded state dict tells it from what was read.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from megatron_overlay.errors import CheckpointingException

# Key of a tensor, and where in it the shard begins.
Shard = tuple[str, tuple[int, ...]]

_current: 'ReadRecord | None' = None


class ReadRecord:
    """How many elements of which shards this rank's planners have put in place.

    Attributes:
        requested: elements that have to be read of each of this rank's shards.
    """

    def __init__(self, requested: Mapping[Shard, int]):
        self.requested = dict(requested)
        self._elements: Counter[Shard] = Counter()

    def note(self, item: ReadItem) -> None:
        """Take down that ``item`` was read."""
        shard = item.dest_index.fqn, tuple(item.dest_index.offset or ())
        self._elements[shard] += math.prod(item.lengths)

    def check(self) -> None:
        """Make sure that what was requested was read, here or by a rank that shares its reads.

        All ranks have to call this, and all of them raise.

        Raises:
            CheckpointingException: some wasn't.
        """
        unread = [shard for shard, size in self.requested.items() if self._elements[shard] < size]
        if on_any_rank([bool(unread)])[0]:
            # --ckpt-fully-parallel-load lets each rank read a part and pass it on.
            elsewhere = _gather(_digests(self.requested.keys() - set(unread)))
            found = torch.isin(_digests(unread), elsewhere).tolist()
            unread = [shard for shard, there in zip(unread, found, strict=True) if not there]
        (failed,) = on_any_rank([bool(unread)])
        if unread:
            key, offset = first = min(unread)
            raise CheckpointingException(
                f'{key} (from {list(offset)}): the model needs {self.requested[first]} elements of '
                f'it and {self._elements[first]} were read from the checkpoint ({len(unread)} '
                f'such entries). They would stay as they were initialised: check that the '
                f'checkpoint is complete, and load with --dist-ckpt-strictness raise_unexpected.'
            )
        if failed:
            raise CheckpointingException('Another rank did not read all the entries it needs.')


class NotesReads:
    """Mixin of a DCP load planner, which tells the current record what arrives."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)  # type: ignore[misc]  # a planner's
        if _current is not None:
            _current.note(read_item)


class DTensorLoadPlanner(NotesReads, DefaultLoadPlanner):
    """DCP's planner, for what no ``ShardedTensor`` describes: it also notes what is requested."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        if _current is not None:
            for key, tensor in self.state_dict.items():
                stored = self.metadata.state_dict_metadata.get(key)
                if isinstance(stored, TensorStorageMetadata):
                    _current.requested.update(_shards(key, tensor))
        return plan


def _shards(key: str, tensor: torch.Tensor) -> Iterator[tuple[Shard, int]]:
    """This rank's shards of ``tensor``, and their sizes."""
    if not hasattr(tensor, '__create_chunk_list__'):
        yield (key, (0,) * tensor.dim()), tensor.numel()
        return
    for chunk in tensor.__create_chunk_list__():
        yield (key, tuple(chunk.offsets)), math.prod(chunk.sizes)


@contextmanager
def recording_reads(requested: Mapping[Shard, int]) -> Iterator[ReadRecord]:
    """Record what planners read in this block, for :meth:`ReadRecord.check` after it."""
    global _current
    outer, _current = _current, ReadRecord(requested)
    try:
        yield _current
    finally:
        _current = outer


def on_any_rank(flags: Sequence[bool]) -> list[bool]:
    """For each of the flags whether some rank has it. All ranks have to call this."""
    if not torch.distributed.is_initialized():
        return list(flags)
    on_any = torch.tensor(flags, dtype=torch.uint8, device='cpu')
    if torch.distributed.get_backend() == 'nccl':
        on_any = on_any.cuda()
    torch.distributed.all_reduce(on_any, op=torch.distributed.ReduceOp.MAX)
    return [bool(flag) for flag in on_any.tolist()]


def _gather(digests: torch.Tensor) -> torch.Tensor:
    """Those of all ranks."""
    if not torch.distributed.is_initialized():
        return digests[:0]
    gathered = [digests] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, digests)
    return torch.cat(gathered)


def _digests(shards: Iterable[Shard]) -> torch.Tensor:
    """8 bytes for each: of all ranks there can be millions."""
    digests = (hashlib.blake2b(repr(shard).encode(), digest_size=8).digest() for shard in shards)
    numbers = [int.from_bytes(digest, signed=True) for digest in digests]
    return torch.tensor(numbers, dtype=torch.int64, device='cpu')
