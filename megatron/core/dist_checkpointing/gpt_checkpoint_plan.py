"""What loading a GPT checkpoint into a hybrid model will do, told from its metadata alone.

A look before a job waits in a queue.
"""

from megatron.core.dist_checkpointing.checkpoint_layout import layout_from_metadata
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.load_plan import (
    GPT,
    HYBRID,
    LEGACY_REFUSAL,
    LoadPlan,
    StoredCheckpoint,
    any_run,
    needs_undistributed_optimizer,
    plan_load,
    stored_optimizer_format,
)
from megatron.core.optimizer.resume_report import read_common_state

try:
    from megatron_overlay.tools.checkpoint.common.directory import LEGACY, find_checkpoint
    from megatron_overlay.tools.checkpoint.common.stdout import printable, tell
except ModuleNotFoundError:
    # In a checkout the tools are beside the overlay's package, not below it.
    from tools.checkpoint.common.directory import LEGACY, find_checkpoint
    from tools.checkpoint.common.stdout import printable, tell


def report(checkpoint: str, pattern: str) -> int:
    """Print which hybrid layer reads what, and whether the load will work.

    Args:
        checkpoint: as for ``--load``.
        pattern: as in ``--hybrid-layer-pattern``.

    Returns:
        0 when it will, 1 when it won't; the reason is the last line.
    """
    try:
        lines = list(_lines(checkpoint, pattern))
    except CheckpointingException as error:
        tell(f'Will not load: {printable(str(error))}')
        return 1
    return 0 if tell('\n'.join(map(printable, lines))) else 1


def _lines(checkpoint: str, pattern: str):
    found = find_checkpoint(checkpoint)
    if not found.given_to_load:
        raise CheckpointingException(
            f'--load {checkpoint} finds no latest_checkpointed_iteration.txt there, and the run '
            f'starts from random weights; pass '
            f'{found.load or "--load with a directory above it whose tracker names it"}.'
        )
    if found.format == LEGACY or found.metadata is None:
        raise CheckpointingException(f'{found.directory}: {LEGACY_REFUSAL}.')
    layout = layout_from_metadata(found.metadata)
    if layout.family != GPT:
        raise CheckpointingException(
            f'{found.directory}: its keys are of a {layout.family} model'
            f'{f" ({layout.evidence})" if layout.evidence else ""}, not of a GPT model.'
        )
    common = read_common_state(found.directory, found.metadata)
    stored = StoredCheckpoint(layout, common, found.format, found.release, str(found.directory))
    plan = plan_load(stored, any_run(stored, hybrid_layer_pattern=pattern), HYBRID)
    if plan.refusal:
        raise CheckpointingException(plan.refusal)
    kept = 'one by one' if layout.indexed else 'stacked along an axis'
    yield f'{found.directory}: GPT, {layout.num_layers} layers, stored {kept}'
    yield from _sources(stored, plan)
    yield from (note for note in plan.notes if note.startswith('WARNING'))
    yield f'Optimizer state: {stored_optimizer_format(stored)}'
    yield _verdict(stored, plan)


def _sources(stored: StoredCheckpoint, plan: LoadPlan):
    layout, maps = stored.layout, plan.layer_maps
    assert layout is not None and maps is not None
    sources = {
        **{
            hybrid: f'attention of GPT layer {gpt}' for hybrid, gpt in maps.attention_to_gpt.items()
        },
        **{
            hybrid: f'{layout.mlp_kinds[gpt]} MLP of GPT layer {gpt}'
            for hybrid, gpt in maps.mlp_to_gpt.items()
        },
        **{hybrid: 'fresh initialisation' for hybrid in maps.fresh_init},
    }
    for hybrid, source in sorted(sources.items()):
        yield f'  hybrid layer {hybrid:3}  <-  {source}'
    if maps.mtp_pattern:
        depths = f'  MTP {maps.mtp_pattern!r}, {maps.mtp_depths} depth(s)'
        yield f'{depths}  <-  {layout.mtp_depths} MTP layer(s)'
        if maps.mtp_depths > layout.mtp_depths:
            yield '  one MTP layer for all depths: the run needs --mtp-use-repeated-layer'


def _verdict(stored: StoredCheckpoint, plan: LoadPlan) -> str:
    if stored.release:
        return 'Will load; the optimizer starts fresh, as from any release.'
    if plan.optimizer_refusal:
        return f'Will load with --no-load-optim. {plan.optimizer_refusal}'
    if needs_undistributed_optimizer(stored):
        return 'Will load, with its optimizer state in a run without --use-distributed-optimizer.'
    return 'Will load, with its optimizer state.'
