"""Checkpoints of metadata alone, with files that are long enough and empty.

Of a mixture-of-experts model, as if so many ranks had saved it; with an optimizer in buckets, where
each expert is a piece of every state, as it is a chunk of a weight.
"""

import argparse
import io
import json
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

HIDDEN = 64
# Ranks that saved the checkpoint: pipeline stages and expert-parallel ranks; one tensor-parallel.
STAGES = {1: 1, 8: 2, 64: 4, 1024: 16}


def sizes(chunks: int) -> tuple[int, int]:
    """Layers and experts of a model whose weights have about as many chunks."""
    layers = 16 << max(round(math.log10(chunks)) - 3, 0)
    return layers, max(round((chunks / layers - 6) / 2 / 64), 1) * 64


def weights(layers: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Weights of a GPT in the order of registration, layers and experts stacked."""
    layer = 'decoder.layers'
    return {
        'embedding.word_embeddings.weight': (512, HIDDEN),
        f'{layer}.self_attention.linear_proj.weight': (layers, HIDDEN, HIDDEN),
        f'{layer}.self_attention.linear_qkv.layer_norm_weight': (layers, HIDDEN),
        f'{layer}.self_attention.linear_qkv.weight': (layers, 3 * HIDDEN, HIDDEN),
        f'{layer}.pre_mlp_layernorm.weight': (layers, HIDDEN),
        f'{layer}.mlp.router.weight': (layers, 2, HIDDEN),
        f'{layer}.mlp.experts.experts.linear_fc1.weight': (layers, experts, 4, HIDDEN),
        f'{layer}.mlp.experts.experts.linear_fc2.weight': (layers, experts, HIDDEN, 2),
        'decoder.final_layernorm.weight': (HIDDEN,),
        'output_layer.weight': (512, HIDDEN),
    }


class Writer:
    """Metadata of tensors whose chunks lie one after the other in the files of their ranks."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.directory, self.ranks = directory, ranks
        self.ends = [0] * ranks
        self.entries: dict = {}
        self.storage: dict = {}
        self.objects: list[tuple[Path, int, bytes]] = []

    def tensor(self, key: str, shape, dtype, chunks, rank: Callable[[tuple], int]) -> None:
        """Chunks are (offsets, sizes); ``rank`` tells from the offsets who saved one."""
        stored = []
        for offsets, own in chunks:
            at = torch.Size(offsets)
            stored.append(dcp.ChunkStorageMetadata(at, torch.Size(own)))
            length = math.prod(own) * dtype.itemsize + 1200  # as torch.save's
            self._place(dcp.MetadataIndex(key, at), length, rank(offsets))
        properties = dcp.TensorProperties(dtype=dtype)
        self.entries[key] = dcp.TensorStorageMetadata(properties, torch.Size(shape), stored)

    def object(self, key: str, value: object) -> None:
        """An object of its own, which can be read."""
        data = io.BytesIO()
        torch.save([value], data)
        self.entries[key] = dcp.BytesStorageMetadata()
        name, at = self._place(dcp.MetadataIndex(key), len(data.getvalue()), 0)
        self.objects.append((self.directory / name, at, data.getvalue()))

    def _place(self, index, length: int, rank: int) -> tuple[str, int]:
        name, at = f'__{rank}_0.distcp', self.ends[rank]
        self.storage[index] = _StorageInfo(name, at, length)
        self.ends[rank] += length
        return name, at

    def finish(self, common: dict) -> None:
        """Write the metadata, and files of the lengths that it tells."""
        self.directory.mkdir(parents=True)
        for rank, end in enumerate(self.ends):
            with open(self.directory / f'__{rank}_0.distcp', 'wb') as file:
                file.truncate(end)
        for path, at, content in self.objects:
            with open(path, 'r+b') as file:
                file.seek(at)
                file.write(content)
        meta = dcp.StorageMeta(save_id=str(self.directory))
        with open(self.directory / '.metadata', 'wb') as file:
            pickle.dump(dcp.Metadata(self.entries, None, self.storage, meta), file)
        torch.save(common, self.directory / 'common.pt')
        (self.directory / 'metadata.json').write_text(
            json.dumps({'sharded_backend': 'torch_dist', 'sharded_backend_version': 1})
        )


def write_checkpoint(
    directory: Path, ranks: int, layers: int, experts: int, optimizer: bool
) -> None:
    """A checkpoint that so many ranks have saved."""
    stages, shapes = STAGES[ranks], weights(layers, experts)
    expert_ranks = min(ranks // stages, experts)
    writer = Writer(directory, ranks)

    def saver(offsets: tuple[int, ...]) -> int:
        stage = offsets[0] * stages // layers if len(offsets) > 2 else 0
        expert = offsets[1] * expert_ranks // experts if len(offsets) > 3 else 0
        return stage * (ranks // stages) + expert

    for key, shape in shapes.items():
        writer.tensor(key, shape, torch.bfloat16, list(_stacked(shape)), saver)
    common = {'iteration': 1, 'args': argparse.Namespace(num_layers=layers)}
    if optimizer:
        _write_optimizer(writer, shapes, ranks, expert_ranks)
        common['optimizer'] = {'param_state_sharding_type': 'dp_reshardable'}
        common['content_metadata'] = {'distrib_optim_sharding_type': 'dp_reshardable'}
    writer.finish(common)


def _stacked(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A chunk for each layer and expert."""
    axes = {1: 0, 2: 1 if shape[0] != 512 else 0, 3: 1, 4: 2}[len(shape)]
    rest = shape[axes:]
    for layer in range(shape[0] if axes else 1):
        for expert in range(shape[1] if axes > 1 else 1):
            index = (layer, expert)[:axes]
            yield (*index, *(0 for _ in rest)), (*(1 for _ in index), *rest)


def _write_optimizer(writer: Writer, shapes: dict, ranks: int, expert_ranks: int) -> None:
    """The buckets of each model-parallel position, and its optimizer's settings."""
    stages = STAGES[ranks]
    layers, experts = shapes['decoder.layers.mlp.experts.experts.linear_fc1.weight'][:2]
    numels = {key: math.prod(list(_stacked(shape))[0][1]) for key, shape in shapes.items()}
    dense = [numel for key, numel in numels.items() if '.layers.' in key and 'experts' not in key]
    of_expert = [numel for key, numel in numels.items() if 'experts' in key]
    groups = ranks // stages
    for stage in range(stages):
        own = [numels['embedding.word_embeddings.weight']] if stage == 0 else []
        own += dense * (layers // stages)
        if stage == stages - 1:
            own += [numels['decoder.final_layernorm.weight'], numels['output_layer.weight']]
        _write_bucket(writer, 0, stage, own, groups, stage * groups)
        for expert in range(expert_ranks):
            own = of_expert * (layers // stages * (experts // expert_ranks))
            group, first = expert + expert_ranks * stage, stage * groups + expert
            _write_bucket(writer, 1, group, own, groups // expert_ranks, first)


def _write_bucket(
    writer: Writer, chain: int, group: int, numels: list[int], shares: int, first: int
) -> None:
    position = f'chained_{chain}.optimizer.distributed.dp_group_idx_{group}'
    edges = [0]
    for numel in reversed(numels):
        edges.append(edges[-1] + numel)
    numel = edges[-1]
    share = -(-numel // (shares * 128)) * 128
    cut = sorted({*edges, *range(share, numel, share)})
    pieces = [((a,), (b - a,)) for a, b in zip(cut, cut[1:], strict=False)]
    bucket = f'{position}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0'
    for state in ('param', 'exp_avg', 'exp_avg_sq'):
        saver = lambda offsets: first + min(offsets[0] // share, shares - 1)  # noqa: E731
        writer.tensor(f'{bucket}.{state}', (numel,), torch.float32, pieces, saver)
    group_of_parameters = {'step': 1, 'is_expert_parallel': chain == 1}
    writer.object(f'{position}.optimizer/shard_0_1', {'param_groups': [group_of_parameters]})
