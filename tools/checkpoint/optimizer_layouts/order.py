"""The order in which megatron-core's modules register their parameters.

A rank's buffers have its model's ``named_parameters()`` in reverse. Names in a checkpoint are those
of the modules. Three things they don't tell (see ``Order``): a layer norm that may be part of the
linear layer after it (Transformer Engine fuses them) has the fused name in either case; experts are
registered one after the other, or their first linear layers before their second ones (grouped
GEMM); a Mamba mixer's convolution is a module, or two parameters of the mixer itself.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..common.errors import CheckpointError
from .parameters import Parameter

# As the constructors assign them; sources: core's models/gpt, models/hybrid, transformer, ssm.
_MODEL = ('embedding', 'decoder', 'encoder', 'mtp', 'output_layer')
_MODULES = {
    'embedding': ('word_embeddings', 'position_embeddings', 'tokentype_embeddings'),
    'decoder': ('layers', 'final_layernorm', 'final_norm'),
    'layer': (
        'enorm',
        'hnorm',
        'eh_proj',
        'input_layernorm',
        'self_attention',
        'pre_cross_attn_layernorm',
        'cross_attention',
        'pre_mlp_layernorm',
        'mlp',
        'mixer',
        'norm',
        'transformer_layer',
        'mtp_model_layer',
        'final_layernorm',
    ),
    'self_attention': (
        'core_attention',
        'linear_proj',
        'linear_qkv',
        'linear_q_proj',
        'linear_q_down_proj',
        'linear_q_up_proj',
        'linear_kv_down_proj',
        'linear_kv_up_proj',
        'q_layernorm',
        'k_layernorm',
        'kv_layernorm',
    ),
    'mlp': (
        'router',
        'fc1_latent_proj',
        'fc2_latent_proj',
        'experts',
        'shared_experts',
        'linear_fc1',
        'linear_fc2',
    ),
    'experts': ('linear_fc1', 'linear_fc2'),
    'mixer': ('in_proj', 'conv1d', 'norm', 'out_proj'),
}
_MODULES['encoder'] = _MODULES['decoder']
_MODULES['cross_attention'] = _MODULES['self_attention']
_MODULES['shared_experts'] = _MODULES['mlp']
_MODULES['transformer_layer'] = _MODULES['layer']
_MODULES['mtp_model_layer'] = (*_MODULES['layer'], 'layers')  # of a hybrid model it is a stack
# A module's own parameters come before those of the modules in it.
_OWN = (
    'layer_norm_weight',
    'layer_norm_bias',
    'gate_weight',
    'conv1d_weight',
    'conv1d_bias',
    'dt_bias',
    'A_log',
    'D',
    'softmax_offset',
    'weight',
    'bias',
)
_NORM = re.compile(r'(?P<parent>.*?)(?P<linear>[^.]+)\.layer_norm_(?P<own>weight|bias)')
# Where the module of a layer norm stands whose parameters have the name of a linear layer's.
_NORM_MODULE = {
    'self_attention.linear_qkv': 'input_layernorm',
    'self_attention.linear_q_proj': 'input_layernorm',
    'self_attention.linear_q_down_proj': 'input_layernorm',
    'self_attention.linear_q_up_proj': 'self_attention.q_layernorm',
    'self_attention.linear_kv_up_proj': 'self_attention.kv_layernorm',
    'mlp.linear_fc1': 'pre_mlp_layernorm',
    'mixer.in_proj': 'norm',
}


@dataclass(frozen=True)
class Order:
    """One way in which modules may have been put together.

    Attributes:
        fused: linear layers, as ``self_attention.linear_qkv``, with a layer norm in them
        experts_grouped: first linear layers of all experts before the second ones
        own_convolution: a Mamba mixer's convolution is no module
    """

    fused: frozenset[str]
    experts_grouped: bool = False
    own_convolution: bool = False

    def __str__(self) -> str:
        norms = f'layer norms in {", ".join(sorted(self.fused)) or "modules of their own"}'
        return norms + (', experts grouped' if self.experts_grouped else '')

    def key(self, parameter: Parameter) -> tuple:
        """Sorts a chunk's parameters as ``named_parameters()`` of the model has them."""
        name = self._registered(parameter.name)
        place: tuple = _place((('layer' if parameter.block else ''), *name.split('.')), parameter)
        if parameter.expert >= 0:
            depth = len(name[: name.index('experts.')].split('.'))
            linear = place[depth:]
            within = (
                (linear, parameter.expert) if self.experts_grouped else (parameter.expert, linear)
            )
            place = (*place[:depth], within)
        if not parameter.block:
            return place
        block = parameter.block.partition('.')[0]
        return (_MODEL.index(block) + 1, 1, parameter.layer + 1, *place)

    def _registered(self, name: str) -> str:
        if self.own_convolution:
            name = name.replace('mixer.conv1d.', 'mixer.conv1d_')
        match = _NORM.fullmatch(name)
        if match is None:
            return name
        for linear, module in _NORM_MODULE.items():
            if f'{match["parent"]}{match["linear"]}'.endswith(linear) and linear not in self.fused:
                outside = f'{match["parent"]}{match["linear"]}'.removesuffix(linear)
                return f'{outside}{module}.{match["own"]}'
        return name


def _place(path: tuple[str, ...], parameter: Parameter) -> tuple[int, ...]:
    """Position of each step of a path among its siblings, own parameters first.

    Raises:
        CheckpointError: a module that isn't known
    """
    at, place = path[0], []
    for step in path[1:-1]:
        if at == 'layers' and step.isdecimal():
            place.append(int(step))
            at = 'layer'
            continue
        known = _MODULES.get(at, ()) if at else _MODEL
        if step not in known:
            raise _unknown(parameter)
        place.append(known.index(step) + 1)
        at = step
    last, known = path[-1], _MODULES.get(at, ())
    if last in known:
        place.append(known.index(last) + 1)
    elif last in _OWN:
        place += [0, _OWN.index(last)]
    else:
        raise _unknown(parameter)
    return tuple(place)


def _unknown(parameter: Parameter) -> CheckpointError:
    return CheckpointError(
        f'{parameter.label}: a module whose place among the parameters is not known here, so the '
        "buckets can't be taken apart; load it in the layout that saved it, and save it again with "
        '--dist-ckpt-optim-fully-reshardable'
    )


def possible_orders(parameters: Iterable[Parameter]) -> Iterator[Order]:
    """Every order that these parameters may have been registered in."""
    linears: set[str] = set()
    experts = convolutions = False
    for parameter in parameters:
        match = _NORM.fullmatch(parameter.name)
        if match:
            full = f'{match["parent"]}{match["linear"]}'
            linears.update(linear for linear in _NORM_MODULE if full.endswith(linear))
        experts |= parameter.expert >= 0
        convolutions |= 'mixer.conv1d.' in parameter.name
    choices = [
        frozenset(fused)
        for count in range(len(linears), -1, -1)
        for fused in itertools.combinations(sorted(linears), count)
    ]
    either = {True: (True, False), False: (False,)}
    for chosen in itertools.product(choices, either[experts], either[convolutions]):
        yield Order(*chosen)
