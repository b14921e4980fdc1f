"""What the saved arguments and the keys tell of how a model's parameters are called."""

from collections import defaultdict
from typing import Any

from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import (
    DECODER,
    MODEL,
    MTP,
    kind_of,
    parse_key,
)
from megatron_overlay.standalone.dist_checkpointing.checkpoint_layout import CheckpointLayout
from megatron_overlay.standalone.dist_checkpointing.format_names import GPT, HYBRID
from megatron_overlay.standalone.dist_checkpointing.fsdp_mixers import (
    MODULE,
    PARAMETERS,
    convolution,
)
from megatron_overlay.standalone.dist_checkpointing.hybrid_checkpoint_interop import (
    hybrid_checkpoint_pattern,
)
from megatron_overlay.standalone.dist_checkpointing.pattern_symbols import Symbols
from megatron_overlay.standalone.dist_checkpointing.saved_arguments import (
    contradiction,
    saved_pattern,
)

from ..common.errors import CheckpointError, shown
from .fsdp_names import Names

_KNOWN_SYMBOLS = {
    *(Symbols.MAMBA, Symbols.ATTENTION, Symbols.MLA, Symbols.MLP, Symbols.MOE),
    *(Symbols.PIPE, Symbols.MTP_SEPARATOR),
}
# Where megatron-core keeps its hybrid stack, now and before, and how it is called there.
_SPEC_MODULES = (
    'megatron.core.models.hybrid.hybrid_layer_specs',
    'megatron.core.models.mamba.mamba_layer_specs',
)
_STACK_SPECS = ('hybrid_stack_spec', 'mamba_stack_spec')
# An argument of the first release in which a Mamba mixer's convolution is no module.
_SINCE_PARAMETERS = 'mamba_training_ssm_states_dtype'

_UNKNOWN_MODELS = {
    'mla_down_proj_fusion': 'a fused down projection',
    'heterogeneous_layers_config_path': 'heterogeneous layers',
    'linear_attention_freq': 'linear attention',
    'experimental_attention_variant': 'an experimental attention',
    'quick_geglu': 'a gated unit other than --swiglu',
    'spec': 'a layer spec of its own',
}


def names_of_model(args: Any, layout: CheckpointLayout, where: object) -> Names:
    """How the parameters are called, by the saved arguments.

    Args:
        args: saved arguments
        layout: of the checkpoint, as its keys tell
        where: the checkpoint's directory, for messages

    Raises:
        CheckpointError: they don't tell, contradict the keys, or are of a model that isn't known
    """
    if not hasattr(args, 'num_layers'):
        raise CheckpointError(f'{where}: no saved arguments, which tell how parameters are called')
    for name, what in _UNKNOWN_MODELS.items():
        if getattr(args, name, None) and not (name == 'spec' and _is_cores_stack(args, layout)):
            raise CheckpointError(
                f'{where}: args.{name} is {shown(getattr(args, name))}: how {what} is stored in '
                'one format and the other is not known here'
            )
    built_of = getattr(args, 'transformer_impl', None)
    if built_of not in ('local', 'transformer_engine'):
        raise CheckpointError(
            f'{where}: args.transformer_impl is {shown(built_of)}, expected local or '
            'transformer_engine'
        )
    if layout.family == HYBRID:
        _refuse_other_layers(args, layout, where)
    elif layout.family != GPT:
        raise CheckpointError(
            f'{where}: neither a GPT nor a hybrid model by its keys; how others are stored in one '
            'format and the other is not known here'
        )
    _refuse_other_sizes(args, layout, where)
    _refuse_uneven_depths(layout, where)
    return _names(args, layout)


def _names(args: Any, layout: CheckpointLayout) -> Names:
    local = args.transformer_impl == 'local' and not getattr(args, 'spec', None)
    frequency = getattr(args, 'moe_layer_freq', 1)
    grouped = bool(getattr(args, 'moe_grouped_gemm', False))
    if layout.family == HYBRID:
        grouped = not local  # the stack of Transformer Engine's layers groups them in any case
    return Names(
        layers=layout.num_layers,
        experts=getattr(args, 'num_experts', None) or 0,
        stacked=layout.family == GPT and isinstance(frequency, int) and frequency == 1,
        local=local,
        grouped=grouped,
        gated=bool(getattr(args, 'swiglu', False)),
        latent=bool(getattr(args, 'multi_latent_attention', False)),
        family=layout.family,
        convolution=convolution() or _saved_convolution(args),
    )


def _saved_convolution(args: Any) -> str:
    return PARAMETERS if hasattr(args, _SINCE_PARAMETERS) else MODULE


def _is_cores_stack(args: Any, layout: CheckpointLayout) -> bool:
    """Whether ``--spec`` is the one that hybrid runs had to give for megatron-core's own layers."""
    module, _, name = '.'.join(args.spec).rpartition('.')
    return layout.family == HYBRID and module in _SPEC_MODULES and name in _STACK_SPECS


def _refuse_other_layers(args: Any, layout: CheckpointLayout, where: object) -> None:
    """Of a hybrid model only layers are converted whose parts are known, as its pattern has them.

    Raises:
        CheckpointError: the pattern has others, or contradicts the keys
    """
    pattern = saved_pattern(args)
    if pattern is None:
        raise CheckpointError(
            f'{where}: of a hybrid model ({layout.evidence}), and args.hybrid_layer_pattern is '
            f'{shown(getattr(args, "hybrid_layer_pattern", None))}, expected its layers'
        )
    for symbol in pattern:
        if symbol not in _KNOWN_SYMBOLS:
            raise CheckpointError(
                f'{where}: args.hybrid_layer_pattern is {shown(pattern)}: how layers '
                f'{symbol!r} are stored in one format and the other is not known here'
            )
    if reason := contradiction(args, layout):
        raise CheckpointError(f'{where}: {reason}')
    _refuse_uneven_layers(hybrid_checkpoint_pattern(layout), layout, where)


def _refuse_other_sizes(args: Any, layout: CheckpointLayout, where: object) -> None:
    """Layers, kind of attention and depths are those of the arguments."""
    if layout.num_layers != args.num_layers:
        raise CheckpointError(
            f'{where}: {layout.num_layers} layers are stored, args.num_layers is '
            f'{shown(args.num_layers)}'
        )
    latent = bool(getattr(args, 'multi_latent_attention', False))
    if layout.latent_attention != latent:
        raise CheckpointError(
            f'{where}: args.multi_latent_attention is {latent}, and the keys are those of '
            f'{"multi-latent" if layout.latent_attention else "other"} attention'
        )
    depths = getattr(args, 'mtp_num_layers', None) or 0
    if getattr(args, 'mtp_use_repeated_layer', False):
        depths = min(depths, 1)
    if layout.mtp_depths != depths:
        raise CheckpointError(
            f'{where}: {layout.mtp_depths} depths of multi-token prediction are stored, expected '
            f'{depths} by args.mtp_num_layers'
        )


def _refuse_uneven_layers(pattern: str, layout: CheckpointLayout, where: object) -> None:
    """Every layer of a hybrid model has the weights that others of its symbol have."""
    parts: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for key in layout.sizes:
        layer = parse_key(key).decoder_layer
        if kind_of(key) == MODEL and layer is not None:
            parts[pattern[layer]][layer].add(parse_key(key).part)
    for of_symbol in parts.values():
        everywhere = set().union(*of_symbol.values())
        for layer, found in of_symbol.items():
            if missing := sorted(everywhere - found):
                raise CheckpointError(
                    f'{where}: no {DECODER}.{layer}.{missing[0]}, which other layers '
                    f'{pattern[layer]!r} have; the checkpoint is damaged, take another'
                )


def _refuse_uneven_depths(layout: CheckpointLayout, where: object) -> None:
    """Every depth of multi-token prediction has the weights that the others have."""
    parts: dict[str, set[int]] = defaultdict(set)
    for key in layout.sizes:
        parsed = parse_key(key)
        if kind_of(key) == MODEL and parsed.block == MTP and parsed.layer is not None:
            parts[parsed.part].add(parsed.layer)
    for part, found in parts.items():
        if missing := set(range(layout.mtp_depths)) - found:
            raise CheckpointError(
                f'{where}: no {MTP}.{min(missing)}.{part}, which other depths of multi-token '
                'prediction have; the checkpoint is damaged, take another'
            )
