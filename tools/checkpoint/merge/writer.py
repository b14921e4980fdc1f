"""DCP's save with a planner that merges on demand: memory is one chunk per writer thread."""

import dataclasses
import heapq
import inspect
import io
import mmap
import os
import threading
import warnings
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..common.errors import CheckpointError
from .accumulate import Stopped
from .archive import Template, save_template, saved
from .places import WrittenPlaces, output_metadata
from .plan import ChunkJob, Entry, MergePlan, RankShare

_BATCH = 256 << 10  # bytes of archives that are written at once, unless a single one is larger
_AROUND = 1200  # bytes of an archive besides the elements, about


class _Bytes(io.BytesIO):
    """Bytes for DCP, which writes what ``getbuffer`` gives.

    Python 3.12.1 crashes when it collects the garbage of a write that failed, where the buffer is
    one that ``BytesIO`` makes.
    """

    def __init__(self, content: bytes | memoryview) -> None:
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

    Chunks go to the writer as archives, small ones many at once, in items of bytes: a chunk is
    merged where it lies in its archive, of which the rest costs next to nothing. They are what
    ``torch.save`` writes, and the metadata says tensors of them.

    Args:
        share: what this rank writes
        plan: the whole plan; on the coordinator only
        threads: that write, among which the work is divided
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
        threads: int,
        new_merger: Callable[[], M],
        stop: threading.Event,
        on_bytes: Callable[[int], object] = lambda count: None,
    ) -> None:
        self.plan = plan
        self._new_merger = new_merger
        self._stop = stop
        self._on_bytes = on_bytes
        self._entries = share.entries
        self._batches = _batches(share.entries, threads)
        self._largest = max((job.nbytes for job in share.chunks), default=0) + 4 * _AROUND
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
        """An item for each batch of entries."""
        items = [WriteItem(index, WriteItemType.BYTE_IO) for index in self._batches]
        return dataclasses.replace(new_plan, items=items)

    def resolve_data(self, write_item: WriteItem) -> io.BytesIO:
        """Merge the chunks of a batch, or read a byte entry.

        The memory of what is returned is used again for the thread's next item.
        """
        contents: list[bytes | memoryview] = []
        for number in self._batches[write_item.index]:
            if contents:
                contents[-1] = bytes(contents[-1])
            if self._stop.is_set():
                raise Stopped
            contents.append(self._content(self._entries[number]))
            self.places.lengths[number] = len(contents[-1])
        return _Bytes(contents[0] if len(contents) == 1 else b''.join(contents))

    def _content(self, job: Entry) -> bytes | memoryview:
        """An entry as it is written: for a chunk its archive, in this thread's memory."""
        if not isinstance(job, ChunkJob):
            self._on_bytes(job.length)
            return job.read()
        template = self._template(job.dtype, job.box.sizes)
        start, length = (template.start, template.length) if template else (0, job.nbytes)
        memory = self._memory(length)
        if job.nbytes:
            # its storage is exactly the chunk, all of which torch.save would write
            out = torch.frombuffer(memory, dtype=job.dtype, count=job.box.numel, offset=start)
        else:
            out = torch.empty(0, dtype=job.dtype, device='cpu')
        self._merger().merge(job, out)
        self._on_bytes(job.source_bytes)
        if template is None:
            return saved(out.view(job.box.sizes))
        archive = memoryview(memory)[:length]
        template.fill(archive)
        return archive

    def note_written(self, result: WriteResult) -> None:
        """Take down where what is in an item was written."""
        at = result.storage_data.offset
        for number in self._batches[result.index]:
            self.places.put(number, result.storage_data.relative_path, at)
            at += self.places.lengths[number]

    def _template(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> Template | None:
        if not hasattr(self._thread, 'templates'):
            self._thread.templates = {}
        templates = self._thread.templates
        if (dtype, sizes) not in templates:
            templates[dtype, sizes] = save_template(dtype, sizes)
        return templates[dtype, sizes]

    def _merger(self) -> M:
        if not hasattr(self._thread, 'merger'):
            self._thread.merger = self._new_merger()
            self.mergers.append(self._thread.merger)
        return self._thread.merger

    def _memory(self, length: int) -> mmap.mmap:
        """At least so many bytes, the thread's for one chunk after the other."""
        memory: mmap.mmap | None = getattr(self._thread, 'memory', None)
        if memory is None or len(memory) < length:
            size = max(length, self._largest)
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, 'MADV_HUGEPAGE'):  # a tenth of a merge would go into page faults
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._thread.memory = memory
        return memory


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
        super().__init__(path, thread_count=thread_count, overwrite=False)
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
                    f'{self.path}: {len(written)} of {len(plan.items)} items were written'
                )
            for result in written:
                planner.note_written(result)
            # less to send than a result for each entry; none tells that this rank has failed
            entries.set_result([planner.places] if self.failure is None else [])
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
                {}, storage_writer=writer, planner=planner, process_group=group, **_no_dist(group)
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


def _batches(entries: Sequence[Entry], threads: int) -> dict[MetadataIndex, Sequence[int]]:
    """By item the numbers of the entries that are written in it.

    DCP gives items of bytes to its threads by turns, whatever their size. So the order divides the
    bytes evenly, and a thread with fewer items than another gets empty ones.
    """
    batches: list[tuple[int, array[int]]] = []  # with their bytes
    open_batch, size = array('L'), 0
    for number, job in enumerate(entries):
        needed = _AROUND + (job.nbytes if isinstance(job, ChunkJob) else job.length)
        if needed > _BATCH:
            batches.append((needed, array('L', [number])))
            continue
        if open_batch and size + needed > _BATCH:
            batches.append((size, open_batch))
            open_batch, size = array('L'), 0
        open_batch.append(number)
        size += needed
    if open_batch:
        batches.append((size, open_batch))
    batches.sort(key=itemgetter(0), reverse=True)
    loads = [(0, thread) for thread in range(threads)]
    turns: list[list[Sequence[int]]] = [[] for _ in loads]
    for needed, batch in batches:
        done, thread = heapq.heappop(loads)
        turns[thread].append(batch)
        heapq.heappush(loads, (done + needed, thread))
    items = chain.from_iterable(zip_longest(*turns, fillvalue=()))
    return {MetadataIndex(f'batch {number}'): batch for number, batch in enumerate(items)}
