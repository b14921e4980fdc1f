"""Whole tensors of a ``torch_dist`` checkpoint, whatever the layout it was saved from."""

import inspect
import re
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

# to DCP: this process only; torch 2.6 can't be told, and sees whether there is a group
ALONE = {'no_dist': True} if 'no_dist' in inspect.signature(load).parameters else {}
_LAYER_RE = re.compile(r'decoder\.layers\.(\d+)\.')
_MTP_LAYER_RE = re.compile(r'mtp_model_layer\.layers\.(\d+)\.')


def read_tensors(path: str) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, assembled, by key."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=FileSystemReader(path), **ALONE)
    return tensors


def read_objects(path: str) -> dict[str, Any]:
    """Everything of the checkpoint that isn't a tensor, by key."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    objects = {
        key: None for key, entry in metadata.items() if isinstance(entry, BytesStorageMetadata)
    }
    load(objects, storage_reader=FileSystemReader(path), **ALONE)
    return objects


def gpt_source(tensors: dict, hybrid_key: str, pattern: str) -> torch.Tensor | None:
    """What ``hybrid_key`` has to equal, looked up in a GPT checkpoint; None for a fresh layer.

    The i-th ``*`` or ``+`` is GPT layer i's attention, the i-th ``-`` or ``E`` its MLP. What
    follows a ``/`` in the pattern is the stack of a prediction depth, which is one GPT layer.
    """
    pattern, _, mtp_pattern = pattern.partition('/')
    of_mtp = _MTP_LAYER_RE.search(hybrid_key)
    if of_mtp is not None:
        if mtp_pattern[int(of_mtp.group(1))] == 'M':
            return None
        return tensors[_MTP_LAYER_RE.sub('transformer_layer.', hybrid_key)]
    layer = _LAYER_RE.search(hybrid_key)
    if layer is None:
        return tensors[hybrid_key.replace('decoder.final_norm.', 'decoder.final_layernorm.')]
    index = int(layer.group(1))
    symbol = pattern[index]
    if symbol == 'M':
        return None
    same_kind = '*+' if symbol in '*+' else '-E'
    gpt_layer = sum(s in same_kind for s in pattern[:index])
    indexed = _LAYER_RE.sub(f'decoder.layers.{gpt_layer}.', hybrid_key)
    if indexed in tensors:
        return tensors[indexed]
    return tensors[_LAYER_RE.sub('decoder.layers.', hybrid_key)][gpt_layer]
