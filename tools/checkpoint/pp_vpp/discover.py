"""Finding the rank files of a legacy checkpoint, and refusing what isn't one."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import CheckpointError
from ..common.numbers import number_in
from ..common.paths import (
    CONFIG_NAME,
    RELEASE,
    TRACKER_NAME,
    iteration_dir,
    iteration_dirname,
    iterations_in,
    parse_iteration_dirname,
    real_path,
)
from ..common.publish import UNPUBLISHED
from .model_state import belongs_to_front, layer_of

FILE_NAME = 'model_optim_rng.pt'

_RANK_DIR = re.compile(r'mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?', re.ASCII)
_SEPARATE_OPTIMIZER = re.compile(r'distrib_optim\.pt|layer_wise_optimizer_\d+\.pt')


@dataclass(frozen=True, order=True)
class RankId:
    """Parallel ranks that a file is for.

    Attributes:
        tp: tensor-parallel rank
        pp: pipeline rank; None without a pipeline
        ep: expert-parallel rank; None without expert parallelism
    """

    tp: int
    pp: int | None
    ep: int | None = None

    @property
    def dirname(self) -> str:
        """The directory that Megatron reads: ``mp_rank_TT[_PPP][_EEE]``."""
        fields = [f'mp_rank_{self.tp:02d}']
        fields += [f'{rank:03d}' for rank in (self.pp, self.ep) if rank is not None]
        return '_'.join(fields)


@dataclass(frozen=True)
class Source:
    """The rank files in one ``iter_XXXXXXX`` (or ``release``) directory.

    Attributes:
        directory: that directory
        files: path of each file, by (pipeline rank, tensor rank, expert rank or None)
    """

    directory: Path
    files: Mapping[tuple[int, int, int | None], Path]

    @property
    def pipeline_ranks(self) -> list[int]:
        """The pipeline ranks that have a file."""
        return sorted({pp for pp, _, _ in self.files})

    def shards(self, pipeline_rank: int) -> list[tuple[int, int | None]]:
        """The (tensor, expert) ranks of one pipeline rank."""
        found = [(tp, ep) for pp, tp, ep in self.files if pp == pipeline_rank]
        return sorted(found, key=lambda shard: (shard[0], shard[1] or 0))


LoadState = Callable[[Path], Mapping[str, Any]]


def split_path(path: Path) -> tuple[Path, int | str | None]:
    """Root and iteration of a path: that of an iteration's own directory names both.

    Returns:
        the root, and the iteration or ``'release'``; None where the path is the root
    """
    real = real_path(path)
    iteration = RELEASE if real.name == RELEASE else parse_iteration_dirname(real.name)
    if iteration is None or (path / TRACKER_NAME).exists():
        return path, None
    return real.parent, iteration


def find_source(root: str | Path, iteration: int | str | None, load_state: LoadState) -> Source:
    """The rank files of one iteration.

    Args:
        root: checkpoint root, or the iteration's own directory
        iteration: iteration or ``'release'``; the tracker's where None
        load_state: function from a rank file to what it holds; asked only where a directory name
            has two fields, to tell a pipeline rank from an expert rank

    Raises:
        CheckpointError: no such iteration; another format; a directory name that isn't one of
            Megatron's; a rank without its file; a file that this tool can't carry
    """
    root = Path(root)
    if not root.is_dir():
        raise CheckpointError(f'{root}: no such directory')
    home, named = split_path(root)
    if named is not None and iteration not in (None, named):
        raise CheckpointError(
            f'{root}: names {iteration_dirname(named)}, but the iteration to convert is '
            f'{iteration} (--iteration, or that of the edge); name the root {home}'
        )
    iteration = named if iteration is None else iteration
    if iteration is None and not (root / TRACKER_NAME).exists():
        known = iterations_in(root)
        if known != 'none':
            found = f'iterations in {root}: {known}; name one with --iteration'
        else:
            found = f'{_describe(root)}; name the root of a legacy `torch` checkpoint'
        raise CheckpointError(f'{root / TRACKER_NAME}: no such file; {found}')
    return rank_files(iteration_dir(home, iteration), load_state)


def rank_files(directory: Path, load_state: LoadState) -> Source:
    """The rank files in one iteration's directory.

    Args:
        directory: ``iter_XXXXXXX``, ``release``, or one of any other name
        load_state: as for ``find_source``

    Raises:
        CheckpointError: another format; a directory name that isn't one of Megatron's; a rank
            without its file; two directories for one rank
    """
    if (directory / UNPUBLISHED).exists():
        raise CheckpointError(
            f'{directory}: marked {UNPUBLISHED}: one side of a conversion that was killed before '
            'the other was in place; run that conversion again'
        )
    names = sorted(entry.name for entry in directory.iterdir() if entry.name[:7] == 'mp_rank')
    if not names or (directory / CONFIG_NAME).exists():
        raise CheckpointError(f'{directory}: {_describe(directory)}')
    ranks = [_parse(directory, name) for name in names]
    for name in names:
        if not (directory / name / FILE_NAME).is_file():
            raise CheckpointError(f'{directory / name}: no {FILE_NAME}; the checkpoint is damaged')
    two_fields = all(rank.ep is None and rank.pp is not None for rank in ranks)
    if two_fields and _are_of_experts([directory / name / FILE_NAME for name in names], load_state):
        ranks = [RankId(rank.tp, None, rank.pp) for rank in ranks]
    if len({(rank.pp is None, rank.ep is None) for rank in ranks}) > 1:
        raise CheckpointError(
            f'{directory}: directories with different numbers of fields '
            f"({names[0]} … {names[-1]}); expected one layout, remove what doesn't belong"
        )
    files = {
        (rank.pp or 0, rank.tp, rank.ep): directory / name / FILE_NAME
        for rank, name in zip(ranks, names, strict=True)
    }
    if len(files) < len(names):
        raise CheckpointError(
            f'{directory}: two directories for the same rank ({", ".join(names)})'
        )
    return Source(directory, files)


def refuse_other_files(paths: Iterable[Path], drop_optimizer: bool) -> None:
    """Refuse files beside the rank files that hold state this tool would lose.

    Raises:
        CheckpointError: names the first one
    """
    for path in paths:
        for other in sorted(path.parent.iterdir()):
            if _SEPARATE_OPTIMIZER.fullmatch(other.name):
                if drop_optimizer:
                    continue
                raise CheckpointError(
                    f'{other}: optimizer state in a file of its own, which is laid out by rank '
                    "and can't be carried; convert with --drop-optimizer, or train with "
                    '--ckpt-format torch_dist, which loads into any layout'
                )
            if other.name != FILE_NAME and other.suffix == '.pt':
                raise CheckpointError(
                    f'{other}: not a file that this tool knows (expected {FILE_NAME} only); '
                    "move it away if it isn't needed"
                )


def _parse(directory: Path, name: str) -> RankId:
    match = _RANK_DIR.fullmatch(name)
    tp, pp, ep = (
        None if field is None else int(field) for field in (match.groups() if match else [None] * 3)
    )
    rank = RankId(tp or 0, pp, ep)
    if rank.dirname != name:  # 2-digit and 3-digit numbers, more digits only where needed
        raise CheckpointError(
            f'{directory / name}: not a rank directory; expected mp_rank_TT, mp_rank_TT_PPP or '
            'mp_rank_TT_PPP_EEE'
        )
    return rank


def _are_of_experts(files: Sequence[Path], load_state: LoadState) -> bool:
    """Whether the second field of the directories' names is an expert rank, by ``args`` or keys."""
    args = load_state(files[0]).get('args')
    pipeline_size = number_in(args, 'pipeline_model_parallel_size')
    if pipeline_size is not None:
        return pipeline_size == 1 and (number_in(args, 'expert_model_parallel_size') or 1) > 1
    # stages differ in their ends, ranks of experts hold the same keys and both ends
    keys = {_keys(load_state(file)) for file in files}
    ends = {belongs_to_front(key) for found in keys for key in found if layer_of(key) is None}
    return len(files) > 1 and len(keys) == 1 and ends == {True, False}


def _keys(state: Mapping[str, Any]) -> frozenset[str]:
    model = state.get('model')
    keys = model if isinstance(model, Mapping) else ()
    return frozenset(key for key in keys if isinstance(key, str))


def _describe(directory: Path) -> str:
    """What a directory that isn't a legacy checkpoint looks like, and the way out."""
    names = {entry.name for entry in directory.iterdir()}
    if CONFIG_NAME in names:
        return (
            'a torch_dist checkpoint (metadata.json), expected legacy `torch` (mp_rank_*); '
            'torch_dist loads into any pipeline layout as it is, and weighted_merge.py merges it'
        )
    if '.metadata' in names or any(name.endswith('.distcp') for name in names):
        return (
            'a torch_dcp, fsdp_dtensor or unfinished torch_dist checkpoint, expected legacy '
            '`torch` (mp_rank_*); those formats load into any pipeline layout as they are'
        )
    if 'config.json' in names or any(name.endswith('.safetensors') for name in names):
        return 'a Hugging Face checkpoint, expected legacy `torch` (mp_rank_*)'
    return 'no mp_rank_* directories: not a legacy `torch` checkpoint'
