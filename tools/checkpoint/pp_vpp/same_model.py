"""That the files of a conversion belong to one model, and are all there."""

from pathlib import Path
from typing import Any

import torch

from ..common.errors import CheckpointError
from ..common.numbers import whole
from .model_state import layer_of, renumber
from .optimizer_state import WAY_OUT, equal
from .rank_file import OldRank
from .rank_order import Place, RankOrder

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
# Sides of one model may be launched by scripts of their own; within a side these are the same.
_RUN_ARGS = ('seed', 'consumed_train_samples', 'params_dtype')
_HETEROGENEOUS = (
    'heterogeneous_layers_config_path',
    'heterogeneous_layers_config_encoded_json',
)
_REPLICATED = ('layernorm.weight', 'layernorm.bias', 'layer_norm_weight', 'layer_norm_bias')
# Of these a tensor rank holds a part of the columns, whatever the model.
_ROW_PARALLEL = ('.self_attention.linear_proj.weight', '.mlp.linear_fc2.weight')


def _is_weight(key: str) -> bool:
    """Of a layer, and not a buffer of bytes, which may be of any size."""
    return layer_of(key) is not None and not key.endswith('_extra_state')


class SameModel:
    """Compares each file with those before it."""

    def __init__(self) -> None:
        self._args: dict[tuple[str, int | None], tuple[Any, Path]] = {}
        self._runs: dict[tuple[str, str], dict[tuple[int, int], tuple[Any, Path]]] = {}
        self._shapes: dict[tuple[str, int | None], tuple[torch.Size, Path]] = {}
        self._columns: dict[str, tuple[int, int, Path]] = {}
        self._orders: dict[Path, RankOrder] = {}
        self._stepped: dict[bool | None, Path] = {}
        self._optimizers: dict[bool, Path] = {}

    def check(self, rank: OldRank, place: Place, side: str, tensor_size: int) -> None:
        """Refuse a file of another model.

        Args:
            rank: the file
            place: pipeline, tensor and expert rank that its directory's name says
            side: 'edge', 'cloud' or ''
            tensor_size: its tensor-parallel size; what tensor parallelism divides is compared only
                between files that have the same

        Raises:
            CheckpointError: names the argument, or the tensor, that differs
        """
        self._check_args(rank, tensor_size)
        self._note_run(rank, place[0], side)
        self._check_shapes(rank, tensor_size)
        args = rank.state.get('args')
        self._orders.setdefault(rank.path.parent.parent, RankOrder()).add(place, rank.path, args)
        self._stepped.setdefault(rank.stepped, rank.path)
        self._optimizers.setdefault(rank.optimizer is not None, rank.path)

    def finish(self) -> None:
        """Refuse what only all files together show.

        Raises:
            CheckpointError: files of several runs, or in each other's directories; a file without
                optimizer state where others have it
        """
        for (name, side), by_stage in self._runs.items():
            _refuse_other_run(name, by_stage, joined_sides=not side)
        for order in self._orders.values():
            order.check()
        if len(self._optimizers) > 1:
            raise CheckpointError(
                f'{self._optimizers[False]}: key `optimizer` is missing, but '
                f'{self._optimizers[True]} has it; {WAY_OUT}'
            )
        if True in self._stepped and False in self._stepped:
            raise CheckpointError(
                f'{self._stepped[False]}, optimizer: no state of any parameter, but '
                f'{self._stepped[True]} has it; the checkpoint is damaged; {WAY_OUT}'
            )

    def _check_args(self, rank: OldRank, tensor_size: int) -> None:
        args = rank.state.get('args')
        for name in (*_SHAPE_ARGS, _PADDED_VOCABULARY):
            if not hasattr(args, name):
                continue
            found = getattr(args, name)
            number = whole(found)
            found = found if number is None else number
            home = (name, tensor_size if name == _PADDED_VOCABULARY else None)
            expected, path = self._args.setdefault(home, (found, rank.path))
            if not equal(found, expected):
                raise CheckpointError(_different(rank.path, name, found, expected, path, 'models'))

    def _note_run(self, rank: OldRank, stage: int, side: str) -> None:
        for chunk in rank.chunks:
            args = rank.stage_state(chunk).get('args')
            for name in _RUN_ARGS:
                if hasattr(args, name):
                    by_stage = self._runs.setdefault((name, side), {})
                    found = getattr(args, name), rank.path
                    # the same on all tensor and expert ranks, but for one that is wrong
                    known = by_stage.setdefault((chunk or 0, stage), found)
                    if not equal(known[0], found[0]):
                        raise CheckpointError(_different(rank.path, name, found[0], *known, 'runs'))

    def _check_shapes(self, rank: OldRank, tensor_size: int) -> None:
        args = rank.state.get('args')
        if any(getattr(args, name, None) for name in _HETEROGENEOUS):
            return
        shapes: dict[str, set[torch.Size]] = {}
        for chunk in rank.chunks.values():
            for key, value in chunk.items():
                if _is_weight(key) and isinstance(value, torch.Tensor):
                    shapes.setdefault(renumber(key, 0), set()).add(value.shape)
        for key, several in shapes.items():
            if len(several) > 1:  # layers of several kinds
                continue
            (found,) = several
            if key.endswith(_ROW_PARALLEL) and len(found) == 2:
                self._check_tensor_size(rank.path, key, found[1], tensor_size)
            home = (key, None if key.endswith(_REPLICATED) else tensor_size)
            expected, path = self._shapes.setdefault(home, (found, rank.path))
            if found != expected:
                raise CheckpointError(
                    f'{rank.path}: {key} has shape {tuple(found)}, expected {tuple(expected)} as '
                    f'in {path}; the files are of different models'
                )

    def _check_tensor_size(self, path: Path, key: str, columns: int, tensor_size: int) -> None:
        """Columns of all tensor ranks together are as many in every stage."""
        size, number, home = self._columns.setdefault(key, (tensor_size, columns, path))
        if tensor_size * columns != size * number:
            raise CheckpointError(
                f'{path}: {key} has {columns} columns on each of {tensor_size} tensor ranks, '
                f'expected {size * number} in all as in {home} ({number} on each of {size}); the '
                'files are of different models, or the directories of tensor ranks are missing or '
                'left over from another run'
            )


def _refuse_other_run(
    name: str, by_stage: dict[tuple[int, int], tuple[Any, Path]], joined_sides: bool
) -> None:
    """Stages are of one run, or first and last of one and those between of another: two sides."""
    in_order = [found for _, found in sorted(by_stage.items(), key=lambda item: item[0])]
    groups = [in_order]
    if joined_sides and len(in_order) > 2 and equal(in_order[0][0], in_order[-1][0]):
        groups = [[in_order[0], in_order[-1]], in_order[1:-1]]
    for group in groups:
        expected, home = group[0]
        for found, path in group[1:]:
            if not equal(found, expected):
                raise CheckpointError(_different(path, name, found, expected, home, 'runs'))


def _different(path: Path, name: str, found: Any, expected: Any, home: Path, of: str) -> str:
    return (
        f'{path}: args.{name} is {found!r:.99}, expected {expected!r:.99} as in {home}; the files '
        f'are of different {of}'
    )
