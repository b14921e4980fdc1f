"""Summary of a checkpoint that DCP wrote: ``torch_dist``, ``fsdp_dtensor`` or ``torch_dcp``."""

import math
from collections.abc import Iterable
from pathlib import Path

from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import (
    MODEL,
    is_training_state,
    kind_of,
)
from megatron_overlay.standalone.dist_checkpointing.format_names import HYBRID, TORCH_DIST
from megatron_overlay.standalone.dist_checkpointing.stored_checkpoint import stored_optimizer_format
from megatron_overlay.standalone.dist_checkpointing.unstored_state import (
    unstored_options,
    unstored_state,
)
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..common.directory import FoundCheckpoint
from ..common.errors import CheckpointError
from ..common.paths import COMMON_FILE, parse_iteration_dirname
from ..common.stored import COMMON_KEY, check_stored_files, tensors_in
from ..merge.integrity import MANIFEST, read_manifest
from ..merge.source import read_config
from . import uses
from .resume import read_stored, resume_report
from .summary import (
    Amount,
    CheckpointSummary,
    ModelSummary,
    OptimizerState,
    amounts,
    count_files,
    parallel_sizes,
)


def summarise_distributed(found: FoundCheckpoint) -> CheckpointSummary:
    """Look at a checkpoint; its metadata and common state are read, no tensor is.

    Raises:
        CheckpointingException: something in it is missing, cut short, damaged, or would have to be
            run
    """
    directory, format_, metadata = found.directory, found.format, found.metadata
    if format_ == TORCH_DIST:
        read_config(directory)
    check_stored_files(directory, metadata)
    manifest = _manifest(directory)
    stored = read_stored(found)
    assert stored.layout is not None
    model = ModelSummary.of(stored.layout)
    report = resume_report(metadata, stored) if format_ == TORCH_DIST else None
    parallel = parallel_sizes(stored.args)
    iteration = stored.common.get('iteration')
    if not isinstance(iteration, int):
        iteration = parse_iteration_dirname(directory.name)
    tensors = tensors_in(metadata)
    training = {key: entry for key, entry in tensors.items() if is_training_state(key)}
    weights = {key: entry for key, entry in tensors.items() if kind_of(key) == MODEL}
    counted = sum(map(_bytes, [*training.values(), *weights.values()]))
    all_tensors = sum(map(_bytes, tensors.values()))
    objects = sum(
        info.length for index, info in metadata.storage_data.items() if index.fqn not in tensors
    )
    files, file_bytes = count_files(directory)
    options = unstored_options(unstored_state(stored))
    return CheckpointSummary(
        directory=directory,
        load=' '.join([found.load, *options]) if found.load else '',
        format=format_,
        iteration=iteration,
        model=model,
        parallel=parallel,
        parallel_from='the saved arguments' if parallel else '',
        weights=_amounts(weights.values()),
        optimizer=OptimizerState(
            stored_optimizer_format(stored),
            None if report is None else sorted(report.steps),
            _amounts(training.values()),
        ),
        other_bytes=all_tensors - counted + objects,
        common_state=_common_form(directory, metadata),
        manifest_files=None if manifest is None else len(manifest),
        files=files,
        file_bytes=file_bytes,
        uses=[
            uses.weighted_merge(directory),
            uses.converter_of_distributed(format_),
            (uses.hybrid_into_gpt if model.family == HYBRID else uses.gpt_into_hybrid)(stored),
            uses.resume(stored, report),
        ],
    )


def _manifest(directory: Path) -> dict[str, str] | None:
    manifest = read_manifest(directory)
    for name in manifest or {}:
        if not (directory / name).is_file():
            raise CheckpointError(f'{directory / name}: no such file, but {MANIFEST} names it')
    return manifest


def _common_form(directory: Path, metadata: Metadata) -> str:
    forms = [COMMON_FILE] if (directory / COMMON_FILE).exists() else []
    forms += [key for key in metadata.state_dict_metadata if key == COMMON_KEY]
    return ' and '.join(forms) or 'none'


def _amounts(entries: Iterable[TensorStorageMetadata]) -> dict[str, Amount]:
    return amounts((entry.properties.dtype, _bytes(entry)) for entry in entries)


def _bytes(entry: TensorStorageMetadata) -> int:
    return math.prod(entry.size) * entry.properties.dtype.itemsize
