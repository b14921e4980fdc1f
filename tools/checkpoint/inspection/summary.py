"""What is known of a checkpoint: data, and how it goes to machines."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_layout import MOE, CheckpointLayout
from megatron_overlay.standalone.dist_checkpointing.format_names import HYBRID
from megatron_overlay.standalone.dist_checkpointing.hybrid_checkpoint_interop import (
    hybrid_checkpoint_pattern,
)

from ..common.numbers import number_in
from ..common.tensors import dtype_name


@dataclass(frozen=True)
class Amount:
    """Tensors and their bytes."""

    tensors: int
    bytes: int


@dataclass(frozen=True)
class Use:
    """Whether one of the tools or loads takes the checkpoint.

    Attributes:
        name: of the tool or load
        works: it takes the checkpoint, if asked as ``reason`` says; None where that can't be told
            in this environment
        reason: one line: with which options, or why not
    """

    name: str
    works: bool | None
    reason: str


@dataclass(frozen=True)
class ModelSummary:
    """The model behind a checkpoint, as its keys tell.

    Attributes:
        family: ``gpt``, ``hybrid``, or ``other`` where the keys show neither
        evidence: a key that showed it
        layers: decoder layers; for a hybrid model those of its pattern
        stored_by: ``axis`` where layers are stacked along one, ``index`` where it is in the key
        pattern: of a hybrid model, as in ``--hybrid-layer-pattern``, ``?`` for an unknown layer;
            None for other models
        dense, moe: number of layers with an MLP of that kind
        latent_attention: the attention is multi-latent
        mtp_layers: multi-token prediction layers
    """

    family: str
    evidence: str
    layers: int
    stored_by: str
    pattern: str | None
    dense: int
    moe: int
    latent_attention: bool
    mtp_layers: int

    @classmethod
    def of(cls, layout: CheckpointLayout) -> Self:
        kinds = list(layout.mlp_kinds.values())
        return cls(
            family=layout.family,
            evidence=layout.evidence,
            layers=layout.num_layers,
            stored_by='index' if layout.indexed else 'axis',
            pattern=hybrid_checkpoint_pattern(layout) if layout.family == HYBRID else None,
            dense=len(kinds) - kinds.count(MOE),
            moe=kinds.count(MOE),
            latent_attention=layout.latent_attention,
            mtp_layers=layout.mtp_depths,
        )


def counted_layers(layers: int, indexed: bool) -> str:
    """A GPT model's layers and how their weights are stored, in words."""
    where = 'tensors of their own' if indexed else 'stacked tensors'
    return f'{layers} layer{"s" if layers != 1 else ""} in {where}'


@dataclass(frozen=True)
class OptimizerState:
    """Optimizer state.

    Attributes:
        format: its layout, such as ``fully_reshardable``; ``none`` without
        steps: step counts in the parameter groups; None where they weren't looked at
        amounts: tensors and bytes by dtype
    """

    format: str
    steps: list[int] | None
    amounts: dict[str, Amount]


@dataclass(frozen=True)
class CheckpointSummary:
    """One checkpoint. ``str()`` gives the report that the command line prints.

    Attributes:
        directory: of the iteration
        load: arguments with which a run loads it; empty where none do
        format: ``torch_dist``, ``torch`` (legacy), ``fsdp_dtensor`` or ``torch_dcp``
        iteration: as stored, else as the directory's name has it; None where neither does
        model: what the keys tell of the model
        parallel: parallel sizes of the run that saved it, by their usual short names
        parallel_from: where those sizes come from; empty where nothing tells
        weights: tensors and bytes of the model by dtype; in ``torch`` each rank's shards count
        optimizer: optimizer state
        other_bytes: bytes of all else that the metadata names, such as random states
        common_state: where values that aren't sharded stand
        manifest_files: files that ``integrity.json`` has a checksum of; None without one
        files: number of files
        file_bytes: their size
        uses: which tools and loads take it
    """

    directory: Path
    load: str
    format: str
    iteration: int | None
    model: ModelSummary
    parallel: dict[str, int]
    parallel_from: str
    weights: dict[str, Amount]
    optimizer: OptimizerState
    other_bytes: int
    common_state: str
    manifest_files: int | None
    files: int
    file_bytes: int
    uses: list[Use]

    def as_json(self) -> dict[str, Any]:
        """The same as one JSON object."""
        return dataclasses.asdict(self) | {'directory': str(self.directory)}

    def __str__(self) -> str:
        from .report import summary_text

        return summary_text(self)


def amounts(tensors: Iterable[tuple[torch.dtype, int]]) -> dict[str, Amount]:
    """Number and bytes of tensors by their dtype's name, of the dtype and bytes of each."""
    found: dict[str, Amount] = {}
    for dtype, size in tensors:
        before = found.get(dtype_name(dtype), Amount(0, 0))
        found[dtype_name(dtype)] = Amount(before.tensors + 1, before.bytes + size)
    return found


def parallel_sizes(args: Any) -> dict[str, int]:
    """Parallel sizes by short name, from the arguments of the run that saved a checkpoint."""
    names = {
        'TP': 'tensor_model_parallel_size',
        'PP': 'pipeline_model_parallel_size',
        'VPP': 'virtual_pipeline_model_parallel_size',
        'EP': 'expert_model_parallel_size',
        'CP': 'context_parallel_size',
        'DP': 'data_parallel_size',
        'ranks': 'world_size',
    }
    sizes = {short: number_in(args, name) for short, name in names.items()}
    return {short: size for short, size in sizes.items() if size is not None}


def count_files(directory: Path) -> tuple[int, int]:
    """Number and bytes of all files below a directory."""
    sizes = [path.stat().st_size for path in directory.rglob('*') if path.is_file()]
    return len(sizes), sum(sizes)
