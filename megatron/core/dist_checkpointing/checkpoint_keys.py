"""The grammar of checkpoint keys: what an entry is of, and which layer and state, read here alone.

A key is a path. Of optimizer state by parameter, and of a weight in ``fsdp_dtensor``:

    chained_0.optimizer.state.exp_avg.decoder.layers.3.mlp.linear_fc1.weight
    optimizer ~~~~~~~~~       state   block          layer part
    model.module.decoder.layers.3.mlp.linear_fc1.weight
    wrappers     block          layer part

``fsdp_dtensor`` has states behind the name (``optimizer.state.module.decoder.….exp_avg``). Where
``torch_dist`` stacks layers along an axis there is no layer in the key. Objects have a suffix,
``rng_state/shard_0.0_1.1``. The distributed optimizer's buckets are of no weight:

    optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)
        .bucket_idx_0.exp_avg
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

DECODER, ENCODER, MTP = 'decoder.layers', 'encoder.layers', 'mtp.layers'
# Where GPTModel's and HybridModel's own weights stand.
WEIGHT_PREFIXES = ('decoder.', 'embedding.', 'output_layer.')
MTP_PREFIX = 'mtp.'
PARAMETER_PREFIXES = (*WEIGHT_PREFIXES, MTP_PREFIX)
# Optimizer state that is a weight in more precision.
PARAM, FP32_PARAM = 'param', 'fp32_param'
MAIN_PARAMS = (PARAM, FP32_PARAM)

# Kinds of entries.
MODEL, OPTIMIZER, RNG, COMMON = 'model', 'optimizer', 'rng_state', 'common_state'
OTHER_TRAINING = 'other'
TRAINING = (OPTIMIZER, RNG, OTHER_TRAINING)
COMMON_KEY = f'{COMMON}/shard_0_1'  # of megatron-core 0.19

_KIND = re.compile(
    r'(?:chained_\d+\.)*'
    rf'(?:(?P<{OPTIMIZER}>optimizer)|(?P<{RNG}>rng_state)'
    rf'|(?P<{OTHER_TRAINING}>opt_param_scheduler|rerun_state_machine))\w*(?:[./]|$)'
    rf'|(?P<{MODEL}>(?:model\d*|decoder|embedding|output_layer|mtp)\.)'
    rf'|(?P<{COMMON}>common_state)(?:/|$)',
    re.ASCII,
)
_KEY = re.compile(
    r'(?:(?P<optimizer>(?:chained_\d+\.)*optimizer\d*)\.(?:\d+\.)?(?:state|param_to_group_meta)\.'
    r'(?:(?!(?:module|model\d*|decoder|encoder|embedding|output_layer|mtp)\.)(?P<state>[^.]+)\.)?)?'
    r'(?P<wrappers>(?:(?:module|model\d*)\.)*)'
    # Numbers as Megatron writes them: two ways to write one could make two keys the same.
    r'(?:(?P<block>(?:decoder|encoder|mtp)\.layers)\.(?:(?P<layer>0|[1-9]\d{0,99})\.)?)?'
    r'(?P<part>.*)',
    re.ASCII | re.DOTALL,
)
_MTP_STACK = re.compile(r'mtp_model_layer\.layers\.(\d+)\.(.*)', re.ASCII | re.DOTALL)
_EXPERT = re.compile(
    r'((?:.+\.)?mlp\.experts)\.(?:local_)?experts\.(?:(\d+)\.)?(.+)', re.ASCII | re.DOTALL
)
_POSITION = re.compile(
    r'(?P<position>(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+))\.'
    r'(?:gbuf_idx_(?P<buffer>\d+)\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)'
    r'\.bucket_idx_(?P<bucket>\d+)\.)?(?P<entry>\w+)',
    re.ASCII,
)
_BUFFERS = ('expert_bias', 'local_tokens_per_expert', 'inv_freq')
_CHUNK = re.compile(r'model(\d*)', re.ASCII)
_WRAPPERS = re.compile(r'(?<![^.])(?:module\.)*\Z')


class Key(NamedTuple):
    """A key taken apart.

    Attributes:
        prefix: what stands before the model's own name
        optimizer: ``optimizer``, or ``chained_<i>.optimizer``; None for all but state by parameter
        state: its name, such as ``exp_avg``; None where it doesn't stand before the weight's
        wrappers: ``module.`` and ``model<n>.``, as often as there are; empty without
        name: the model's own
        block: ``decoder.layers``, ``encoder.layers`` or ``mtp.layers``; None outside layers
        layer: its number there; None where layers are stacked
        part: what remains of the name
    """

    prefix: str
    optimizer: str | None
    state: str | None
    wrappers: str
    name: str
    block: str | None
    layer: int | None
    part: str

    @property
    def weight(self) -> str:
        """Key of the weight that it is of: its own, or the one that state belongs to."""
        return self.wrappers + self.name

    @property
    def decoder_layer(self) -> int | None:
        """The decoder layer that is named in the key."""
        return self.layer if self.block == DECODER else None


def parse_key(key: str) -> Key:
    """Take any key apart."""
    match = _KEY.fullmatch(key)
    assert match is not None  # the last part takes all
    optimizer, state, wrappers, block, layer, part = match.groups()
    start = match.end('wrappers')
    number = None if layer is None else int(layer)
    return Key(key[:start], optimizer, state, wrappers, key[start:], block, number, part)


def kind_of(key: str) -> str | None:
    """Kind of an entry; None for what is neither Megatron's training state nor of a model."""
    match = _KIND.match(key)
    return match.lastgroup if match else None


def is_optimizer_state(key: str) -> bool:
    """Whether an entry, or a part of a state dict, is an optimizer's."""
    return kind_of(key) == OPTIMIZER


def is_training_state(key: str) -> bool:
    """Whether an entry is of the run, and not of the model."""
    return kind_of(key) in TRAINING


def is_parameter(key: str) -> bool:
    """Whether an entry is a weight of GPTModel or HybridModel, or state of one."""
    return parse_key(key).name.startswith(PARAMETER_PREFIXES)


def is_extra_state(key: str) -> bool:
    """Whether an entry is ``_extra_state``; of grouped experts each has a number."""
    last = without_shard(key).rpartition('.')[2]
    return last.startswith('_extra_state') and last.rstrip('0123456789') == '_extra_state'


def is_buffer(key: str) -> bool:
    """Whether an entry is of those that are saved with the weights without being trained."""
    return key.rpartition('.')[2] in _BUFFERS


def without_shard(key: str) -> str:
    """The name that the shards of an object have in common."""
    return key.partition('/shard_')[0]


def state_key(state: str, weight: str) -> str:
    """Key of an optimizer's state by parameter: ``optimizer.state.exp_avg.output_layer.weight``."""
    return f'optimizer.state.{state}.{weight}'


def stacks_layers(key: str) -> bool:
    """Whether a weight's first axis is that of layers, of whatever model."""
    _, found, rest = key.partition('.layers.')
    return bool(found) and not rest.partition('.')[0].isdigit()


def mtp_stack(key: Key) -> tuple[int, str] | None:
    """Layer of the stack that a depth of multi-token prediction is in HybridModel, and the rest."""
    match = _MTP_STACK.fullmatch(key.part) if key.block == MTP and key.layer is not None else None
    return (int(match[1]), match[2]) if match else None


def expert_of(part: str) -> tuple[int | None, str] | None:
    """An expert's number, and its part without; None for the number where experts are stacked."""
    match = _EXPERT.fullmatch(part)
    if match is None:
        return None
    experts, number, name = match.groups()
    return None if number is None else int(number), f'{experts}.{name}'


class PositionKey(NamedTuple):
    """Key of what one group of data-parallel ranks stores of its optimizer.

    Attributes:
        position: the beginning, up to the group
        chain: number of the optimizer; 0 where there is one
        group: of the data-parallel ranks
        buffer, dtype, bucket: of state in buckets, with the name of the parameters' dtype; None
            for objects
        entry: the state, or the object
    """

    position: str
    chain: int
    group: int
    buffer: int | None
    dtype: str | None
    bucket: int | None
    entry: str


def parse_position(key: str) -> PositionKey | None:
    """Take such a key apart; None for another."""
    match = _POSITION.fullmatch(without_shard(key))
    if match is None:
        return None
    position, chain, group, buffer, dtype, bucket, entry = match.groups()
    numbers = [None if number is None else int(number) for number in (buffer, bucket)]
    return PositionKey(position, int(chain or 0), int(group), numbers[0], dtype, numbers[1], entry)


def is_in_buckets(key: str) -> bool:
    """Whether an entry follows the distributed optimizer's buckets."""
    return '.gbuf_idx_' in key


def is_of_fsdp(keys: Iterable[str]) -> bool:
    """Whether keys of a checkpoint that isn't ``torch_dist`` are those of ``fsdp_dtensor``."""
    prefixes = {parse_key(key).prefix for key in keys if key.startswith('model')}
    return any('.module.' in prefix for prefix in prefixes)


def is_model_part(name: object) -> bool:
    """Whether a state dict's own name is that of a model, ``model`` or ``model<n>``."""
    return _CHUNK.fullmatch(str(name)) is not None


def chunk_number(name: str) -> int | None:
    """Number of a model chunk in its name; None for ``model``, and for other names."""
    match = _CHUNK.fullmatch(name)
    return int(match[1]) if match and match[1] else None


def chunk_key(number: int | None) -> str:
    """That name of a model chunk; the only one's for None."""
    return 'model' if number is None else f'model{number}'


def before_wrappers(prefix: str) -> str:
    """``model.`` of ``model.module.module.``."""
    return _WRAPPERS.sub('', prefix, count=1)


def without_module_prefix(key: str) -> str:
    """``key`` without the ``module.`` of wrappers."""
    while key.startswith('module.'):
        key = key.removeprefix('module.')
    return key
