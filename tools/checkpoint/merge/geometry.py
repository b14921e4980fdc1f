"""Boxes in an index space: tiling, overlap, and runs of contiguous elements."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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
    if covered > total or any(_overlap(group) for group in apart(boxes)):
        return 'chunks overlap'
    return None


def _overlap(boxes: Sequence[Box]) -> bool:
    return any(one.intersection(other) for one, other in itertools.combinations(boxes, 2))


def apart(boxes: Sequence[Box]) -> Iterator[list[Box]]:
    """The boxes in groups: no box shares an element with one of another group.

    Cut are those dimensions, again and again, in which no box lies on both sides of the cut. What
    ranks have of a tensor comes apart to single boxes, in time that hardly grows for each of them.

    Args:
        boxes: none of them empty
    """
    # a group, the dimension to cut next, and in how many before it there was no cut
    pending = [(list(boxes), 0, 0)] if boxes else []
    while pending:
        group, dim, whole = pending.pop()
        if len(group) == 1 or whole == len(group[0].sizes):
            yield group
            continue
        parts = _cut(group, dim)
        following = (dim + 1) % len(group[0].sizes)
        pending += [(part, following, 1 if len(parts) > 1 else whole + 1) for part in parts]


def _cut(boxes: list[Box], dim: int) -> list[list[Box]]:
    boxes.sort(key=lambda box: box.offsets[dim])
    parts: list[list[Box]] = []
    end = -1
    for box in boxes:
        start = box.offsets[dim]
        if start >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, start + box.sizes[dim])
    return parts


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
        yield (_flat(position, part, first), _flat(position, part, second), length)


def _flat(position: Sequence[int], part: Box, box: Box) -> int:
    offset = 0
    for dim, size in enumerate(box.sizes):
        offset = offset * size + position[dim] + part.offsets[dim] - box.offsets[dim]
    return offset
