"""DCP's save with a planner that merges on demand: memory is one chunk per writer thread."""

import dataclasses
import io
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Generator
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
    BytesIOWriteData,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.futures import Future

from ..common.errors import CheckpointError
from .accumulate import Stopped
from .geometry import Box
from .payload import read_bytes
from .plan import BytesJob, ChunkJob, MergePlan, RankShare


class ChunkMaker(Protocol):
    """Makes output chunks, in one writer thread."""

    def merge(self, job: ChunkJob, out: torch.Tensor) -> None:
        """Fill ``out``, one-dimensional, of the chunk's dtype and number of elements."""

    def close(self) -> None:
        """Close the files."""


class MergePlanner[M: ChunkMaker](SavePlanner):
    """Plans one rank's share and merges each chunk when the writer asks for it.

    Args:
        share: what this rank writes
        plan: the whole plan; on the coordinator only
        new_merger: makes the merger of one writer thread
        stop: set when the work is void
        on_bytes: told the bytes read whenever a chunk is done

    Attributes:
        mergers: the mergers of all threads so far, with their figures
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
        self._plan = plan
        self._new_merger = new_merger
        self._stop = stop
        self._on_bytes = on_bytes
        self._jobs = {(job.key, job.box.offsets): job for job in share.chunks}
        self._byte_jobs = {job.index: job for job in share.byte_entries}
        self._largest = max((job.nbytes for job in share.chunks), default=0)
        self._thread = threading.local()
        self.mergers: list[M] = []

    def set_up_planner(
        self,
        state_dict: object,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing to do: the plan was made from the sources' metadata, there is no state dict."""

    def create_local_plan(self) -> SavePlan:
        """One item for each of the share's chunks and byte entries."""
        items = [_byte_item(job) for job in self._share.byte_entries]
        items += [_chunk_item(job) for job in self._share.chunks]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The ranks' plans as they are, and the output's metadata."""
        assert self._plan is not None
        return all_plans, _metadata(self._plan)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Merge a chunk into this thread's buffer, or read a byte entry.

        The returned tensor's memory is used again for the thread's next chunk.
        """
        if self._stop.is_set():
            raise Stopped
        if write_item.type == WriteItemType.BYTE_IO:
            job = self._byte_jobs[write_item.index]
            self._on_bytes(job.piece.length)
            return io.BytesIO(read_bytes(job.path, job.piece))
        assert write_item.index.offset is not None
        chunk = self._jobs[write_item.index.fqn, tuple(write_item.index.offset)]
        out = self._buffer(chunk)
        self._merger().merge(chunk, out)
        self._on_bytes(chunk.source_bytes)
        return out.view(chunk.box.sizes)

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
        items = [_by_chunk_size(item) for item in plan.items]
        try:
            written = super().write_data(dataclasses.replace(plan, items=items), planner)
            if self.failure is None and len(written.value()) != len(items):
                raise CheckpointError(
                    f'{self.path}: {len(written.value())} of {len(items)} entries were written'
                )
            return written
        except BaseException as error:
            self._failed(error)
            nothing: Future[list[object]] = Future()
            nothing.set_result([])
            return nothing


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
                no_dist=group is None,
            )
    finally:
        for merger in planner.mergers:
            merger.close()
        if writer.failure is not None:
            raise writer.failure


def _byte_item(job: BytesJob) -> WriteItem:
    return WriteItem(
        index=job.index,
        type=WriteItemType.BYTE_IO,
        bytes_io_data=BytesIOWriteData(nbytes=job.piece.length),
    )


def _chunk_item(job: ChunkJob) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(job.key, torch.Size(job.box.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(job.box),
            properties=TensorProperties(dtype=job.dtype),
            size=torch.Size(job.box.sizes),
        ),
    )


def _by_chunk_size(item: WriteItem) -> WriteItem:
    """The item with its chunk's size for the tensor's: the writer balances threads by it."""
    if item.tensor_data is None:
        return item
    data = dataclasses.replace(item.tensor_data, size=item.tensor_data.chunk.sizes)
    return dataclasses.replace(item, tensor_data=data)


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
