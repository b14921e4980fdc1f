"""A conversion from beginning to end, collectively over all ranks."""

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..merge.collective import Figures, Prepared, Work, run_together
from ..merge.payload import OpenFiles
from ..merge.plan import ChunkJob
from ..merge.source import StoredChunk
from .assemble import Assembler
from .prepare import ConversionRequest, prepare
from .report import ConversionResult
from .verify import conversion_fault


def run_conversion(request: ConversionRequest) -> ConversionResult:
    """Convert; see ``run_together``."""
    return run_together(_Conversion, request)


class _Conversion(Work[Assembler, ConversionResult]):
    doing = 'converting'

    def prepare(self) -> Prepared[ConversionResult]:
        return prepare(self.request, self.ranks.size)

    def maker(self, result: ConversionResult, stop: threading.Event) -> Assembler:
        return Assembler(stop)

    def fault(
        self, result: ConversionResult, job: ChunkJob, written: StoredChunk, files: OpenFiles
    ) -> str | None:
        return conversion_fault(job, written)

    def count(self, makers: Sequence[Assembler], staging: Path) -> tuple[int, Counter[str]]:
        """Elements that are their weights', and those of copies that differ."""
        different: Counter[str] = Counter()
        for assembler in makers:
            different.update(assembler.different_copies)
        return sum(assembler.proven for assembler in makers), different

    def summarise(self, result: ConversionResult, figures: Sequence[Figures]) -> None:
        result.conversion_memory = [of_rank.own_memory for of_rank in figures]
        result.proven = sum(of_rank.counted[0] for of_rank in figures)
        result.different_copies = dict(sum((of_rank.counted[1] for of_rank in figures), Counter()))
