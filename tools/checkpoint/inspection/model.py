"""The model behind a checkpoint's keys."""

import re

from megatron.core.dist_checkpointing.checkpoint_layout import MOE, CheckpointLayout

from .summary import Model

_LAYER = re.compile(r'(?:(?:model\d*|module)\.)*decoder\.layers\.(\d+)\.(.+)', re.DOTALL)


def describe_model(layout: CheckpointLayout) -> Model:
    """What the keys tell."""
    kinds = list(layout.mlp_kinds.values())
    return Model(
        family=layout.family,
        evidence=layout.evidence,
        layers=layout.num_layers,
        stored_by='index' if layout.indexed else 'axis',
        pattern=hybrid_pattern(layout) if layout.family == 'hybrid' else None,
        dense=len(kinds) - kinds.count(MOE),
        moe=kinds.count(MOE),
        latent_attention=layout.latent_attention,
        mtp_layers=layout.mtp_depths,
    )


def hybrid_pattern(layout: CheckpointLayout) -> str:
    """The layers of a hybrid model, one symbol each; ``?`` where the keys don't show a kind."""
    symbols = ['?'] * layout.num_layers
    for key in layout.keys:
        if match := _LAYER.fullmatch(key):
            layer, part = int(match.group(1)), match.group(2)
            if part.startswith('mixer.'):
                symbols[layer] = 'M'
            elif part.startswith('self_attention.'):
                symbols[layer] = '+' if layout.latent_attention else '*'
            elif part.startswith('mlp.'):
                symbols[layer] = 'E' if layout.mlp_kinds[layer] == MOE else '-'
    return ''.join(symbols)
