"""Small ``torch_dist`` checkpoints with chosen tensors and layouts, written by core's own save."""

import os
import pickle
import queue
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.cpu_megatron.whole_checkpoint import ALONE, read_tensors

WEIGHTS = [0.5, 0.3, 0.2]  # of the checkpoints of the fixture `three`


def ensure_group() -> None:
    """A gloo group of one process, which core's save needs."""
    filesystem_async._results_queue = queue.Queue()  # instead of a manager process of 3 s
    if not dist.is_initialized():
        dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)


def leave_group() -> None:
    """What a forked child does first: the threads of its parent's process group aren't in it.

    DCP of torch 2.6, which can't be told to do without a group, would wait for them.
    """
    dist.GroupMember.WORLD = None


def model_tensors(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A model's worth of tensors of odd sizes, every value its own, with an fp32 router bias."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * torch.rand(1, generator=generator).exp()

    tensors = {
        'embedding.word_embeddings.weight': values(131, 24),
        'decoder.layers.self_attention.linear_qkv.weight': values(2, 72, 24),
        'decoder.layers.mlp.linear_fc1.weight': values(2, 96, 24),
        'decoder.layers.mlp.router.expert_bias': values(2, 7),
        'decoder.final_layernorm.weight': values(24),
        'output_layer.weight': values(131, 24),
    }
    return {
        key: value if key.endswith('expert_bias') else value.to(dtype)
        for key, value in tensors.items()
    }


LAYOUT = {
    'decoder.layers.self_attention.linear_qkv.weight': (1, 4),
    'decoder.layers.mlp.linear_fc1.weight': (0, 2),
    'output_layer.weight': (1, 3),
}


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    layout: Mapping[str, tuple[int, int]] = LAYOUT,
    extra_states: Mapping[str, bytes] | None = None,
    common: Mapping[str, object] | None = None,
) -> Path:
    """Write a checkpoint.

    Args:
        layout: key to (axis, number of chunks)
        extra_states: key to the bytes of its one ``_extra_state``
        common: common state; by default an iteration from the directory name
    """
    ensure_group()
    state: dict[str, object] = {}
    for key, tensor in tensors.items():
        axis, count = layout.get(key, (0, 1))
        for index, part in enumerate(tensor.chunk(count, axis)):
            offsets = [(axis, index, count)] if count > 1 else []
            state[f'{key}#{index}'] = ShardedTensor.from_rank_offsets(
                key, part.contiguous(), *offsets
            )
    for key, data in (extra_states or {}).items():
        state[key] = ShardedObject(key, data, (1,), (0,))
    if common is None:
        common = {'iteration': int(directory.name[5:])} if directory.name[:5] == 'iter_' else {}
    directory.mkdir(parents=True)
    dist_checkpointing.save({**state, **common}, str(directory))
    return directory


def set_common_form(directory: Path, state: object, form: str | None) -> None:
    """Give a checkpoint common state in one form, whichever the installed core writes.

    Args:
        form: ``legacy`` (``common.pt``), ``embedded`` (one DCP entry), or None for no common state
    """
    metadata = FileSystemReader(directory).read_metadata()
    key, index = 'common_state/shard_0_1', MetadataIndex('common_state/shard_0_1')
    metadata.state_dict_metadata.pop(key, None)
    metadata.storage_data.pop(index, None)
    (directory / 'common.pt').unlink(missing_ok=True)
    if form == 'legacy':
        torch.save(state, directory / 'common.pt')
    elif form == 'embedded':
        torch.save([state], directory / 'common.distcp')
        size = (directory / 'common.distcp').stat().st_size
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[index] = _StorageInfo('common.distcp', 0, size)
    (directory / '.metadata').write_bytes(pickle.dumps(metadata))


def add_tensor(directory: Path, key: str, tensor: torch.Tensor) -> None:
    """Store one more tensor as DCP does, also one without elements, which core can't describe."""
    metadata = FileSystemReader(directory).read_metadata()
    offsets = torch.Size([0] * tensor.dim())
    file = f'{key}.distcp'
    torch.save(tensor, directory / file)
    metadata.state_dict_metadata[key] = TensorStorageMetadata(
        TensorProperties.create_from_tensor(tensor),
        tensor.shape,
        [ChunkStorageMetadata(offsets, tensor.shape)],
    )
    size = (directory / file).stat().st_size
    metadata.storage_data[MetadataIndex(key, offsets)] = _StorageInfo(file, 0, size)
    (directory / '.metadata').write_bytes(pickle.dumps(metadata))
    (directory / 'integrity.json').unlink(missing_ok=True)


def copied(source: Path, target: Path) -> Path:
    """A copy of a checkpoint that a test may damage."""
    shutil.copytree(source, target)
    return target


def write_run(
    root: Path, iterations: Sequence[int], dtype: torch.dtype = torch.bfloat16, **options: object
) -> tuple[list[Path], list[dict[str, torch.Tensor]]]:
    """Checkpoints of one run under ``root``, and their tensors."""
    models = [model_tensors(iteration, dtype) for iteration in iterations]
    paths = [
        write_checkpoint(root / f'iter_{iteration:07d}', model, **options)  # type: ignore[arg-type]
        for iteration, model in zip(iterations, models, strict=True)
    ]
    (root / 'latest_checkpointed_iteration.txt').write_text(f'{max(iterations)}\n')
    return paths, models


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, through core's own load; DCP's where core's can't run."""
    if not ALONE:  # torch 2.6
        return read_tensors(str(directory))
    ensure_group()
    loaded = dist_checkpointing.load_plain_tensors(str(directory))
    return {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}


def plain_merge(
    models: Sequence[Mapping[str, torch.Tensor]],
    weights: Sequence[float],
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """The reference: a plain loop over whole tensors."""
    rounded = [torch.tensor(weight, dtype=torch.float32).item() for weight in weights]
    merged = {}
    for key, first in models[0].items():
        total = first.float() * rounded[0]
        for model, weight in zip(models[1:], rounded[1:], strict=True):
            total.add_(model[key].float(), alpha=weight)
        merged[key] = total.to(dtype or first.dtype)
    return merged


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Same keys, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


def tree(root: Path) -> dict[str, bytes]:
    """Every file below ``root``, hidden ones too, with its content."""
    return {
        os.path.relpath(os.path.join(parent, name), root): Path(parent, name).read_bytes()
        for parent, _, names in os.walk(root)
        for name in names
    }
