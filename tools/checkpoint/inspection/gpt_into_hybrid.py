"""What loading a GPT checkpoint into a hybrid model will do, told from its metadata alone.

A look before a job waits in a queue.
"""

from typing import Any

from megatron_overlay.standalone.dist_checkpointing.checkpoint_layout import (
    CheckpointLayout,
    layout_from_metadata,
)
from megatron_overlay.standalone.dist_checkpointing.format_names import GPT, HYBRID, LEGACY
from megatron_overlay.standalone.dist_checkpointing.gpt_layer_maps import GPTCompatLayerMaps
from megatron_overlay.standalone.dist_checkpointing.load_plan import (
    LEGACY_REFUSAL,
    LoadPlan,
    any_run,
    in_place_of_attention,
    plan_load,
    words_on_optimizer,
)
from megatron_overlay.standalone.dist_checkpointing.stored_checkpoint import (
    StoredCheckpoint,
    stored_optimizer_format,
)
from megatron_overlay.standalone.dist_checkpointing.unstored_state import (
    unstored_reason,
    unstored_state,
)

from megatron_overlay.errors import CheckpointingException

from ..common.directory import FoundCheckpoint, find_checkpoint
from ..common.errors import CheckpointError
from ..common.paths import TRACKER_NAME
from ..common.stdout import printable, tell
from ..common.stored import check_stored_files
from .resume import read_stored
from .summary import counted_layers


def dry_run(checkpoint: str, pattern: str, ckpt_step: int | None = None, **arguments: Any) -> int:
    """Print which hybrid layer reads what, and whether the load will work.

    Args:
        checkpoint: as for ``--load``.
        pattern: as in ``--hybrid-layer-pattern``.
        ckpt_step: as in ``--ckpt-step``.
        arguments: of the run, where they aren't those of the one that saved the checkpoint.

    Returns:
        0 when it will, with the options that the last line names; 1 when it won't, and that line is
        the reason.
    """
    try:
        found = find_checkpoint(checkpoint, ckpt_step)
        lines = list(_lines(checkpoint, found, hybrid_layer_pattern=pattern, **arguments))
    except CheckpointingException as error:
        tell(f'Will not load: {printable(str(error))}')
        return 1
    return 0 if tell('\n'.join(map(printable, lines))) else 1


def _lines(checkpoint: str, found: FoundCheckpoint, **arguments: Any):
    if not found.given_to_load:
        raise CheckpointError(
            f'--load {checkpoint} finds no {TRACKER_NAME} there, and the run '
            f'starts from random weights; pass '
            f'{found.load or "--load with a directory above it whose tracker names it"}.'
        )
    if found.format == LEGACY:
        raise CheckpointError(f'{found.directory}: {LEGACY_REFUSAL}.')
    layout = layout_from_metadata(found.metadata)
    if layout.family != GPT:
        raise CheckpointError(
            f'{found.directory}: its keys are of a {layout.family} model'
            f'{f" ({layout.evidence})" if layout.evidence else ""}, not of a GPT model.'
        )
    check_stored_files(found.directory, found.metadata)
    stored = read_stored(found, layout)
    plan = plan_load(stored, any_run(stored, **arguments), HYBRID)
    if plan.refusal:
        raise CheckpointError(plan.refusal)
    yield f'{found.directory}: GPT, {counted_layers(layout.num_layers, layout.indexed)}'
    yield from _sources(stored, plan)
    yield from (note for note in plan.notes if note.startswith('WARNING'))
    yield f'Optimizer state: {stored_optimizer_format(stored)}'
    unstored, verdict = unstored_reason(unstored_state(stored)), words_on_optimizer(stored, plan)[0]
    yield verdict if unstored in verdict else f'{verdict} {unstored}'


def _sources(stored: StoredCheckpoint, plan: LoadPlan):
    layout, maps = stored.layout, plan.layer_maps
    assert layout is not None and maps is not None
    for hybrid in range(len(maps.symbols)):
        yield f'  hybrid layer {hybrid:3}  <-  {_source(hybrid, maps, layout)}'
    for gpt in maps.replaced:
        yield f'  attention of GPT layer {gpt}: replaced by {in_place_of_attention(maps, gpt)}'
    if maps.mtp_pattern:
        depths = f'  MTP {maps.mtp_pattern!r}, {maps.mtp_depths} depth(s)'
        yield f'{depths}  <-  {layout.mtp_depths} MTP layer(s)'
        if maps.mtp_depths > layout.mtp_depths:
            yield '  one MTP layer for all depths: the run needs --mtp-use-repeated-layer'


def _source(hybrid: int, maps: GPTCompatLayerMaps, layout: CheckpointLayout) -> str:
    if hybrid in maps.mlp_to_gpt:
        gpt = maps.mlp_to_gpt[hybrid]
        return f'{layout.mlp_kinds[gpt]} MLP of GPT layer {gpt}'
    if hybrid in maps.attention_to_gpt:
        sparse = maps.symbols[hybrid] == 'D' and maps.fresh_indexers
        indexer = '; its indexer: fresh initialisation' if sparse else ''
        return f'attention of GPT layer {maps.attention_to_gpt[hybrid]}{indexer}'
    if hybrid in maps.warm_start:
        gpt = maps.warm_start[hybrid]
        return f'x, B, C, output and norm: attention of GPT layer {gpt}; the rest: fresh'
    return 'fresh initialisation'
