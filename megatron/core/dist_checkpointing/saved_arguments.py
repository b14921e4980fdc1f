"""What the arguments saved with a checkpoint say of its model, beside its keys.

Used where a checkpoint goes into a run of the other kind, GPT or hybrid. Saved arguments may be
missing, whole or in part: what isn't there is not compared.
"""

from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing.checkpoint_layout import CheckpointLayout

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


def saved_pattern(saved: Any) -> str | None:
    """Hybrid layer pattern in arguments; None for those of a GPT run."""
    # The second name is the one before 0.16.
    found = (getattr(saved, f'hybrid_{name}_pattern', None) for name in ('layer', 'override'))
    return next((pattern for pattern in found if isinstance(pattern, str) and pattern), None)


def contradiction(saved: Any, layout: CheckpointLayout) -> str | None:
    """Why the arguments can't be those of the model whose keys the checkpoint has; else None."""
    if layout.family != 'gpt':
        return None
    pattern, num_layers = saved_pattern(saved), getattr(saved, 'num_layers', None)
    if pattern:
        said = f'have the hybrid layer pattern {pattern!r}'
        shown = 'is of a GPT model'
    elif num_layers is not None and not _is(num_layers, layout.num_layers):
        said, shown = f'say {num_layers!r:.99} layers', f'and others are of {layout.num_layers}'
    else:
        return None
    return (
        f'The checkpoint contradicts itself: its arguments {said}, its key {layout.evidence!r} '
        f'{shown}. Load a checkpoint whose files belong together.'
    )


def other_weights(own: Any, saved: Any) -> str | None:
    """Why the checkpoint's weights would be taken for others by a run of these arguments."""
    for name in _ARRANGING:
        found, expected = _effective(own, name), _effective(saved, name)
        if None not in (found, expected) and found != expected:
            option = '--' + name.replace('_', '-')
            return (
                f'{name} is {found} in this run and was {expected} in the one that saved the '
                f'checkpoint: its attention weights would be cut in other places. '
                f'Pass {option} {expected}.'
            )
    smallest, largest = zip(_vocabulary(own), _vocabulary(saved), strict=True)
    if max(smallest) > min(largest):
        return (
            f'the vocabulary is {own.padded_vocab_size} with its padding in this run and was '
            f'{saved.padded_vocab_size}, which no vocabulary is padded to under both settings: '
            f'rows would be lost or zero. Use the tokenizer of the run that saved the checkpoint.'
        )
    return None


def other_functions(own: Any, saved: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, value in the run and saved value of what the weights don't show and that differs."""
    for name in _WEIGHTLESS:
        if hasattr(own, name) and hasattr(saved, name):
            found, expected = getattr(own, name), getattr(saved, name)
            if found != expected:
                yield name, found, expected
    for name in _BY_LAYER_NUMBER:
        found, expected = getattr(own, name, None), getattr(saved, name, None)
        if found or expected:
            yield name, found, expected


def _is(found: Any, number: int) -> bool:
    # Comparing with a number of any type, such as a tensor of several, can fail.
    return isinstance(found, int) and found == number


def _effective(args: Any, name: str) -> Any:
    # Without grouped-query attention the number means nothing, and a GPT run overwrites it when it
    # counts floating point operations, after the load and before the save.
    if name == 'num_query_groups' and not getattr(args, 'group_query_attention', False):
        return getattr(args, 'num_attention_heads', None)
    return getattr(args, name, None)


def _vocabulary(args: Any) -> tuple[int, int]:
    """Smallest and largest vocabulary that is padded to the size which the arguments have."""
    padded = getattr(args, 'padded_vocab_size', None)
    multiple = getattr(args, 'make_vocab_size_divisible_by', None)
    if not padded or not multiple:
        return 0, 2**63
    multiple *= getattr(args, 'tensor_model_parallel_size', 1) or 1
    return padded - multiple + 1, padded
