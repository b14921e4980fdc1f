"""Parameters of a Mamba mixer that ``torch_dist`` stores in parts, and the rows of each part.

A tensor-parallel rank has the parts one below the other, and ``fsdp_dtensor`` the ranks' parameters
one below the other. ``torch_dist`` has a tensor for each part. Of two ranks:

    decoder.layers.0.mixer.in_proj.weight    rows z0 x0 B0 C0 dt0 z1 x1 B1 C1 dt1
        ->  decoder.layers.0.mixer.in_proj.weight.z    rows z0 z1
        ->  decoder.layers.0.mixer.in_proj.weight.x    rows x0 x1, and so on
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..common.errors import CheckpointError, shown
from ..merge.source import TensorEntry
from .checkpoint import Checkpoint

# As core's factories name them, in the order of a rank's rows.
PARTS = {
    'in_proj.weight': ('z', 'x', 'B', 'C', 'dt'),
    'conv1d.weight': ('x', 'B', 'C'),
    'conv1d.bias': ('x', 'B', 'C'),
}
_MIXER = '.mixer.'


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive rows of a parameter that are consecutive rows of a part.

    Attributes:
        key: of the part in ``torch_dist``
        start: first of them in the parameter
        at: first of them in the part
        rows: their number
    """

    key: str
    start: int
    at: int
    rows: int


def part_names(key: str) -> tuple[str, ...]:
    """Names of the parts of a parameter; none for one that is stored in one piece.

    Args:
        key: without a part's name
    """
    _, found, name = key.rpartition(_MIXER)
    return PARTS.get(name, ()) if found else ()


def without_part(key: str) -> str:
    """What the parts of a parameter have in common; of any other key all."""
    whole, _, part = key.rpartition('.')
    return whole if part in part_names(whole) else key


def sections(key: str, rows: Mapping[str, int], ranks: int) -> Iterator[Section]:
    """The rows of a parameter, in order.

    Args:
        key: of the parameter
        rows: by part, of the whole model
        ranks: tensor-parallel ones, of which each has an equal share of every part
    """
    start = 0
    for rank in range(ranks):
        for part, total in rows.items():
            own = total // ranks
            yield Section(f'{key}.{part}', start, rank * own, own)
            start += own


def stored_sections(checkpoint: Checkpoint, key: str, name: str) -> list[Section]:
    """Sections of a parameter of ``fsdp_dtensor``, by the shapes of its mixer's others.

    Args:
        key: in ``torch_dist``, without a part's name
        name: the parameter's own
    Returns:
        none for a parameter that is stored in one piece

    Raises:
        CheckpointError: shapes, chunks and arguments don't go together
    """
    if not part_names(key):
        return []
    mixer = name[: name.rindex(_MIXER)] + _MIXER
    ranks = tensor_size(checkpoint)
    _check_ranks(checkpoint, f'{mixer}out_proj.weight', ranks)
    inner, heads = (
        _size(checkpoint, f'{mixer}{other}', axis)
        for other, axis in (('out_proj.weight', 1), ('dt_bias', 0))
    )
    state = (_size(checkpoint, f'{mixer}in_proj.weight', 0) - 2 * inner - heads) // 2
    sizes = {'z': inner, 'x': inner, 'B': state, 'C': state, 'dt': heads}
    rows = {part: sizes[part] for part in part_names(key)}
    entry = checkpoint.weights[name]
    if min(rows.values()) <= 0 or sum(rows.values()) != entry.shape[0]:
        raise CheckpointError(
            f'{checkpoint.directory}: model.module.{name} is {list(entry.shape)}, expected '
            f'{sum(rows.values())} rows by the shapes of in_proj, out_proj and dt_bias of this '
            'mixer; the checkpoint is damaged'
        )
    check_shares(checkpoint, key, rows, ranks)
    _check_chunks(checkpoint, name, entry, ranks)
    return list(sections(key, rows, ranks))


def check_shares(checkpoint: Checkpoint, key: str, rows: Mapping[str, int], ranks: int) -> None:
    """Every tensor-parallel rank has the same number of rows of each part.

    Raises:
        CheckpointError: it doesn't
    """
    for part, total in rows.items():
        if total % ranks:
            raise CheckpointError(
                f'{checkpoint.directory}: {key}.{part} has {total} rows, expected a multiple of '
                f'args.tensor_model_parallel_size, {ranks}'
            )


def tensor_size(checkpoint: Checkpoint) -> int:
    """Tensor-parallel ranks of the run that saved.

    Raises:
        CheckpointError: the arguments don't tell
    """
    args: Any = checkpoint.args
    size = getattr(args, 'tensor_model_parallel_size', None)
    if not isinstance(size, int) or size < 1:
        raise CheckpointError(
            f'{checkpoint.directory}: args.tensor_model_parallel_size is {shown(size)}, expected a '
            'number: it tells the order of rows in Mamba layers'
        )
    return size


def _size(checkpoint: Checkpoint, name: str, axis: int) -> int:
    entry = checkpoint.weights.get(name)
    if entry is None or len(entry.shape) <= axis:
        found = 'is missing' if entry is None else f'is {list(entry.shape)}'
        raise CheckpointError(
            f'{checkpoint.directory}: model.module.{name} {found}, expected more than {axis} axes; '
            'the checkpoint is damaged'
        )
    return entry.shape[axis]


def _check_ranks(checkpoint: Checkpoint, name: str, ranks: int) -> None:
    """Columns are split among tensor-parallel ranks alone, so that chunks show their number."""
    columns = _size(checkpoint, name, 1)
    found = {box.sizes[1] for box in checkpoint.weights[name].chunks if box.numel}
    if found != {columns // ranks}:
        raise CheckpointError(
            f'{checkpoint.directory}: model.module.{name} has chunks of {sorted(found)} of its '
            f'{columns} columns, expected {columns // ranks}, as args.tensor_model_parallel_size '
            f'is {ranks}; the order of rows in Mamba layers goes by it'
        )


def _check_chunks(checkpoint: Checkpoint, name: str, entry: TensorEntry, ranks: int) -> None:
    own = entry.shape[0] // ranks
    for box in entry.chunks:
        if box.numel and box.offsets[0] // own != (box.ends[0] - 1) // own:
            raise CheckpointError(
                f'{checkpoint.directory}: model.module.{name} has a chunk of the rows '
                f'{box.offsets[0]} to {box.ends[0] - 1}, expected {own} of one tensor-parallel '
                f'rank, as args.tensor_model_parallel_size is {ranks}'
            )
