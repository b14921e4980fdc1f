"""DCP's save with a planner that merges on demand: memory is one chunk per writer thread."""

import dataclasses
import inspect
import io
import mmap
import os
import threading
import warnings
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..common.errors import CheckpointError
from .accumulate import Stopped
from .archive import Template, save_template, saved
from .places import WrittenPlaces, output_metadata
from .plan import ChunkJob, Entry, MergePlan, RankShare

_SMALL = 128 << 10  # bytes of a chunk; up to here DCP and torch.save take longer than merging it
_BATCH = 1 << 20  # bytes of small chunks' archives that are written at once
_AROUND = 1200  # bytes of an archive besides the elements, about


class _Bytes(io.BytesIO):
    """Bytes for DCP, which writes what ``getbuffer`` gives.

    Python 3.12.1 crashes when it collects the garbage of a write that failed, where the buffer is
    one that ``BytesIO`` makes.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self._content = content

    def getbuffer(self) -> memoryview:
        return memoryview(self._content)


class ChunkMaker(Protocol):
    """Makes output chunks, in one writer thread, and counts seconds and bytes."""

    read_seconds: float
    math_seconds: float
    bytes_read: int

    def merge(self, job: ChunkJob, out: torch.Tensor) -> None:
        """Fill ``out``, one-dimensional, of the chunk's dtype and number of elements."""

    def close(self) -> None:
        """Close the files."""


class MergePlanner[M: ChunkMaker](SavePlanner):
    """Plans one rank's share and merges each chunk when the writer asks for it.

    Small chunks go to the writer as archives, many at once, in one item of bytes. They are what
    ``torch.save`` writes, and the metadata says tensors of them as of others.

    Args:
        share: what this rank writes
        plan: the whole plan; on the coordinator only
        new_merger: makes the merger of one writer thread
        stop: set when the work is void
        on_bytes: told the bytes read whenever a chunk is done

    Attributes:
        mergers: the mergers of all threads so far, with their figures
        places: where each chunk of the share and then each byte entry was written
    """

    def __init__(
        self,
        share: RankShare,
        plan: MergePlan | None,
        new_merger: Callable[[], M],
        stop: threading.Event,
        on_bytes: Callable[[int], object] = lambda count: None,
    ) -> None:
        self.plan = plan
        self._new_merger = new_merger
        self._stop = stop
        self._on_bytes = on_bytes
        self._entries = share.entries
        self._batches = _batches(share)
        self._largest = max((job.nbytes for job in share.chunks), default=0)
        self._thread = threading.local()
        self.mergers: list[M] = []
        self.places = WrittenPlaces(len(self._entries))

    def set_up_planner(
        self,
        state_dict: object,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing to do: the plan was made from the sources' metadata, there is no state dict."""

    def create_local_plan(self) -> SavePlan:
        """Nothing that would go to the coordinator, which has the plan, and back."""
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The ranks' plans as they are; the metadata, which DCP sends to all, is the writer's."""
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """An item for each byte entry, each large chunk, and each batch of small ones."""
        items = [
            _item(number, job) for number, job in enumerate(self._entries) if not _is_small(job)
        ]
        items += [WriteItem(index, WriteItemType.BYTE_IO) for index in self._batches]
        return dataclasses.replace(new_plan, items=items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Merge a chunk into this thread's buffer, or read a byte entry.

        The returned tensor's memory is used again for the thread's next chunk.
        """
        if self._stop.is_set():
            raise Stopped
        if write_item.index in self._batches:
            return self._batch(write_item.index)
        job = self._entries[int(write_item.index.fqn)]
        if isinstance(job, ChunkJob):
            return self._merged(job).view(job.box.sizes)
        self._on_bytes(job.length)
        return _Bytes(job.read())

    def _batch(self, index: MetadataIndex) -> io.BytesIO:
        """Archives of small chunks, one after the other."""
        archives: list[bytes] = []
        for number in self._batches[index]:
            if self._stop.is_set():
                raise Stopped
            job = self._entries[number]
            assert isinstance(job, ChunkJob)
            merged = self._merged(job)
            template = self._template(job.dtype, job.box.sizes)
            if template is None:
                archives.append(saved(merged.view(job.box.sizes).clone()))
            else:
                elements = memoryview(self._thread.memory)[: job.nbytes]
                archives.append(b''.join(template.parts(elements)))
            self.places.lengths[number] = len(archives[-1])
        return _Bytes(b''.join(archives))

    def note_written(self, result: WriteResult) -> None:
        """Take down where an item, or what is in a batch, was written."""
        place = result.storage_data
        numbers = self._batches.get(result.index)
        if numbers is None:
            number = int(result.index.fqn)
            self.places.lengths[number] = place.length
            numbers = (number,)
        at = place.offset
        for number in numbers:
            self.places.put(number, place.relative_path, at)
            at += self.places.lengths[number]

    def _template(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> Template | None:
        if not hasattr(self._thread, 'templates'):
            self._thread.templates = {}
        templates = self._thread.templates
        if (dtype, sizes) not in templates:
            templates[dtype, sizes] = save_template(dtype, sizes)
        return templates[dtype, sizes]

    def _merged(self, job: ChunkJob) -> torch.Tensor:
        out = self._buffer(job)
        self._merger().merge(job, out)
        self._on_bytes(job.source_bytes)
        return out

    def _merger(self) -> M:
        if not hasattr(self._thread, 'merger'):
            self._thread.merger = self._new_merger()
            self.mergers.append(self._thread.merger)
        return self._thread.merger

    def _buffer(self, job: ChunkJob) -> torch.Tensor:
        """A tensor over the thread's memory whose storage is exactly the chunk.

        The writer copies a tensor whose storage is larger, and keeps every tensor until its file
        is complete: with memory of their own the chunks would add up to the rank's share.
        """
        if job.nbytes == 0:
            return torch.empty(0, dtype=job.dtype, device='cpu')
        if not hasattr(self._thread, 'memory'):
            self._thread.memory = mmap.mmap(
                -1, self._largest, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            if hasattr(mmap, 'MADV_HUGEPAGE'):  # a tenth of a merge would go into page faults
                self._thread.memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(self._thread.memory, dtype=job.dtype, count=job.box.numel)


class MergeWriter(FileSystemWriter):
    """DCP's writer, with errors of its threads reported instead of printed.

    Args:
        path: directory to write into
        final_path: where the checkpoint will stand; recorded in its metadata
        thread_count: writer threads
        stop: set when a thread fails, to end the others

    Attributes:
        failure: what stopped this rank's writing; the metadata is void then
    """

    def __init__(
        self, path: Path, final_path: Path, thread_count: int, stop: threading.Event
    ) -> None:
        # Without copy-ahead one tensor at a time is resolved and written, so that the planner
        # may lend the same memory for each.
        super().__init__(path, thread_count=thread_count, per_thread_copy_ahead=0, overwrite=False)
        self.fs = _ReportingFileSystem(self._failed)
        self._final_path = final_path
        self._stop = stop
        self._plan: MergePlan | None = None
        self.failure: BaseException | None = None

    def _failed(self, error: BaseException) -> None:
        if self.failure is None or isinstance(self.failure, Stopped):
            self.failure = error
        self._stop.set()

    def storage_meta(self) -> StorageMeta | None:
        """Names the published directory, not the temporary one."""
        return StorageMeta(checkpoint_id=str(self._final_path), save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        """Write all items; a failure is kept in ``failure`` for the ranks to agree on."""
        assert isinstance(planner, MergePlanner)
        self._plan = planner.plan
        entries: Future[list[WrittenPlaces]] = Future()
        try:
            written = super().write_data(plan, planner).value()
            if self.failure is None and len(written) != len(plan.items):
                raise CheckpointError(
                    f'{self.path}: {len(written)} of {len(plan.items)} entries were written'
                )
            for result in written:
                planner.note_written(result)
            entries.set_result([planner.places])  # less to send than a result for each entry
        except BaseException as error:
            self._failed(error)
            entries.set_result([])
        return entries

    def finish(self, metadata: Metadata, results: list[list[WrittenPlaces]]) -> None:
        """Write the metadata of the whole output, from the plan and where ranks have written."""
        assert self._plan is not None
        places = [of_rank for written in results for of_rank in written]
        if len(places) == len(results):  # else a rank has failed, which it tells itself
            super().finish(*output_metadata(self._plan, places))


class _ReportingFileSystem(FileSystem):
    """Files whose errors are reported to the writer, which runs in threads that can't raise."""

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._report = report

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        try:
            opened = Path(path).open(mode)
        except OSError as error:
            self._report(CheckpointError(f"{path}: can't be written: {error.strerror}"))
            yield io.BytesIO()  # nothing reaches it: the planner has stopped
            return
        try:
            with opened as stream:
                yield stream  # type: ignore[misc]
        except OSError as error:
            self._report(CheckpointError(f"{path}: can't be written: {error.strerror or error}"))
        except Exception as error:
            self._report(error)


def save_merged(
    planner: MergePlanner, writer: MergeWriter, group: dist.ProcessGroup | None
) -> None:
    """Run DCP's save over a plan.

    Raises:
        BaseException: what stopped this rank; other ranks may have failed nevertheless
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', message='torch.distributed is disabled')
            dcp.save(
                {},
                storage_writer=writer,
                planner=planner,
                process_group=group,
                **_no_dist(group),
            )
    finally:
        for merger in planner.mergers:
            merger.close()
        if writer.failure is not None:
            raise writer.failure


def _no_dist(group: dist.ProcessGroup | None) -> dict[str, bool]:
    """What keeps DCP to this process; torch 2.6 sees whether there is a group."""
    known = 'no_dist' in inspect.signature(dcp.save).parameters
    return {'no_dist': group is None} if known else {}


def _batches(share: RankShare) -> dict[MetadataIndex, Sequence[int]]:
    """By item the numbers of the small chunks that are written in it."""
    batches: list[array[int]] = []
    size = _BATCH
    for number, job in enumerate(share.chunks):
        if _is_small(job):
            if size >= _BATCH:
                batches.append(array('L'))
                size = 0
            batches[-1].append(number)
            size += job.nbytes + _AROUND
    return {MetadataIndex(f'batch {number}'): batch for number, batch in enumerate(batches)}


def _is_small(job: Entry) -> bool:
    return isinstance(job, ChunkJob) and 0 < job.nbytes <= _SMALL


def _item(number: int, job: Entry) -> WriteItem:
    """The item of an entry; of a chunk with its size, by which the writer balances threads."""
    index = MetadataIndex(str(number))
    if not isinstance(job, ChunkJob):
        return WriteItem(index, WriteItemType.BYTE_IO)
    sizes = torch.Size(job.box.sizes)
    chunk = ChunkStorageMetadata(torch.Size(job.box.offsets), sizes)
    properties = TensorProperties(dtype=job.dtype)
    data = TensorWriteData(chunk, properties, sizes)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)
