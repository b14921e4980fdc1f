"""What loading a hybrid checkpoint into a GPT model will do, told from its metadata alone.

The command line of :mod:`hybrid_checkpoint_interop`.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.checkpoint_layout import (
    CheckpointLayout,
    layout_from_metadata,
)
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import GPTCompatLayerMaps
from megatron.core.dist_checkpointing.gpt_checkpoint_plan import (
    checkpoint_directory,
    describe_optimizer,
    load_dcp_metadata,
)
from megatron.core.dist_checkpointing.hybrid_checkpoint_interop import (
    hybrid_checkpoint_layer_maps,
    hybrid_checkpoint_pattern,
)
from megatron.core.optimizer.resume_report import read_common_state


def main(argv: list[str] | None = None) -> int:
    """Print which GPT layer reads what, and whether the load will work.

    Returns:
        0 when it will, 1 when it won't; the reason is the last line.
    """
    parser = argparse.ArgumentParser(
        prog='python -m megatron.core.dist_checkpointing.hybrid_checkpoint_interop',
        description='Tell what loading a hybrid checkpoint into a GPT model will do. Reads '
        'metadata only.',
    )
    parser.add_argument(
        'checkpoint', help='an iter_XXXXXXX or release directory, or the directory above it'
    )
    options = parser.parse_args(argv)
    try:
        directory = checkpoint_directory(options.checkpoint)
        metadata = load_dcp_metadata(directory)
        layout = layout_from_metadata(metadata)
        if layout.family != 'hybrid':
            raise CheckpointingException(
                f'{directory}: its keys are of a {layout.family} model'
                f'{f" ({layout.evidence})" if layout.evidence else ""}, not of a hybrid model.'
            )
        if not layout.evidence.startswith('decoder.'):
            raise CheckpointingException(
                f'{directory}: its keys ({layout.evidence}) are those of another format, expected '
                f'a checkpoint saved with --ckpt-format torch_dist.'
            )
        layer_maps = hybrid_checkpoint_layer_maps(layout)
        common = read_common_state(Path(directory), metadata)
        lines = list(describe(directory, layout, layer_maps, common))
    except (CheckpointingException, ValueError) as error:
        print(f'Will not load: {error}')
        return 1
    print('\n'.join(lines))
    return 0


def describe(
    directory: str,
    layout: CheckpointLayout,
    layer_maps: GPTCompatLayerMaps,
    common: Mapping[str, Any],
):
    """Lines of the report; ``common`` is the checkpoint's common state."""
    yield f'{directory}: hybrid, {layout.num_layers} layers {hybrid_checkpoint_pattern(layout)}'
    pairs = zip(layer_maps.attention_to_gpt, layer_maps.mlp_to_gpt, strict=True)
    for gpt_layer, (attention, mlp) in enumerate(pairs):
        yield (
            f'  GPT layer {gpt_layer:3}  <-  attention of hybrid layer {attention}, '
            f'{layout.mlp_kinds[mlp]} MLP of hybrid layer {mlp}'
        )
    yield f'The GPT run needs --num-layers {layer_maps.num_gpt_layers}.'
    yield from describe_optimizer(layout, common)
