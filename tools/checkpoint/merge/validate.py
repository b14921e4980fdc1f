"""Do the sources agree, and did the output become what was planned?"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import without_shard
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ..common.dcp_metadata import entry_name, load_dcp_metadata
from ..common.errors import CheckpointError, some
from ..common.stored import check_files
from .geometry import Box
from .plan import MergePlan, index_of
from .source import Source, TensorEntry


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which a source differs from the first.

    Attributes:
        kind: what differs, such as ``'dtype'``; the same for every key
        key: the tensor; empty for what concerns the whole checkpoint
        text: the source's value and the first one's
        option: of the merge, which merges the two all the same; empty where none does
        way_out: what to do where no option does, if anything
    """

    kind: str
    key: str
    text: str
    option: str = ''
    way_out: str = ''

    def __str__(self) -> str:
        what = f'{self.key}: {self.kind}' if self.key else self.kind
        way_out = f'{self.option} merges them' if self.option else self.way_out
        return f'{what} {self.text}' + (f'; {way_out}' if way_out else '')


RESHARD = '--allow-reshard'
_ONE_DTYPE = 'a merge of one of them alone, with --merge-save-dtype, gives it another dtype'


def differences(other: Source, first: Source) -> Iterator[Difference]:
    """Everything that keeps two sources from being merged as they are, in the order of checking."""
    if other.tensor_config != first.tensor_config:
        yield Difference('formats differ:', '', f'{other.tensor_config}, {first.tensor_config}')
    yield from _key_differences('tensors', other.tensors, first.tensors)
    yield from _extra_state_differences(other, first)
    for key, expected in first.tensors.items():
        found = other.tensors.get(key)
        if found is None:
            continue
        if found.shape != expected.shape:
            yield Difference('global shape', key, f'{found.shape}, expected {expected.shape}')
            continue
        if found.dtype != expected.dtype:
            text = f'{found.dtype}, expected {expected.dtype}'
            yield Difference('dtype', key, text, way_out=_ONE_DTYPE)
        if found.layout != expected.layout:
            yield Difference(
                'chunk layout',
                key,
                f'{_layout(found.layout)}, expected {_layout(expected.layout)}',
                RESHARD,
            )
    if other.reshaped != first.reshaped:
        yield Difference('stored under other global shapes', '', '(mcore_data)')


def validate_sources(sources: Sequence[Source], *, allow_reshard: bool = False) -> None:
    """Every source against the first: keys, shapes, layouts, dtypes, format.

    Args:
        allow_reshard: let chunk layouts differ

    Raises:
        CheckpointError: the first difference, with both values
    """
    first = sources[0]
    for other in sources[1:]:
        for difference in differences(other, first):
            if not (allow_reshard and difference.option == RESHARD):
                raise CheckpointError(f'{other.directory} against {first.directory}: {difference}')


def validate_given_extra_states(given: Source, sources: Sequence[Source]) -> None:
    """Refuse a ``--common-state-checkpoint`` with other ``_extra_state`` than the inputs have."""
    if sources[0].extra_states:
        for difference in _extra_state_differences(given, sources[0]):
            raise CheckpointError(f'{given.directory} against {sources[0].directory}: {difference}')


def _extra_state_differences(other: Source, first: Source) -> Iterator[Difference]:
    kinds = [
        {without_shard(key): isinstance(entry, TensorEntry) for key, entry in entries.items()}
        for entries in (other.extra_states, first.extra_states)
    ]
    mixed = {name for name, kind in kinds[0].items() if kinds[1].get(name, kind) != kind}
    for name in sorted(mixed):
        found, expected = ('a tensor' if kind[name] else 'bytes' for kind in kinds)
        yield Difference(
            'stored as', name, f'{found} in {other.directory}, as {expected} in {first.directory}'
        )
    yield from _key_differences(
        '_extra_state entries',
        *(
            [key for key in source.extra_states if without_shard(key) not in mixed]
            for source in (other, first)
        ),
    )


def validate_output(directory: Path, plan: MergePlan) -> dict[MetadataIndex, _StorageInfo]:
    """The metadata on disk against the plan, and the files against the metadata.

    Returns:
        where the metadata says that each entry is stored

    Raises:
        CheckpointError: an entry, a chunk or its bytes are missing or differ
    """
    metadata = load_dcp_metadata(directory)
    entries, storage = metadata.state_dict_metadata, metadata.storage_data
    planned = [*plan.tensors, *(job.key for job in plan.byte_entries)]
    for difference in _key_differences('entries', entries, planned):
        raise CheckpointError(f'{directory}: {difference}')
    for key, tensor in (plan.tensors | plan.copied_tensors).items():
        entry = entries[key]
        if (
            not isinstance(entry, TensorStorageMetadata)
            or [(c.offsets, c.sizes) for c in entry.chunks]
            != [(box.offsets, box.sizes) for box in tensor.boxes]
            or tuple(entry.size) != tensor.shape
            or entry.properties.dtype != tensor.dtype
        ):
            raise CheckpointError(f'{directory}: {key}: written metadata differs from the plan')
    count = 0
    for index, smallest, largest in _planned_lengths(plan):
        count += 1
        info = storage.get(index)
        if (
            info is None
            or not smallest <= info.length <= largest
            or (isinstance(entries[index.fqn], BytesStorageMetadata) != (index.offset is None))
        ):
            raise CheckpointError(f'{directory}: {entry_name(index)}: was not written')
    if len(storage) != count:
        raise CheckpointError(f'{directory}: {len(storage)} stored entries, planned {count}')
    file = cache(directory.joinpath)
    check_files((file(at.relative_path), at.offset + at.length) for at in storage.values())
    return storage


def _planned_lengths(plan: MergePlan) -> Iterator[tuple[MetadataIndex, int, float]]:
    """Each entry of the output, and the least and the most bytes that it may take."""
    for key, tensor in plan.tensors.items():
        for box in tensor.boxes:
            yield MetadataIndex(key, box.offsets), box.numel * tensor.dtype.itemsize, math.inf
    for job in plan.byte_entries:
        yield index_of(job), job.length, job.length


def _key_differences(
    what: str, found: Iterable[str], expected: Iterable[str]
) -> Iterator[Difference]:
    missing, unexpected = set(expected) - set(found), set(found) - set(expected)
    if missing or unexpected:
        text = f'missing {some(missing, 8)}, unexpected {some(unexpected, 8)}'
        yield Difference(f'{what} differ:', '', text)


def _layout(boxes: Iterable[Box]) -> str:
    ordered = sorted(boxes)
    shown = ', '.join(f'{box.sizes} at {box.offsets}' for box in ordered[:4])
    return f'{len(ordered)} chunks ({shown}{", …" if len(ordered) > 4 else ""})'
