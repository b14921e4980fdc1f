"""Boxes in an index space: tiling, overlap, and runs of contiguous elements."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

_LARGEST_GRID = 1 << 26  # cells of a byte


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A chunk of a global tensor: offset and size along each dimension, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.sizes)

    def intersection(self, other: 'Box') -> 'Box | None':
        """The common part of two boxes; None if there is none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self.ends, other.ends))
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(e - s for s, e in zip(starts, ends, strict=True)))

    @property
    def ends(self) -> tuple[int, ...]:
        """Offset plus size along each dimension."""
        return tuple(map(sum, zip(self.offsets, self.sizes, strict=True)))


def tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """What keeps ``boxes`` from covering a tensor of ``shape`` exactly once; None if nothing."""
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f'chunk at {box.offsets} has another rank than the tensor {tuple(shape)}'
        if any(
            o < 0 or s < 0 or o + s > n
            for o, s, n in zip(box.offsets, box.sizes, shape, strict=True)
        ):
            return f'chunk at {box.offsets} of {box.sizes} lies outside the tensor {tuple(shape)}'
    total, covered = math.prod(shape), sum(box.numel for box in boxes)
    if covered < total:
        return f'chunks cover {covered} of {total} elements'
    boxes = [box for box in boxes if box.numel]
    if covered == total and len(boxes) <= 1:
        return None
    return 'chunks overlap' if covered > total or _overlap(shape, boxes) else None


def _overlap(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether two boxes share an element, counted on the grid of all their edges."""
    grids = []
    for dim in range(len(shape)):
        edges = sorted({box.offsets[dim] for box in boxes} | {box.ends[dim] for box in boxes})
        grids.append({edge: position for position, edge in enumerate(edges)})
    if math.prod(map(len, grids)) > _LARGEST_GRID:
        return _pair_overlaps(boxes)
    counts = numpy.zeros([max(len(grid) - 1, 1) for grid in grids], dtype=numpy.uint8)
    for box in boxes:
        cells = tuple(
            slice(grid[start], grid[end])
            for grid, start, end in zip(grids, box.offsets, box.ends, strict=True)
        )
        if counts[cells].any():
            return True
        counts[cells] = 1
    return False


def _pair_overlaps(boxes: Sequence[Box]) -> bool:
    """The same from each box and those before it, in memory that grows with their number."""
    starts = numpy.array([box.offsets for box in boxes])
    ends = numpy.array([box.ends for box in boxes])
    return any(
        ((starts[:index] < ends[index]) & (starts[index] < ends[:index])).all(axis=1).any()
        for index in range(1, len(boxes))
    )


def runs(part: Box, first: Box, second: Box) -> Iterator[tuple[int, int, int]]:
    """Runs of elements of ``part`` that are contiguous in two boxes which both contain it.

    Yields:
        element offset in ``first``, element offset in ``second``, number of elements; both boxes
        row-major
    """
    split = len(part.sizes)
    while split > 0 and all(part.sizes[split:] == box.sizes[split:] for box in (first, second)):
        split -= 1
    # dimensions from `split` on are walked as one run: those after it are whole in both boxes
    length = math.prod(part.sizes[split:])
    for index in itertools.product(*(range(size) for size in part.sizes[:split])):
        position = [*index, *([0] * (len(part.sizes) - split))]
        yield (
            _flat(position, part, first),
            _flat(position, part, second),
            length,
        )


def _flat(position: Sequence[int], part: Box, box: Box) -> int:
    offset = 0
    for dim, size in enumerate(box.sizes):
        offset = offset * size + position[dim] + part.offsets[dim] - box.offsets[dim]
    return offset
