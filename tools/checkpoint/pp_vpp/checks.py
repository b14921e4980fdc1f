"""What rank files must hold: a table of what all files of a model share, and the place of each.

Each file of a shard is read once. It is held against the plan (``_refuse_misfit``), then against
the files before it (``_SHARED``); what only all of them show comes last (``_Model.finish``).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import is_extra_state

from ..common.errors import CheckpointError, shown
from ..common.numbers import whole
from ..common.paths import parse_iteration_dirname
from .keys import is_embedding, is_final_norm, is_head, is_prediction, layer_of, renumber
from .layout import ChunkId, Plan
from .optimizer_state import WAY_OUT, equal
from .rank_file import RankFile
from .rank_order import Placed, refuse_misplaced_files
from .sources import ShardPaths, ShardRank, Shards

# Files of one tensor and expert rank, by (side, pipeline rank).
ShardFiles = Mapping[tuple[str, int], RankFile]
ReadRank = Callable[[Path], RankFile]

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
_HETEROGENEOUS = ('heterogeneous_layers_config_path', 'heterogeneous_layers_config_encoded_json')
_REPLICATED = ('layernorm.weight', 'layernorm.bias', 'layer_norm_weight', 'layer_norm_bias')
# Of these a tensor rank holds a part of the columns, whatever the model.
_ROW_PARALLEL = ('.self_attention.linear_proj.weight', '.mlp.linear_fc2.weight')


def read_shard(paths: ShardPaths, plan: Plan, read: ReadRank) -> ShardFiles:
    """Files of one tensor and expert rank.

    Args:
        paths: all of them, or those that one new file needs

    Raises:
        CheckpointError: one can't be read, isn't a rank's, or doesn't hold what the plan was made
            from and its place in the pipeline calls for
    """
    files = {home: read(path) for home, path in paths.items()}
    for file in files.values():
        _refuse_other_iteration(file)
    _refuse_misfits(plan, files)
    return files


def checked_shards(
    paths: Shards, plan: Plan, read: ReadRank
) -> Iterator[tuple[tuple[str, ShardRank], ShardFiles]]:
    """Every file of a conversion, read once, shard by shard, and held against all others.

    Args:
        paths: by side and (tensor, expert) rank

    Raises:
        CheckpointError: as ``read_shard``; files of other models or runs, or in each other's
            directories. Some show only after the last shard
    """
    model = _Model()
    for (side, (tp, ep)), of_shard in paths.items():
        tensor_size = len({tp for other, (tp, _) in paths if other == side})
        files = read_shard(of_shard, plan, read)
        for (_, stage), file in files.items():
            model.add(_Checked(file, side, (stage, tp, ep or 0), tensor_size))
        yield (side, (tp, ep)), files
    model.finish()


# --- one file


def _refuse_other_iteration(file: RankFile) -> None:
    name = file.path.parent.parent.name
    expected, found = parse_iteration_dirname(name), file.state.get('iteration')
    if expected is not None and whole(found) != expected:
        raise CheckpointError(
            f'{file.path}: key `iteration` is {found!r:.99}, expected {expected} as in {name}; a '
            'copy under another name, or damaged'
        )


def _refuse_misfits(plan: Plan, files: ShardFiles) -> None:
    planned: dict[ChunkId, int] = {}
    for move in plan.moves:
        for piece in move.pieces:
            planned[piece.source] = max(planned.get(piece.source, 0), piece.last)
    filled = [index for index, chunk in enumerate(plan.sources) if planned.get(chunk)]
    whole_chunks = all(move.whole for move in plan.moves)
    for index, chunk in enumerate(plan.sources):
        file = files.get((chunk.side, chunk.rank))
        if file is None:
            continue
        if chunk.chunk not in file.chunks:
            raise CheckpointError(
                f'{file.path}: key `{chunk.key}` is missing, which other ranks of its stage have'
            )
        found, expected = file.layers[chunk.chunk], planned.get(chunk, 0)
        if found != expected:
            raise CheckpointError(
                f'{file.path}, key `{chunk.key}`: holds {found} layers, expected {expected} as in '
                'the other ranks of its stage'
            )
        _refuse_misplaced(
            f'{file.path}, key `{chunk.key}`',
            [key for key in file.chunks[chunk.chunk] if layer_of(key) is None],
            first=index == 0,
            last=index == len(plan.sources) - 1,
            layers_follow=index < max(filled, default=0),
            whole=whole_chunks,
        )


def _refuse_misplaced(
    where: str, outside: Sequence[str], *, first: bool, last: bool, layers_follow: bool, whole: bool
) -> None:
    """Refuse keys outside the layers that don't belong to a chunk in that place of the pipeline.

    Args:
        layers_follow: later chunks have layers
        whole: the chunk is carried with every key
    """
    for key in () if whole else outside:
        if not (last or (first and is_embedding(key))):
            raise CheckpointError(
                f'{where}: key {key} belongs to no layer, expected such keys on the first and last '
                'stage only; merge and split carry stages whole'
            )
    way_out = 'the stages are not in model order: check the ranks named, and their directories'
    if first and not any(map(is_embedding, outside)):
        raise CheckpointError(
            f'{where}: no embedding.*, expected the embedding in the first stage; {way_out}'
        )
    if last and all(map(is_embedding, outside)):
        raise CheckpointError(
            f'{where}: neither final norm nor head, expected them in the last stage; {way_out}'
        )
    # Multi-token prediction brings an embedding and a head of its own along; then the final norm
    # stands beside the last layer.
    predicts = any(map(is_prediction, outside))
    homes = (
        (is_embedding, first or last or predicts, 'the first and the last stage'),
        (is_head, last or predicts, 'the last stage'),
        (is_final_norm, not layers_follow, 'the stage of the last layer'),
    )
    for key in outside:
        for belongs, fits, home in homes:
            if belongs(key) and not fits:
                raise CheckpointError(f'{where}: holds {key}, expected in {home} only; {way_out}')


# --- all files


@dataclass(frozen=True)
class _Checked:
    """A file, its side, the (pipeline, tensor, expert) rank of its directory, its tensor size."""

    file: RankFile
    side: str
    rank: tuple[int, int, int]
    tensor_size: int


# What is compared: among which files, what it is called, its value.
Found = Iterator[tuple[Hashable, str, Any]]


def _model_args(entry: _Checked) -> Found:
    for name in (*_SHAPE_ARGS, _PADDED_VOCABULARY):
        if hasattr(entry.file.args, name):
            value = getattr(entry.file.args, name)
            number = whole(value)
            scope = entry.tensor_size if name == _PADDED_VOCABULARY else None
            yield (name, scope), name, value if number is None else number


def _run_args(entry: _Checked) -> Found:
    """The same on all tensor and expert ranks of a stage."""
    for chunk in entry.file.chunks:
        args = entry.file.stage_state(chunk).get('args')
        for name in _RUN_ARGS:
            if hasattr(args, name):
                yield (name, entry.side, chunk or 0, entry.rank[0]), name, getattr(args, name)


def _shapes(entry: _Checked) -> Found:
    for key, shape in _layer_shapes(entry.file):
        yield (key, None if key.endswith(_REPLICATED) else entry.tensor_size), key, tuple(shape)


@dataclass(frozen=True)
class _Columns:
    each: int
    ranks: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Columns) and self.total == other.total

    @property
    def total(self) -> int:
        return self.each * self.ranks


def _columns(entry: _Checked) -> Found:
    """Columns of all tensor ranks together are as many in every stage."""
    for key, shape in _layer_shapes(entry.file):
        if key.endswith(_ROW_PARALLEL) and len(shape) == 2:
            yield key, key, _Columns(shape[1], entry.tensor_size)


def _layer_shapes(file: RankFile) -> Iterator[tuple[str, torch.Size]]:
    """Shapes that a layer's weights have, by key of layer 0, where they are of one kind."""
    if any(getattr(file.args, name, None) for name in _HETEROGENEOUS):
        return
    shapes: dict[str, set[torch.Size]] = {}
    for chunk in file.chunks.values():
        for key, value in chunk.items():
            # a buffer of bytes may be of any size
            if layer_of(key) is None or is_extra_state(key):
                continue
            if isinstance(value, torch.Tensor):
                shapes.setdefault(renumber(key, 0), set()).add(value.shape)
    for key, several in shapes.items():
        if len(several) == 1:
            yield key, several.pop()


def _has_optimizer(entry: _Checked) -> Found:
    yield None, '', entry.file.optimizer is not None


def _has_stepped(entry: _Checked) -> Found:
    for slot in list(entry.file.slots.values())[:1]:  # all have state, or none
        yield None, '', slot.state is not None


_OTHER_ARGS = (
    '{path}: args.{what} is {shown}, expected {shown_expected} as in {home}; the files are '
)
_OTHER_RUN = _OTHER_ARGS + 'of different runs'

# What all files share, and what is said of the first that differs from one before it. Of the last
# two it is the file that lacks something that is to blame.
_SHARED: dict[Callable[[_Checked], Found], str] = {
    _model_args: _OTHER_ARGS + 'of different models',
    _run_args: _OTHER_RUN,
    _columns: (
        '{path}: {what} has {found.each} columns on each of {found.ranks} tensor ranks, expected '
        '{expected.total} in all as in {home} ({expected.each} on each of {expected.ranks}); the '
        'files are of different models, or the directories of tensor ranks are missing or left '
        'over from another run'
    ),
    _shapes: (
        '{path}: {what} has shape {found}, expected {expected} as in {home}; the files are of '
        'different models'
    ),
    _has_optimizer: '{path}: key `optimizer` is missing, but {home} has it; ' + WAY_OUT,
    _has_stepped: (
        '{path}, optimizer: no state of any parameter, but {home} has it; the checkpoint is '
        'damaged; ' + WAY_OUT
    ),
}


class _Model:
    """What is known of the files so far."""

    def __init__(self) -> None:
        self._known: dict[Any, dict[Any, tuple[Any, Path]]] = {find: {} for find in _SHARED}
        self._directories: dict[Path, Placed] = {}

    def add(self, entry: _Checked) -> None:
        path = entry.file.path
        for find, known in self._known.items():
            for scope, what, value in find(entry):
                known_value = known.setdefault(scope, (value, path))
                if not equal(value, known_value[0]):
                    found = value, path
                    if find in (_has_optimizer, _has_stepped) and value:
                        found, known_value = known_value, found
                    raise _difference(_SHARED[find], what, found, known_value)
        files = self._directories.setdefault(path.parent.parent, {})
        files[entry.rank] = path, entry.file.args

    def finish(self) -> None:
        runs: dict[tuple[str, str], dict[tuple[int, int], tuple[Any, Path]]] = {}
        for (name, side, chunk, stage), found in self._known[_run_args].items():
            runs.setdefault((name, side), {})[chunk, stage] = found
        for (name, side), by_stage in runs.items():
            _refuse_other_run(name, [by_stage[at] for at in sorted(by_stage)], joined=not side)
        for files in self._directories.values():
            refuse_misplaced_files(files)


def _difference(
    message: str, what: str, found: tuple[Any, Path], expected: tuple[Any, Path]
) -> CheckpointError:
    return CheckpointError(
        message.format(
            what=what,
            path=found[1],
            found=found[0],
            shown=shown(found[0]),
            home=expected[1],
            expected=expected[0],
            shown_expected=shown(expected[0]),
        )
    )


def _refuse_other_run(name: str, in_order: Sequence[tuple[Any, Path]], *, joined: bool) -> None:
    """Stages are of one run, or first and last of one and those between of another: two sides."""
    groups = [in_order]
    if joined and len(in_order) > 2 and equal(in_order[0][0], in_order[-1][0]):
        groups = [[in_order[0], in_order[-1]], in_order[1:-1]]
    for first, *others in groups:
        for found in others:
            if not equal(found[0], first[0]):
                raise _difference(_OTHER_RUN, name, found, first)
