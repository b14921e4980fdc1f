"""The parameters of each rank, as the stored weights' chunks tell.

A chunk of a weight is what one tensor-parallel rank has of it. A rank's parameter is one chunk
(``linear_proj.weight``), two of one key (gate and up of a gated ``linear_fc1``, side by side in the
parameter and apart in the stored tensor), or those of several keys (``in_proj.weight.z``, ``.x``, …
of a Mamba mixer). Where a key has no number, layers and experts are stacked on leading axes of the
stored weight: ``decoder.layers.mlp.linear_fc1.weight`` of shape (layers, …).
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import (
    expert_of,
    is_buffer,
    parse_key,
)

from ..common.errors import CheckpointError
from ..merge.geometry import Box
from ..merge.source import TensorEntry
from .checkpoint import Checkpoint
from .mixer_parts import PARTS

# Parts of one parameter that core's factories store under keys of their own.
_SPLIT = tuple(dict.fromkeys(PARTS.values()))
_PARTS = {part for parts in _SPLIT for part in parts}

Part = tuple[str, Box]
"""FQN of a weight and one of its chunks."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the whole model.

    Attributes:
        block: ``decoder.layers``, ``mtp.layers``, or empty outside layers
        layer: its number there; -1 outside layers
        expert: its number; -1 where it is none
        name: what remains of the key, such as ``self_attention.linear_qkv.weight``, or of an
            expert's ``mlp.experts.linear_fc1.weight``
        dtype: of the weight
        ranks: for each tensor-parallel rank the parts that make up its parameter, in order; one
            entry where all have the same
    """

    block: str
    layer: int
    expert: int
    name: str
    dtype: torch.dtype
    ranks: tuple[tuple[Part, ...], ...]

    def parts(self, rank: int) -> tuple[Part, ...]:
        """What a tensor-parallel rank has."""
        return self.ranks[rank if len(self.ranks) > 1 else 0]

    @property
    def numel(self) -> int:
        """Elements that a rank has."""
        return sum(box.numel for _, box in self.ranks[0])

    @property
    def key(self) -> str:
        """FQN of the weight, of its first part where it is stored in several."""
        return self.ranks[0][0][0]

    @property
    def label(self) -> str:
        """For messages: the key as a model that doesn't stack would have it."""
        layer = f'{self.block}.{self.layer}.' if self.block else ''
        name = self.name
        if self.expert >= 0:
            name = name.replace('mlp.experts.', f'mlp.experts.experts.{self.expert}.')
        return f'{layer}{name}'


@dataclass(frozen=True)
class Model:
    """All parameters, and the sizes that the chunks tell.

    Attributes:
        parameters: in the metadata's order
        tensor_size: tensor-parallel ranks
        expert_tensor_size: the same of experts; 1 without
    """

    parameters: list[Parameter]
    tensor_size: int
    expert_tensor_size: int


def read_model(checkpoint: Checkpoint, expert_tensor_differs: bool) -> Model:
    """The model's parameters from the weights' keys, shapes and chunks.

    Args:
        expert_tensor_differs: experts may be split otherwise than the other parameters, as they
            have an optimizer of their own

    Raises:
        CheckpointError: chunks that no known way of splitting a parameter makes
    """
    units: dict[tuple[str, int, int, str], dict[str, list[Part]]] = defaultdict(dict)
    dtypes: dict[tuple[str, int, int, str], torch.dtype] = {}
    for key, entry in checkpoint.weights.items():
        if is_buffer(key):
            continue
        for unit, part, boxes in _units(checkpoint, key, entry):
            units[unit][part] = [(key, box) for box in boxes]
            dtypes[unit] = entry.dtype
    size = _tensor_size(checkpoint)
    expert_size = size
    if expert_tensor_differs:
        expert_size = max(
            (len(parts['']) for unit, parts in units.items() if _is_plain_expert(unit)), default=1
        )
    parameters = []
    for unit, parts in units.items():
        ranks = _ranks(checkpoint, unit, parts, size if unit[2] < 0 else expert_size)
        parameters.append(Parameter(*unit, dtypes[unit], ranks))
    return Model(parameters, size, expert_size)


def _is_plain_expert(unit: tuple[str, int, int, str]) -> bool:
    return unit[2] >= 0 and unit[3].endswith('linear_fc2.weight')


def _units(
    checkpoint: Checkpoint, key: str, entry: TensorEntry
) -> Iterator[tuple[tuple[str, int, int, str], str, list[Box]]]:
    """Block, layer, expert and name of each parameter in a weight, its part, and its chunks."""
    block, layer, expert, name = '', -1, -1, key
    axes = 0
    own = parse_key(key)
    if own.block and not own.prefix:
        block, name = own.block, own.part
        axes += own.layer is None
        layer = -1 if own.layer is None else own.layer
    of_expert = expert_of(name)
    if of_expert:
        number, name = of_expert
        axes += number is None
        expert = -1 if number is None else number
    stem, _, last = name.rpartition('.')
    part = last if last in _PARTS and stem else ''
    name = stem if part else name
    grouped: dict[tuple[int, ...], list[Box]] = defaultdict(list)
    for box in entry.chunks:
        if any(size != 1 for size in box.sizes[:axes]):
            raise CheckpointError(
                f'{checkpoint.directory}: {key} at {box.offsets}: a chunk of {box.sizes}, expected '
                'one layer and one expert in a chunk'
            )
        grouped[box.offsets[:axes]].append(box)
    for index, boxes in sorted(grouped.items()):
        numbers = iter(index)
        own_layer = next(numbers) if block and layer < 0 else layer
        own_expert = next(numbers) if of_expert and expert < 0 else expert
        yield (block, own_layer, own_expert, name), part, sorted(boxes)


def _tensor_size(checkpoint: Checkpoint) -> int:
    embedding = checkpoint.weights.get('embedding.word_embeddings.weight')
    if embedding is not None:
        return len(embedding.chunks)
    saved = getattr(checkpoint.args, 'tensor_model_parallel_size', None)
    if isinstance(saved, int) and saved > 0:
        return saved
    raise CheckpointError(
        f'{checkpoint.directory}: neither embedding.word_embeddings.weight nor args tell the '
        'tensor-parallel size'
    )


def _ranks(
    checkpoint: Checkpoint, unit: tuple[str, int, int, str], parts: dict[str, list[Part]], size: int
) -> tuple[tuple[Part, ...], ...]:
    if set(parts) != {''}:
        names = next((names for names in _SPLIT if set(names) == set(parts)), None)
        if names is None:
            raise CheckpointError(
                f'{checkpoint.directory}: {unit[3]}: stored in the parts {sorted(parts)}, expected '
                + ' or '.join(', '.join(names) for names in _SPLIT)
            )
        ordered = [parts[name] for name in names]
        if any(len(chunks) not in (1, size) for chunks in ordered):
            raise CheckpointError(
                f'{checkpoint.directory}: {unit[3]}: parts of {[len(c) for c in ordered]} chunks, '
                f'expected {size} each'
            )
        return tuple(
            tuple(chunks[rank if len(chunks) > 1 else 0] for chunks in ordered)
            for rank in range(max(map(len, ordered)))
        )
    chunks = parts['']
    if len(chunks) == 1:
        return ((chunks[0],),)
    if len(chunks) % size:
        raise CheckpointError(
            f'{checkpoint.directory}: {chunks[0][0]}: {len(chunks)} chunks of a parameter, '
            f'expected 1 or a multiple of the {size} tensor-parallel ranks'
        )
    return tuple(tuple(chunks[rank::size]) for rank in range(size))
