"""A merge from beginning to end, collectively over all ranks."""

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .accumulate import ChunkMerger
from .collective import Figures, Prepared, Work, run_together
from .integrity import verify_manifests, write_manifest
from .payload import OpenFiles
from .plan import ChunkJob
from .prepare import prepare
from .report import MergeResult
from .request import MergeRequest
from .source import StoredChunk
from .verify import merge_fault


def run_merge(request: MergeRequest) -> MergeResult:
    """Merge; see ``run_together``."""
    return run_together(_Merge, request)


class _Merge(Work[ChunkMerger, MergeResult]):
    doing = 'merging'

    def prepare(self) -> Prepared[MergeResult]:
        return prepare(self.request, self.ranks.size)

    def check(self, prepared: Prepared[MergeResult] | None) -> None:
        if self.request.verify:
            verify_manifests(prepared.directories if prepared else None, self.ranks)

    def maker(self, result: MergeResult, stop: threading.Event) -> ChunkMerger:
        return ChunkMerger(result.weights, allow_nonfinite=self.request.allow_nonfinite, stop=stop)

    def fault(
        self, result: MergeResult, job: ChunkJob, written: StoredChunk, files: OpenFiles
    ) -> str | None:
        return merge_fault(job, written, files, result.weights)

    def complete(self, staging: Path) -> None:
        if self.request.save_integrity:
            write_manifest(staging, self.ranks)

    def count(self, makers: Sequence[ChunkMerger], staging: Path) -> tuple[int, Counter[str]]:
        """Bytes of files that this rank looked at, and inputs' elements that aren't finite."""
        nonfinite: Counter[str] = Counter()
        for merger in makers:
            nonfinite.update({f'{path}: {key}': n for (path, key), n in merger.nonfinite.items()})
        return _bytes_written(self.request.byte_accounting, self.ranks.rank, staging), nonfinite

    def summarise(self, result: MergeResult, figures: Sequence[Figures]) -> None:
        result.merge_memory = [of_rank.own_memory for of_rank in figures]
        written = sum(of_rank.counted[0] for of_rank in figures)
        result.bytes_written = written or result.bytes_written
        result.nonfinite_inputs = dict(sum((of_rank.counted[1] for of_rank in figures), Counter()))


def _bytes_written(accounting: str, rank: int, staging: Path) -> int:
    """Size of the files that this rank looks at."""
    patterns: list[str] = []
    if accounting in ('each-rank', 'all'):
        patterns = [f'__{rank}_*', *(['[!_]*'] if rank == 0 else [])]
    elif accounting == 'rank0' and rank == 0:
        patterns = ['*']
    return sum(path.stat().st_size for pattern in patterns for path in staging.glob(pattern))
