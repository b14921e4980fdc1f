"""That the files of a conversion belong to one model."""

from pathlib import Path
from typing import Any

import torch

from ..common.errors import CheckpointError
from .model_state import layer_of, renumber
from .optimizer_state import equal
from .rank_file import OldRank

_SHAPE_ARGS = (
    'num_layers',
    'hidden_size',
    'ffn_hidden_size',
    'num_attention_heads',
    'num_query_groups',
    'kv_channels',
    'num_experts',
    'moe_ffn_hidden_size',
    'moe_shared_expert_intermediate_size',
    'q_lora_rank',
    'kv_lora_rank',
    'normalization',
    'swiglu',
    'position_embedding_type',
    'untie_embeddings_and_output_weights',
    'vocab_size',
)
_PADDED_VOCABULARY = 'padded_vocab_size'  # a multiple of the tensor-parallel size
_HETEROGENEOUS = (
    'heterogeneous_layers_config_path',
    'heterogeneous_layers_config_encoded_json',
)
_REPLICATED = ('layernorm.weight', 'layernorm.bias', 'layer_norm_weight', 'layer_norm_bias')


class SameModel:
    """Compares each file with those before it."""

    def __init__(self) -> None:
        self._args: dict[tuple[str, int | None], tuple[Any, Path]] = {}
        self._shapes: dict[tuple[str, int | None], tuple[torch.Size, Path]] = {}

    def check(self, rank: OldRank, tensor_size: int) -> None:
        """Refuse a file of another model.

        Args:
            rank: the file
            tensor_size: its tensor-parallel size; what tensor parallelism divides is compared only
                between files that have the same

        Raises:
            CheckpointError: names the argument, or the tensor, that differs
        """
        self._check_args(rank, tensor_size)
        self._check_shapes(rank, tensor_size)

    def _check_args(self, rank: OldRank, tensor_size: int) -> None:
        args = rank.state.get('args')
        for name in (*_SHAPE_ARGS, _PADDED_VOCABULARY):
            if not hasattr(args, name):
                continue
            found = getattr(args, name)
            home = (name, tensor_size if name == _PADDED_VOCABULARY else None)
            expected, path = self._args.setdefault(home, (found, rank.path))
            if not equal(found, expected):
                raise CheckpointError(
                    f'{rank.path}: args.{name} is {found!r:.99}, expected {expected!r:.99} as in '
                    f'{path}; the files are of different models'
                )

    def _check_shapes(self, rank: OldRank, tensor_size: int) -> None:
        args = rank.state.get('args')
        if any(getattr(args, name, None) for name in _HETEROGENEOUS):
            return
        shapes: dict[str, set[torch.Size]] = {}
        for chunk in rank.chunks.values():
            for key, value in chunk.items():
                if layer_of(key) is not None and isinstance(value, torch.Tensor):
                    shapes.setdefault(renumber(key, 0), set()).add(value.shape)
        for key, several in shapes.items():
            if len(several) > 1:  # layers of several kinds
                continue
            (found,) = several
            home = (key, None if key.endswith(_REPLICATED) else tensor_size)
            expected, path = self._shapes.setdefault(home, (found, rank.path))
            if found != expected:
                raise CheckpointError(
                    f'{rank.path}: {key} has shape {tuple(found)}, expected {tuple(expected)} as '
                    f'in {path}; the files are of different models'
                )
