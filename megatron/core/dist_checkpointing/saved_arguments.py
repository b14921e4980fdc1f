"""What the arguments saved with a checkpoint say of its model, beside its keys.

Used where a checkpoint goes into a run of the other kind, GPT or hybrid. Saved arguments may be
missing, whole or in part: what isn't there is not compared.
"""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from .checkpoint_layout import CheckpointLayout
from .format_names import GPT, HYBRID
from .hybrid_checkpoint_interop import hybrid_checkpoint_pattern

# These say how the elements of attention weights are arranged, which no shape shows.
_ARRANGING = ('num_attention_heads', 'num_query_groups')
# These have no weights: a difference changes what the same weights compute.
_WEIGHTLESS = (
    'position_embedding_type',
    'normalization',
    'rotary_base',
    'rotary_percent',
    'rotary_interleaved',
    'use_rope_scaling',
    'norm_epsilon',
    'apply_layernorm_1p',
    'swiglu',
    'squared_relu',
    'openai_gelu',
    'moe_router_topk',
    'moe_router_score_function',
    'moe_router_pre_softmax',
    'moe_router_topk_scaling_factor',
    'moe_router_num_groups',
    'moe_router_group_topk',
    'apply_residual_connection_post_layernorm',
    'window_size',
    'rope_scaling_factor',
    'rotary_scaling_factor',
    'mscale',
    'mscale_all_dim',
    'quick_geglu',
    'glu_linear_offset',
    'activation_func_clamp_value',
    'softmax_type',
)
# These go by the number of a layer, which isn't the same in GPT and hybrid models.
_BY_LAYER_NUMBER = ('no_rope_freq', 'window_attn_skip_freq')


def arguments_in(state: Mapping[str, Any]) -> Any:
    """Arguments in a state dict, also those that were saved as a dict.

    Returns:
        an object that has them as attributes; without any where there are none.
    """
    found = state.get('args')
    if isinstance(found, Mapping):
        return SimpleNamespace(**{name: found[name] for name in found if isinstance(name, str)})
    return SimpleNamespace() if found is None else found


def saved_pattern(saved: Any) -> str | None:
    """Hybrid layer pattern in arguments; None for those of a GPT run."""
    return next(iter(_saved_patterns(saved).values()), None)


def _saved_patterns(saved: Any) -> dict[str, str]:
    """Argument -> pattern in it."""
    # The second name is the one before 0.16.
    names = [f'hybrid_{name}_pattern' for name in ('layer', 'override')]
    found = {name: getattr(saved, name, None) for name in names}
    return {name: text for name, text in found.items() if isinstance(text, str) and text}


def contradiction(saved: Any, layout: CheckpointLayout) -> str | None:
    """Why the arguments can't be those of the model whose keys the checkpoint has; else None."""
    patterns, num_layers = _saved_patterns(saved), getattr(saved, 'num_layers', None)
    name, pattern = next(iter(patterns.items()), ('', ''))
    other = next((p for p in patterns.values() if _main(p) != _main(pattern)), None)
    shown = f'its key {layout.evidence!r} is of a {layout.family} model'
    if layout.family == HYBRID and other:
        said = f'have the hybrid layer patterns {pattern!r} and {other!r}'
    elif layout.family == HYBRID and pattern:
        by_keys = hybrid_checkpoint_pattern(layout)
        if _may_be(_main(pattern), by_keys):
            return None
        said, shown = f'have the {name} {pattern!r}', f'its keys are of layers {by_keys!r}'
    elif layout.family == GPT and pattern:
        said = f'have the hybrid layer pattern {pattern!r}'
    elif layout.family == GPT and num_layers is not None and not _may_have(num_layers, layout):
        said = f'say {num_layers!r:.99} layers'
        shown = f'its key {layout.evidence!r} and others are of {layout.num_layers}'
    else:
        return None
    return (
        f'The checkpoint contradicts itself: its arguments {said}, {shown}. Load a checkpoint '
        f'whose files belong together.'
    )


def _main(pattern: str) -> str:
    """The pattern's layers, without those of multi-token prediction."""
    return pattern.partition('/')[0].replace('|', '')


def _may_be(pattern: str, by_keys: str) -> bool:
    """Whether a model of the pattern can have keys of such layers."""
    # Which kind of attention an `*` is followed from other arguments once.
    kinds = str.maketrans(dict.fromkeys('+D', '*'))
    pairs = zip(pattern.translate(kinds), by_keys.translate(kinds), strict=False)
    return len(pattern) == len(by_keys) and all(
        symbol == found or found == '?' or symbol not in 'M*-EG' for symbol, found in pairs
    )


def other_weights(own: Any, saved: Any) -> str | None:
    """Why the checkpoint's weights would be taken for others by a run of these arguments."""
    for name in _ARRANGING:
        found, expected = effective(own, name), effective(saved, name)
        if found is None or expected is None or found is expected:
            continue
        if found != expected:
            return (
                f'{name} is {found} in this run and was {expected} in the one that saved the '
                f'checkpoint: its attention weights would be cut in other places. '
                f'{_giving(name, expected, saved)}.'
            )
    smallest, largest = zip(_vocabulary(own), _vocabulary(saved), strict=True)
    if max(smallest) > min(largest):
        return (
            f'the vocabulary is {own.padded_vocab_size} with its padding in this run and was '
            f'{saved.padded_vocab_size}, which no vocabulary is padded to under both settings: '
            f'rows would be lost or zero. Use the tokenizer of the run that saved the checkpoint.'
        )
    return None


def _giving(name: str, value: Any, saved: Any) -> str:
    if name != 'num_query_groups':
        return f'Pass --{name.replace("_", "-")} {value}'
    if not getattr(saved, 'group_query_attention', False):
        return 'Leave out --group-query-attention'
    return f'Pass --group-query-attention --num-query-groups {value}'


def other_functions(own: Any, saved: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, value in the run and saved value of what the weights don't show and that differs."""
    for name in _WEIGHTLESS:
        if hasattr(own, name) and hasattr(saved, name):
            found, expected = getattr(own, name), getattr(saved, name)
            if found is not expected and found != expected:
                yield name, found, expected
    for name in _BY_LAYER_NUMBER:
        found, expected = getattr(own, name, None), getattr(saved, name, None)
        if any(isinstance(value, (int, list, str)) and value for value in (found, expected)):
            yield name, found, expected


def _may_have(num_layers: Any, layout: CheckpointLayout) -> bool:
    # Comparing with a number of any type, such as a tensor of several, can fail. Where layers
    # differ, the last may have no weights.
    if not isinstance(num_layers, int):
        return False
    return num_layers == layout.num_layers or (layout.indexed and num_layers > layout.num_layers)


def effective(args: Any, name: str) -> Any:
    """Value of an argument as the model takes it; None where the arguments lack it."""
    # Without grouped-query attention the number means nothing, and a GPT run overwrites it when it
    # counts floating point operations, after the load and before the save.
    if name == 'num_query_groups' and not getattr(args, 'group_query_attention', False):
        return getattr(args, 'num_attention_heads', None)
    return getattr(args, name, None)


def _vocabulary(args: Any) -> tuple[int, int]:
    """Smallest and largest vocabulary that is padded to the size which the arguments have."""
    names = ('padded_vocab_size', 'make_vocab_size_divisible_by', 'tensor_model_parallel_size')
    padded, multiple, tensor_parallel = (getattr(args, name, None) for name in names)
    if not isinstance(padded, int) or not isinstance(multiple, int) or not padded * multiple:
        return 0, 2**63
    if isinstance(tensor_parallel, int) and tensor_parallel:
        multiple *= tensor_parallel
    return padded - multiple + 1, padded
