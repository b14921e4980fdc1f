"""What loading a GPT checkpoint into a hybrid model will do, told from its metadata alone.

A look before a job waits in a queue.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.checkpoint_layout import (
    CheckpointLayout,
    layout_from_metadata,
)
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    MODEL_SPACE_FORMATS,
    GPTCompatLayerMaps,
    gpt_compatible_layer_maps,
    stored_optimizer_format,
)
from megatron.core.dist_checkpointing.saved_arguments import contradiction
from megatron.core.optimizer.resume_report import read_common_state

try:
    from megatron_overlay.tools.checkpoint.common.paths import (
        RELEASE,
        iteration_dirname,
        read_tracker,
    )
    from megatron_overlay.tools.checkpoint.common.safe_load import load_dcp_metadata
    from megatron_overlay.tools.checkpoint.common.stdout import printable, tell
except ModuleNotFoundError:
    # In a checkout the tools are beside the overlay's package, not below it.
    from tools.checkpoint.common.paths import RELEASE, iteration_dirname, read_tracker
    from tools.checkpoint.common.safe_load import load_dcp_metadata
    from tools.checkpoint.common.stdout import printable, tell

_TRACKER = 'latest_checkpointed_iteration.txt'


def report(checkpoint: str, pattern: str) -> int:
    """Print which hybrid layer reads what, and whether the load will work.

    Args:
        checkpoint: as for ``--load``, or the directory of one iteration.
        pattern: as in ``--hybrid-layer-pattern``.

    Returns:
        0 when it will, 1 when it won't; the reason is the last line.
    """
    try:
        directory = checkpoint_directory(checkpoint)
        metadata = load_dcp_metadata(directory)
        layout = layout_from_metadata(metadata)
        if layout.family != 'gpt':
            raise CheckpointingException(
                f'{directory}: its keys are of a {layout.family} model'
                f'{f" ({layout.evidence})" if layout.evidence else ""}, not of a GPT model.'
            )
        layer_maps = gpt_compatible_layer_maps(pattern, layout)
        common = read_common_state(Path(directory), metadata)
        reason = contradiction(common.get('args'), layout)
        if reason:
            raise CheckpointingException(reason)
        lines = list(describe(directory, layout, layer_maps, common))
    except (CheckpointingException, ValueError) as error:
        tell(f'Will not load: {printable(str(error))}')
        return 1
    return 0 if tell('\n'.join(map(printable, lines))) else 1


def checkpoint_directory(path: str) -> str:
    """The checkpoint that ``--load path`` takes, or ``path`` itself if it is one.

    Raises:
        CheckpointingException: there is none.
    """
    if os.path.isfile(os.path.join(path, _TRACKER)):
        path = os.path.join(path, iteration_dirname(read_tracker(path)))
    if not os.path.isdir(path):
        raise CheckpointingException(f'{path or "(empty path)"}: no such directory.')
    if not os.path.isfile(os.path.join(path, '.metadata')):
        raise CheckpointingException(
            f'{path}: no .metadata there, so it is no distributed checkpoint or was not finished; '
            f'expected one saved with --ckpt-format torch_dist.'
        )
    return path


def describe(
    directory: str,
    layout: CheckpointLayout,
    layer_maps: GPTCompatLayerMaps,
    common: Mapping[str, Any],
):
    """Lines of the report; ``common`` is the checkpoint's common state."""
    stored = 'one by one' if layout.indexed else 'stacked along an axis'
    yield f'{directory}: GPT, {layout.num_layers} layers, stored {stored}'
    sources = {
        **{
            hybrid: f'attention of GPT layer {gpt}'
            for hybrid, gpt in layer_maps.attention_to_gpt.items()
        },
        **{
            hybrid: f'{layout.mlp_kinds[gpt]} MLP of GPT layer {gpt}'
            for hybrid, gpt in layer_maps.mlp_to_gpt.items()
        },
        **{hybrid: 'fresh initialisation' for hybrid in layer_maps.fresh_init},
    }
    for hybrid, source in sorted(sources.items()):
        yield f'  hybrid layer {hybrid:3}  <-  {source}'
    if layer_maps.mtp_pattern:
        depths = layer_maps.mtp_depths
        stored = f'{layout.mtp_depths} MTP layer(s)'
        yield f'  MTP {layer_maps.mtp_pattern!r}, {depths} depth(s)  <-  {stored}'
        if depths > layout.mtp_depths:
            yield '  one MTP layer for all depths: the run needs --mtp-use-repeated-layer'
    elif layout.mtp_depths:
        yield f'  the {layout.mtp_depths} MTP layer(s) of the checkpoint are not read'
    if not layer_maps.keeps_gpt_order:
        yield (
            'Not in the order of a GPT model, each MLP after its attention: the same weights will '
            'compute something else.'
        )
    yield from describe_optimizer(layout, common, Path(directory).name == RELEASE)


def describe_optimizer(layout: CheckpointLayout, common: Mapping[str, Any], release: bool):
    """Lines of the report that say what happens to the optimizer state."""
    sharding_type = optimizer_format(layout, common)
    yield f'Optimizer state: {sharding_type or "none"}'
    if release:
        yield 'Will load; the optimizer starts fresh, as from any release.'
    elif sharding_type is None:
        yield 'Will load with --no-load-optim.'
    elif sharding_type in MODEL_SPACE_FORMATS:
        yield 'Will load, with its optimizer state.'
    else:
        yield (
            'Will load with --no-load-optim; with its optimizer state only after saving it again '
            'with --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable.'
        )


def optimizer_format(layout: CheckpointLayout, common: Mapping[str, Any]) -> str | None:
    """Sharding type of the distributed optimizer's state; None for no optimizer state at all."""
    if not layout.has_optimizer:
        return None
    stored = stored_optimizer_format(common.get('content_metadata'), common.get('args'))
    return stored or 'not of a distributed optimizer'
