"""DCP's save with a planner that merges on demand: memory is one chunk per writer thread."""

import dataclasses
import inspect
import io
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
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
from .geometry import Box
from .payload import read_bytes
from .plan import ChunkJob, MergePlan, RankShare

_SMALL = 128 << 10  # bytes of a chunk; up to here DCP and torch.save take longer than merging it
_BATCH = 1 << 20  # bytes of small chunks that are written at once


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
        batches: by item, the small chunks that are written at once
        lengths: by item, the bytes of each of their archives, once they are merged
    """

    def __init__(
        self,
        share: RankShare,
        plan: MergePlan | None,
        new_merger: Callable[[], M],
        stop: threading.Event,
        on_bytes: Callable[[int], object] = lambda count: None,
    ) -> None:
        self._share = share
        self.plan = plan
        self._new_merger = new_merger
        self._stop = stop
        self._on_bytes = on_bytes
        large = [job for job in share.chunks if job.nbytes > _SMALL or not job.nbytes]
        self._jobs = {_index(job): job for job in large}
        self._byte_jobs = {job.index: job for job in share.byte_entries}
        self._largest = max((job.nbytes for job in share.chunks), default=0)
        self._thread = threading.local()
        self.mergers: list[M] = []
        self.batches = _batches(share)
        self.lengths: dict[MetadataIndex, list[int]] = {}

    def set_up_planner(
        self,
        state_dict: object,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing to do: the plan was made from the sources' metadata, there is no state dict."""

    def create_local_plan(self) -> SavePlan:
        """An item for each byte entry, each large chunk, and each batch of small ones."""
        items = [
            WriteItem(index, WriteItemType.BYTE_IO) for index in (*self._byte_jobs, *self.batches)
        ]
        items += [_chunk_item(index, job) for index, job in self._jobs.items()]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The ranks' plans as they are, and the output's metadata."""
        assert self.plan is not None
        return all_plans, _metadata(self.plan)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Merge a chunk into this thread's buffer, or read a byte entry.

        The returned tensor's memory is used again for the thread's next chunk.
        """
        if self._stop.is_set():
            raise Stopped
        if write_item.index in self.batches:
            return self._batch(write_item.index)
        if write_item.type == WriteItemType.BYTE_IO:
            job = self._byte_jobs[write_item.index]
            self._on_bytes(job.piece.length)
            return _Bytes(read_bytes(job.path, job.piece))
        chunk = self._jobs[write_item.index]
        return self._merged(chunk).view(chunk.box.sizes)

    def _batch(self, index: MetadataIndex) -> io.BytesIO:
        """Archives of small chunks, one after the other."""
        archives: list[bytes] = []
        for job in self.batches[index]:
            if self._stop.is_set():
                raise Stopped
            merged = self._merged(job)
            template = self._template(job.dtype, job.box.sizes)
            if template is None:
                archives.append(saved(merged.view(job.box.sizes).clone()))
            else:
                elements = memoryview(self._thread.memory)[: job.nbytes]
                archives.append(b''.join(template.parts(elements)))
        self.lengths[index] = list(map(len, archives))
        return _Bytes(b''.join(archives))

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
        entries: Future[list[WriteResult]] = Future()
        try:
            written = super().write_data(plan, planner).value()
            if self.failure is None and len(written) != len(plan.items):
                raise CheckpointError(
                    f'{self.path}: {len(written)} of {len(plan.items)} entries were written'
                )
            entries.set_result([_with_lengths(result, planner) for result in written])
        except BaseException as error:
            self._failed(error)
            entries.set_result([])
        return entries

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata; what is in a batch is told one by one only here, for its memory."""
        assert self._plan is not None
        expanded = [
            _entries(written, _batches(share))
            for written, share in zip(results, self._plan.shares, strict=True)
        ]
        super().finish(metadata, expanded)


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


def _batches(share: RankShare) -> dict[MetadataIndex, list[ChunkJob]]:
    """The share's small chunks by the item that they are written in; the same on every rank."""
    batches: list[list[ChunkJob]] = []
    size = _BATCH
    for job in share.chunks:
        if 0 < job.nbytes <= _SMALL:
            if size >= _BATCH:
                batches.append([])
                size = 0
            batches[-1].append(job)
            size += job.nbytes
    return {MetadataIndex(f'batch {number}'): batch for number, batch in enumerate(batches)}


def _with_lengths(result: WriteResult, planner: MergePlanner) -> WriteResult:
    """What was written by one item; of a batch with the bytes of each archive."""
    if result.index not in planner.batches:
        return result
    place = result.storage_data, planner.lengths[result.index]
    return dataclasses.replace(result, storage_data=place)


def _entries(
    written: Iterable[WriteResult], batches: dict[MetadataIndex, list[ChunkJob]]
) -> Iterator[WriteResult]:
    """What a rank has written, chunk by chunk."""
    for result in written:
        if result.index not in batches:
            yield result
            continue
        place, lengths = result.storage_data
        at = place.offset
        for job, length in zip(batches[result.index], lengths, strict=True):
            own = dataclasses.replace(place, offset=at, length=length)
            yield WriteResult(_index(job), length, own)
            at += length


def _index(job: ChunkJob) -> MetadataIndex:
    return MetadataIndex(job.key, torch.Size(job.box.offsets))


def _chunk_item(index: MetadataIndex, job: ChunkJob) -> WriteItem:
    """The item of a chunk, with its size for the tensor's: the writer balances threads by it."""
    return WriteItem(
        index,
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(job.box),
            properties=TensorProperties(dtype=job.dtype),
            size=torch.Size(job.box.sizes),
        ),
    )


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _metadata(plan: MergePlan) -> Metadata:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        key: TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype),
            torch.Size(tensor.shape),
            [_chunk(box) for box in tensor.boxes],
        )
        for key, tensor in (plan.tensors | plan.copied_tensors).items()
    }
    entries |= {job.key: BytesStorageMetadata() for job in plan.byte_entries if job.offsets is None}
    metadata = Metadata(entries, planner_data={})
    if plan.reshaped:
        metadata.mcore_data = plan.reshaped
    return metadata
