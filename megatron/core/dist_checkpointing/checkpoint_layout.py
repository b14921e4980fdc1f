"""What a distributed checkpoint is, read from its keys: GPT or hybrid, and how layers are stored.

Arguments saved with a checkpoint say what a run was told; the keys say what the model was. Key
forms: ``TransformerBlock`` and ``HybridStack`` in their ``sharded_state_dict``, and GPTModel's
``final_layernorm`` against HybridModel's ``final_norm``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import Metadata

from megatron_overlay.errors import CheckpointingException

from .checkpoint_keys import (
    DECODER,
    MTP,
    MTP_PREFIX,
    WEIGHT_PREFIXES,
    Key,
    is_extra_state,
    is_in_buckets,
    is_optimizer_state,
    parse_key,
    without_shard,
)
from .format_names import GPT, HYBRID, OTHER
from .key_arguments import arguments_behind
from .read_record import Shard, on_any_rank

if __name__.startswith('megatron.'):
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedStateDict,
        ShardedTensor,
        ShardedTensorFactory,
    )
    from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader  # type: ignore[attr-defined]

# The number of layers is read from a file, and lists are made of that length.
_MOST_LAYERS = 100_000

DENSE, MOE = 'dense', 'moe'


@dataclass(frozen=True)
class CheckpointLayout:
    """The model behind a checkpoint, as its keys tell.

    Attributes:
        sizes: entries' keys, without the shard suffix that DCP keys of objects have -> global
            shape; empty for objects.
        family: ``'gpt'``, ``'hybrid'``, or ``'other'`` where the keys show neither.
        evidence: a key that showed the family; empty for ``'other'``.
        indexed: the layer stands in the key, not as the leading axis.
        num_layers: decoder layers; for a hybrid model, its sub-block layers.
        mlp_kinds: ``'dense'`` or ``'moe'`` by layer; layers without an MLP are absent.
        latent_attention: the attention is multi-latent (MLA).
        mtp_depths: multi-token prediction layers stored under ``mtp.layers.<i>``.
        has_optimizer: some entry is optimizer state.
        optimizer_in_buckets: some of that follows the distributed optimizer's buckets.
    """

    sizes: Mapping[str, tuple[int, ...]] = field(repr=False)
    family: str
    evidence: str
    indexed: bool
    num_layers: int
    mlp_kinds: dict[int, str]
    latent_attention: bool
    mtp_depths: int
    has_optimizer: bool
    optimizer_in_buckets: bool

    @property
    def keys(self) -> Set[str]:
        """Entries' keys."""
        return self.sizes.keys()


def read_checkpoint_layout(checkpoint_dir: str) -> CheckpointLayout:
    """Layout of the ``torch_dist`` or ``fsdp_dtensor`` checkpoint in ``checkpoint_dir``.

    Reads the DCP metadata only.

    Raises:
        CheckpointingException: there is no readable metadata.
    """
    try:
        metadata = _get_filesystem_reader(checkpoint_dir).read_metadata()
    except Exception as error:
        raise CheckpointingException(
            f'{checkpoint_dir}/.metadata: can not be read ({type(error).__name__}: {error}); '
            f'expected the metadata of a distributed checkpoint.'
        ) from error
    return layout_from_metadata(metadata)


def layout_from_metadata(metadata: Metadata) -> CheckpointLayout:
    """Layout of the checkpoint that ``metadata`` describes."""
    return layout_from_keys(
        {
            without_shard(key): tuple(getattr(entry, 'size', ()))
            for key, entry in metadata.state_dict_metadata.items()
        }
    )


def layout_from_keys(sizes: dict[str, tuple[int, ...]]) -> CheckpointLayout:
    """Layout of a checkpoint that has these entries.

    Args:
        sizes: key -> global shape; empty for what isn't a tensor.
    """
    optimizer = set(filter(is_optimizer_state, sizes))
    of_model = {key: parse_key(key) for key in sizes if key not in optimizer}
    layers = {key: own for key, own in of_model.items() if own.block == DECODER and own.part}
    numbers = [own.layer for own in layers.values() if own.layer is not None]
    indexed = bool(numbers)
    if indexed:
        num_layers = 1 + max(numbers)
    else:
        num_layers = next((sizes[key][0] for key in layers if sizes[key]), 0)
    if num_layers > _MOST_LAYERS:
        raise CheckpointingException(
            f'{next(iter(layers))}: a model of {num_layers} layers; the metadata is damaged.'
        )
    family, evidence = _family(of_model, layers, indexed)
    mtp = [own.layer for own in of_model.values() if own.block == MTP and own.layer is not None]
    return CheckpointLayout(
        sizes=sizes,
        family=family,
        evidence=evidence,
        indexed=indexed,
        num_layers=num_layers,
        mlp_kinds=_mlp_kinds(layers.values(), num_layers),
        latent_attention=any(
            own.part.startswith('self_attention.linear_kv_up_proj') for own in layers.values()
        ),
        mtp_depths=1 + max(mtp, default=-1),
        has_optimizer=bool(optimizer),
        optimizer_in_buckets=any(map(is_in_buckets, optimizer)),
    )


def check_sources(
    sharded_state_dict: ShardedStateDict,
    layout: CheckpointLayout,
    with_mtp: bool = False,
    may_be_unread: Callable[[str], bool] = lambda key: False,
) -> dict[Shard, int]:
    """Make sure that model and checkpoint have the same weights, before anything is read.

    Loading can be told to pass over what is missing on either side; here a missing source would
    leave a weight random, and a weight that nothing reads means another architecture (untied
    output layer, learned positions). All ranks have to call this, and all of them raise.

    Args:
        sharded_state_dict: retargeted, of this rank's model chunks and, if wanted, optimizer.
        layout: of the checkpoint.
        with_mtp: the model has multi-token prediction, so the checkpoint's has to be read too.
        may_be_unread: whether the model need not read a key, of weights.

    Returns:
        How many elements of each of this rank's shards the checkpoint has, for a
        :class:`ReadRecord` to check after the load.

    Raises:
        CheckpointingException: an entry has no source, or no rank reads a weight.
    """
    entries = list(_tensors(sharded_state_dict))
    requested = {entry.key for entry in entries}
    prefixes = (*WEIGHT_PREFIXES, MTP_PREFIX) if with_mtp else WEIGHT_PREFIXES
    weights = sorted(
        key
        for key in layout.keys
        if key.startswith(prefixes) and not is_extra_state(key) and not may_be_unread(key)
    )
    layers = '--hybrid-layer-pattern' if layout.family == GPT else '--num-layers'
    lacking = _without_source(entries, layout, layers)
    *read, failed = on_any_rank([*(key in requested for key in weights), bool(lacking)])
    if lacking:
        raise CheckpointingException(lacking)
    if failed:
        raise CheckpointingException('Another rank found entries that the checkpoint lacks.')
    left_out = [key for key, is_read in zip(weights, read, strict=True) if not is_read]
    if left_out:
        raise CheckpointingException(
            f'{left_out[0]}: the checkpoint has it and nothing in the model reads it '
            f'({len(left_out)} such keys). {arguments_behind(left_out, layers)}'
        )
    return {
        (entry.key, tuple(entry.global_offset)): _stored_elements(entry, layout.sizes[entry.key])
        for entry in entries
    }


def _without_source(entries: list[ShardedTensor], layout: CheckpointLayout, layers: str) -> str:
    """What the checkpoint lacks of this rank's entries, or has in another shape; else empty."""
    missing = sorted({entry.key for entry in entries} - layout.keys)
    if missing:
        return (
            f'{missing[0]}: the model needs it and the checkpoint does not have it '
            f'({len(missing)} such keys). {arguments_behind(missing, layers)}'
        )
    others = [
        entry
        for entry in entries
        if not entry.allow_shape_mismatch
        and tuple(entry.global_shape) != tuple(layout.sizes[entry.key])
    ]
    if not others:
        return ''
    return (
        f'{others[0].key}: its shape is {tuple(others[0].global_shape)} in the model and '
        f'{tuple(layout.sizes[others[0].key])} in the checkpoint ({len(others)} such entries). '
        f'Give the run the sizes of the one that saved it, such as --hidden-size, '
        f'--ffn-hidden-size, --num-experts or --max-position-embeddings.'
    )


def _tensors(sharded_state_dict: ShardedStateDict):
    for entry in nested_values(sharded_state_dict):
        if isinstance(entry, ShardedTensorFactory):
            yield from _tensors({'built': entry.build()})
        elif isinstance(entry, ShardedTensor):
            yield entry


def _stored_elements(entry: ShardedTensor, stored: tuple[int, ...]) -> int:
    # A vocabulary that is padded further than the checkpoint's isn't there to its end.
    shape = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
    return math.prod(
        max(0, min(size, stored_size - offset))
        for size, stored_size, offset in zip(shape, stored, entry.global_offset, strict=False)
    )


def _family(
    of_model: Mapping[str, Key], layers: Mapping[str, Key], indexed: bool
) -> tuple[str, str]:
    for key, own in of_model.items():
        if own.name.startswith('decoder.final_norm.'):
            return HYBRID, key
        if own.name.startswith('decoder.final_layernorm.'):
            return GPT, key
    for key, own in layers.items():
        if own.part.startswith('mixer.'):
            return HYBRID, key
        if not indexed:
            # Only TransformerBlock stacks its layers along an axis.
            return GPT, key
    blocks: dict[int | None, dict[str, str]] = {}
    for key, own in layers.items():
        blocks.setdefault(own.layer, {})[own.part.partition('.')[0]] = key
    for parts in blocks.values():
        if {'self_attention', 'mlp'} <= parts.keys():
            return GPT, parts['mlp']
    return OTHER, ''


def _mlp_kinds(layers: Iterable[Key], num_layers: int) -> dict[int, str]:
    kinds: dict[int, str] = {}
    for key in layers:
        if not key.part.startswith('mlp.'):
            continue
        is_moe = key.part.startswith(('mlp.router.', 'mlp.experts.'))
        for layer in range(num_layers) if key.layer is None else [key.layer]:
            # A MoE layer's norm can stand under `mlp.linear_fc1.`, as a dense layer's does.
            kinds[layer] = MOE if is_moe else kinds.get(layer, DENSE)
    return kinds
