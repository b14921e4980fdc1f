"""Where ranks have written what the plan says, and the output's metadata made of the two."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import batched

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from .plan import Entry, MergePlan, index_of

_AT_ONCE = 1000


# Pickled as calls of DCP's classes: half the size and the memory that their attributes take.


class _Index(MetadataIndex):
    def __init__(self, key: str, offset: torch.Size | None) -> None:
        super().__init__(key)
        object.__setattr__(self, 'offset', offset)  # which DCP's class copies

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return MetadataIndex, (self.fqn, self.offset)


class _Place(_StorageInfo):
    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return _StorageInfo, (self.relative_path, self.offset, self.length)


class _Chunk(ChunkStorageMetadata):
    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return ChunkStorageMetadata, (self.offsets, self.sizes)


class WrittenPlaces:
    """Where one rank has written its entries, by their number, in few bytes for each.

    Args:
        count: how many entries

    Attributes:
        lengths: bytes of each
    """

    def __init__(self, count: int) -> None:
        self.lengths = array('Q', bytes(8 * count))
        self._offsets = array('Q', bytes(8 * count))
        self._file_of = array('H', bytes(2 * count))
        self._files: list[str] = []

    def put(self, number: int, file: str, offset: int) -> None:
        """Entry ``number`` begins at ``offset`` of ``file``."""
        if file not in self._files:
            self._files.append(file)
        self._file_of[number] = self._files.index(file)
        self._offsets[number] = offset

    def __iter__(self) -> Iterator[_StorageInfo]:
        """The place of each, in order."""
        for file, offset, length in zip(self._file_of, self._offsets, self.lengths, strict=True):
            yield _Place(self._files[file], offset, length)


def stored_places(
    plan: MergePlan, storage: Mapping[MetadataIndex, _StorageInfo]
) -> list[WrittenPlaces]:
    """For each rank the places of its share's entries, as metadata tells them."""
    found = []
    for share in plan.shares:
        entries = share.entries
        places = WrittenPlaces(len(entries))
        for number, job in enumerate(entries):
            info = storage[index_of(job)]
            places.put(number, info.relative_path, info.offset)
            places.lengths[number] = info.length
        found.append(places)
    return found


def output_metadata(
    plan: MergePlan, places: Sequence[WrittenPlaces]
) -> tuple[Metadata, Iterator[list[WriteResult]]]:
    """The metadata, without places, and these as DCP's writer puts them in, some at a time.

    Args:
        places: of each rank's share
    """
    size = cache(torch.Size)  # one object for each, of which there are many alike
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        key: TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype),
            torch.Size(tensor.shape),
            [_Chunk(size(box.offsets), size(box.sizes)) for box in tensor.boxes],
        )
        for key, tensor in (plan.tensors | plan.copied_tensors).items()
    }
    entries |= {job.key: BytesStorageMetadata() for job in plan.byte_entries if job.offsets is None}
    metadata = Metadata(entries, planner_data={})
    if plan.reshaped:
        metadata.mcore_data = plan.reshaped

    def index(job: Entry) -> MetadataIndex:
        return _Index(job.key, None if job.offsets is None else size(job.offsets))

    results = (
        WriteResult(index(job), place.length, place)
        for share, own in zip(plan.shares, places, strict=True)
        for job, place in zip(share.entries, own, strict=True)
    )
    return metadata, map(list, batched(results, _AT_ONCE))
