"""Names of a model's parameters in ``fsdp_dtensor``, and their places in ``torch_dist``.

Megatron-FSDP stores every parameter under its module's name, one layer and one expert each, gate
(``_w``) and up (``_v``) of a gated ``linear_fc1`` apart. ``torch_dist`` has one tensor of all:

    decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight_v  [64, 32]
        ->  decoder.layers.mlp.experts.experts.linear_fc1.weight  [2, 4, 128, 32], at [1, 3, 64, 0]

Layers have keys of their own in a hybrid model, and where some of them are MoE and others not.
Layer norms have the names that they have when Transformer Engine fuses them, whatever the model was
built of. A depth of multi-token prediction has its layer under another name:

    mtp.layers.0.mtp_model_layer.self_attention.linear_qkv.weight
        ->  mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight

A hybrid model's depth has a stack of layers, ``mtp.layers.0.mtp_model_layer.layers.1.``, in both.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import (
    DECODER,
    MTP,
    Key,
    mtp_stack,
    parse_key,
    stacks_layers,
)
from megatron_overlay.standalone.dist_checkpointing.format_names import GPT, HYBRID
from megatron_overlay.standalone.dist_checkpointing.fsdp_mixers import MODULE, PARAMETERS

_NUMBER = r'(0|[1-9]\d{0,99})'
_ONE_BY_ONE = re.compile(
    rf'mlp\.experts\.local_experts\.{_NUMBER}\.(linear_fc[12]\.(?:weight|bias))'
)
_GROUPED = re.compile(rf'mlp\.experts\.(linear_fc[12]\.(?:weight|bias)){_NUMBER}')
_EXPERTS = 'mlp.experts.experts.'
_HALVES = ('_w', '_v')
_FC1 = re.compile(r'mlp\.(?:shared_experts\.|experts\.experts\.)?linear_fc1\.(?:weight|bias)')
_NORM = r'(?:layer_norm_)?(?:weight|bias)'
# Whose chunks of tensor-parallel ranks stand one after the other, in both formats.
_PARTS = re.compile(
    r'input_layernorm\.(?:weight|bias)'
    rf'|self_attention\.linear_qkv\.{_NORM}'
    r'|self_attention\.(?:linear_proj|q_layernorm|k_layernorm|kv_layernorm)\.(?:weight|bias)'
    rf'|self_attention\.linear_(?:q|q_down|q_up|kv_down|kv_up)_proj\.{_NORM}'
    r'|pre_mlp_layernorm\.(?:weight|bias)'
    rf'|mlp\.linear_fc1\.{_NORM}'
    r'|mlp\.(?:experts\.experts\.|shared_experts\.)?linear_fc[12]\.(?:weight|bias)'
    r'|self_attention\.core_attention\.softmax_offset'
    r'|mlp\.router\.(?:weight|bias|expert_bias)'
    r'|mlp\.shared_experts\.gate_weight'
)
_MAMBA_PARTS = re.compile(
    r'norm\.(?:weight|bias)'
    r'|mixer\.in_proj\.(?:weight|layer_norm_weight|layer_norm_bias)'
    r'|mixer\.conv1d\.(?:weight|bias)'
    r'|mixer\.(?:norm|out_proj)\.weight'
    r'|mixer\.(?:A_log|D|dt_bias)'
)
_OUTSIDE = re.compile(
    r'embedding\.(?:word|position)_embeddings\.weight|output_layer\.(?:weight|bias)'
)
_FINAL_NORM = {
    GPT: re.compile(r'decoder\.final_layernorm\.(?:weight|bias)'),
    HYBRID: re.compile(r'decoder\.final_norm\.(?:weight|bias)'),
}
_OF_DEPTH = re.compile(r'(?:[eh]norm|final_layernorm)\.(?:weight|bias)|eh_proj\.weight')
_DEPTHS_LAYER = 'mtp_model_layer.', 'transformer_layer.'
# By the local layer specs' own names.
_FUSED_NORMS = {
    'input_layernorm.': 'self_attention.linear_qkv.layer_norm_',
    'pre_mlp_layernorm.': 'mlp.linear_fc1.layer_norm_',
}
# Transformer Engine's norms have one, and its attention.
_WITH_EXTRA_STATE = {
    True: re.compile(r'\.(linear_\w+|eh_proj|mixer\.(in|out)_proj)$'),
    False: re.compile(
        r'\.(linear_|core_attention$|eh_proj$|[eh]norm$|mixer\.(in|out)_proj$'
        r'|(final_|input_|pre_mlp_|[qk]_|kv_)layernorm$|final_norm$)'
    ),
}


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """Where a parameter lies in a tensor of ``torch_dist``.

    Attributes:
        key: FQN of the tensor
        layer, expert: along its first axes; -1 where it has no such axis
        half: 0 for gate, 1 for up; -1 for what has no halves
    """

    key: str
    layer: int = -1
    expert: int = -1
    half: int = -1

    @property
    def axes(self) -> tuple[int, ...]:
        """Offsets along the axes that the parameter itself doesn't have."""
        return tuple(axis for axis in (self.layer, self.expert) if axis >= 0)


@dataclass(frozen=True)
class Names:
    """What decides how a model's parameters are called.

    Attributes:
        layers, experts: how many; no experts in a dense model
        stacked: ``torch_dist`` has the layers along an axis
        local: built of megatron-core's own layers, not of Transformer Engine's
        grouped: experts in one module
        gated: ``linear_fc1`` is two
        latent: the attention is multi-latent (MLA)
        family: ``gpt`` or ``hybrid``
        convolution: how a Mamba mixer's begins, ``MODULE`` or ``PARAMETERS``
    """

    layers: int
    experts: int
    stacked: bool
    local: bool
    grouped: bool
    gated: bool
    latent: bool
    family: str = GPT
    convolution: str = MODULE

    def place(self, name: str) -> Place | None:
        """Where the parameter of that name lies; None for one that isn't known."""
        half = next((i for i, end in enumerate(_HALVES) if name.endswith(end)), -1)
        bare = name if half < 0 else name[:-2]
        parsed = parse_key(bare)
        part = parsed.part
        if parsed.layer is None or (parsed.block == MTP and _OF_DEPTH.fullmatch(part)):
            outside = parsed.layer is not None or self._is_outside(bare)
            return Place(bare) if half < 0 and outside else None
        if parsed.block not in (DECODER, MTP):
            return None
        own, stored = self._depths_layer(parsed)
        if not part.startswith(own):
            return None
        stem, part, layer = f'{parsed.block}.{parsed.layer}.{stored}', part.removeprefix(own), -1
        if parsed.block == DECODER and self.stacked:
            stem, layer = f'{DECODER}.', parsed.layer
        expert = -1
        if match := _ONE_BY_ONE.fullmatch(part):
            expert, part = int(match[1]), _EXPERTS + match[2]
        elif match := _GROUPED.fullmatch(part):
            expert, part = int(match[2]), _EXPERTS + match[1]
        if part.startswith(PARAMETERS):
            part = MODULE + part.removeprefix(PARAMETERS)
        if not self._is_known(part) or (half >= 0) != (self.gated and is_fc1(part)):
            return None
        for own, fused in self._fused_norms:
            if part.startswith(own):
                part = fused + part.removeprefix(own)
        return Place(stem + part, layer, expert, half)

    def names(self, key: str) -> Iterator[tuple[str, Place]]:
        """Names of the parameters that make up a tensor of ``torch_dist``, with their places."""
        parsed = parse_key(key)
        part, number, block = parsed.part, parsed.layer, parsed.block
        own, stored = self._depths_layer(parsed)
        if block not in (DECODER, MTP) or not part.startswith(stored):
            yield key, Place(key)
            return
        part = part.removeprefix(stored)
        for norm, fused in self._fused_norms:
            if part.startswith(fused):
                part = norm + part.removeprefix(fused)
        if part.startswith(MODULE):
            part = self.convolution + part.removeprefix(MODULE)
        experts = range(self.experts) if part.startswith(_EXPERTS) else [-1]
        halves = range(2) if self.gated and is_fc1(part) else [-1]
        for layer in range(self.layers) if number is None else [number]:
            for expert in experts:
                for half in halves:
                    name = f'{block}.{layer}.{own}{self._part(part, expert)}'
                    name += _HALVES[half] if half >= 0 else ''
                    yield name, Place(key, layer if number is None else -1, expert, half)

    def extra_states(self, keys: Iterable[str]) -> Iterator[str]:
        """Keys of the modules' ``_extra_state``, which ``torch_dist`` loads ask for.

        Args:
            keys: of the weights in ``torch_dist``
        """
        modules = {key.removesuffix('.weight') for key in keys if key.endswith('.weight')}
        if not self.local:
            own = '.self_attention.linear_proj'
            modules |= {
                module.removesuffix(own) + '.self_attention.core_attention'
                for module in modules
                if module.endswith(own)
            }
        if self.family == HYBRID:
            yield 'output_layer._extra_state/shard_0_1'
        for module in sorted(modules):
            if _WITH_EXTRA_STATE[self.local].search(module) is None:
                continue
            axes = [self.layers] if stacks_layers(module) else []
            axes += [self.experts] if _EXPERTS in module else []
            axes = axes or [1]
            for at in itertools.product(*map(range, axes)):
                place, shape = ('.'.join(map(str, numbers)) for numbers in (at, axes))
                yield f'{module}._extra_state/shard_{place}_{shape}'

    @property
    def _fused_norms(self) -> list[tuple[str, str]]:
        """Norms' own names, and those that they have when fused; latent attention fuses none."""
        return [
            names
            for names in _FUSED_NORMS.items()
            if self.local and not (self.latent and 'linear_qkv' in names[1])
        ]

    def _depths_layer(self, key: Key) -> tuple[str, str]:
        """What stands before a part of a depth's layer, in one format and the other."""
        if key.block != MTP:
            return '', ''
        if self.family == GPT:
            return _DEPTHS_LAYER
        stack = mtp_stack(key)
        prefix = _DEPTHS_LAYER[0] + (f'layers.{stack[0]}.' if stack else '')
        return prefix, prefix

    def _is_outside(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in (_OUTSIDE, _FINAL_NORM[self.family]))

    def _is_known(self, part: str) -> bool:
        patterns = (_PARTS, _MAMBA_PARTS) if self.family == HYBRID else (_PARTS,)
        return any(pattern.fullmatch(part) for pattern in patterns)

    def _part(self, part: str, expert: int) -> str:
        if expert < 0:
            return part
        own = part.removeprefix(_EXPERTS)
        if self.grouped:
            return f'mlp.experts.{own}{expert}'
        return f'mlp.experts.local_experts.{expert}.{own}'


def is_expert(name: str) -> bool:
    """Whether a parameter of that name, halves of it together, is one expert's."""
    part = parse_key(name).part
    return any(pattern.fullmatch(part) for pattern in (_ONE_BY_ONE, _GROUPED))


def is_fc1(part: str) -> bool:
    """Whether a part of a layer is a ``linear_fc1``'s own weight or bias, which may have halves."""
    return _FC1.fullmatch(part) is not None
