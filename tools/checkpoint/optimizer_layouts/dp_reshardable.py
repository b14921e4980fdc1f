"""``dp_reshardable``, megatron-core's default since 0.15: buckets of each model-parallel rank.

The place of each parameter is derived from three things that don't know of each other: the order
in which modules register parameters (``order``), what each rank has of a weight (``parameters``),
and the sizes and edges of the buckets (``buckets``). Their contents decide nothing but whether that
is right: where more than one order fills the buckets, and in the writing, for every element.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from megatron_overlay.standalone.dist_checkpointing.checkpoint_keys import PARAM, state_key

from ..common.errors import CheckpointError
from ..merge.geometry import Box
from ..merge.plan import OutputTensor
from .assemble import Assembler
from .buckets import Buffer, read_buffers
from .checkpoint import Checkpoint
from .frozen import possibly_frozen
from .order import Order, possible_orders
from .parameters import Model, Parameter, Part, read_model
from .plan import OptimizerPlan, OutputChunk, Piece, Position, output_chunks
from .settings import is_of_experts, read_settings
from .stages import Chunk, Parts, Placed, fit_buffers, fit_chunks, split

Positions = dict[tuple[int, int], list[Placed]]
"""The placed parameters by optimizer of the chain and model-parallel position."""

Stored = dict[Part, list[dict[str, tuple[Piece, ...]]]]
"""By part of a weight the pieces of each state, for each position that stores it."""


@dataclass
class _Given:
    """What is known before parameters are placed.

    Attributes:
        buffers: by optimizer of the chain and model-parallel position
        of_experts: of each optimizer of the chain, whether it has the expert-parallel parameters
    """

    checkpoint: Checkpoint
    model: Model
    buffers: dict[tuple[int, int], list[Buffer]]
    of_experts: list[bool]

    def tensor_rank(self, position: tuple[int, int]) -> int:
        """The tensor-parallel rank at a position."""
        chain, group = position
        experts = self.of_experts[chain]
        return group % (self.model.expert_tensor_size if experts else self.model.tensor_size)


def plan_optimizer(checkpoint: Checkpoint) -> OptimizerPlan:
    """The plan, derived from the metadata.

    Raises:
        CheckpointError: the place of a parameter can't be derived
    """
    settings = read_settings(checkpoint)
    buffers = read_buffers(checkpoint)
    if {chain for chain, _ in buffers} != set(range(len(settings))):
        raise CheckpointError(
            f'{checkpoint.directory}: buckets of {len({chain for chain, _ in buffers})} optimizers '
            f'and settings of {len(settings)}; the metadata is damaged'
        )
    of_experts = [is_of_experts(of_chain) for of_chain in settings]
    model = read_model(checkpoint, any(of_experts))
    _check_gated(checkpoint, model)
    given = _Given(checkpoint, model, buffers, of_experts)
    return _plan(given, settings, _derive(given))


def _check_gated(checkpoint: Checkpoint, model: Model) -> None:
    """What ``args`` say of gated MLPs against the chunks: their halves are stored apart."""
    said = [getattr(checkpoint.args, name, None) for name in ('swiglu', 'glu')]
    if all(value is None for value in said):
        return
    gated = any(value is True for value in said)
    for parameter in model.parameters:
        if parameter.name.endswith('linear_fc1.weight') and len(parameter.ranks[0]) != 1 + gated:
            raise CheckpointError(
                f'{checkpoint.directory}: {parameter.ranks[0][0][0]}: a rank has '
                f'{len(parameter.ranks[0])} chunks of it, expected {1 + gated}: args say swiglu '
                f'{gated}; args and weights are not of one checkpoint'
            )


def _derive(given: _Given) -> Positions:
    """Where every parameter lies, by the one order that fills all buckets."""
    checkpoint, model = given.checkpoint, given.model
    found = _fitting(given, [frozenset()])
    if not found:
        buckets = [b for own in given.buffers.values() for buffer in own for b in buffer.buckets]
        found = _fitting(given, possibly_frozen(checkpoint, model, buckets))
    if not found:
        raise CheckpointError(
            f"{checkpoint.directory}: the {len(model.parameters)} parameters of the weights don't "
            "fill the optimizer's buckets in any known order of modules (tensor-parallel size "
            f'{model.tensor_size}); modules of other makes are not converted'
        )
    if len(found) > 1:
        found = _proven(given, found)
    if len(found) != 1:
        raise CheckpointError(
            f'{checkpoint.directory}: the buckets can be filled in several ways, and the weights '
            f'fit {"; ".join(name for name, _ in found) or "none"}: expected one; '
            'load it in the layout that saved it'
        )
    return found[0][1]


def _fitting(given: _Given, frozen_sets: Iterable[frozenset[str]]) -> list[tuple[str, Positions]]:
    """Every derivation that fills all buckets, with words for it; none twice."""
    found: list[tuple[str, Positions]] = []
    for frozen in frozen_sets:
        trained = [p for p in given.model.parameters if p.key not in frozen]
        for order in possible_orders(trained):
            positions = _fit(given, trained, order)
            if positions is not None and all(_differ(positions, other) for _, other in found):
                without = f', {", ".join(sorted(frozen))} frozen' if frozen else ''
                found.append((f'{order}{without}', positions))
    return found


_Placement = tuple[tuple[int, int], str, str, int]


def _placements(positions: Positions) -> dict[_Placement, Placed]:
    return {
        (position, p.parameter.label, p.place.bucket.name, p.place.start): p
        for position, placed in positions.items()
        for p in placed
    }


def _differ(one: Positions, other: Positions) -> bool:
    return _placements(one).keys() != _placements(other).keys()


def _proven(given: _Given, found: Sequence[tuple[str, Positions]]) -> list[tuple[str, Positions]]:
    """Those of several derivations whose main parameters are the weights, where they differ."""
    placements = [_placements(positions) for _, positions in found]
    agreed = set.intersection(*map(set, placements))
    proven = []
    with closing(Assembler()) as assembler:
        for candidate, own in zip(found, placements, strict=True):
            stored: Stored = defaultdict(list)
            for placement in own.keys() - agreed:
                _take_pieces(given, stored, placement[0], own[placement], [PARAM])
            if all(map(assembler.is_weight, _chunks(given.checkpoint, stored, [PARAM]))):
                proven.append(candidate)
    return proven


def _fit(given: _Given, trained: Sequence[Parameter], order: Order) -> Positions | None:
    buffers, apart = given.buffers, any(given.of_experts)
    dense = [chain for chain, experts in enumerate(given.of_experts) if not experts]
    size = given.model.tensor_size
    groups = sorted({group for chain, group in buffers if chain in dense})
    stages = len(groups) // size
    if groups != list(range(size * stages)) or not stages:
        raise CheckpointError(
            f'{given.checkpoint.directory}: {len(groups)} model-parallel positions (dp_group_idx '
            f'{groups[:4]}…), expected a multiple of the {size} tensor-parallel ranks'
        )
    shared = [p for p in trained if not apart or p.expert < 0]
    parts = split(shared, given.model.parameters, order)
    positions: Positions = {key: [] for key in buffers}
    chunks: list[list[Chunk]] = []
    for rank in range(size):
        of_stages = [
            [buffer for chain in dense for buffer in buffers.get((chain, s * size + rank), [])]
            for s in range(stages)
        ]
        fitted = _fit_virtual(parts, of_stages)
        if fitted is None:
            return None
        chunks = fitted
        for s, of_stage in enumerate(fitted):
            positions[dense[0], s * size + rank] = [p for chunk in of_stage for p in chunk.placed]
    of_experts = sorted((p for p in trained if p.expert >= 0), key=order.key)
    for chain in (chain for chain, experts in enumerate(given.of_experts) if experts):
        fits = _fit_experts(given, of_experts, chain, chunks)
        if fits is None:
            return None
        positions.update(fits)
    return positions


def _fit_virtual(parts: Parts, stages: Sequence[Sequence[Buffer]]) -> list[list[Chunk]] | None:
    most = max(map(len, stages))
    for virtual in range(most, 0, -1):
        fitted = fit_chunks(parts, stages, virtual)
        if fitted is not None:
            return fitted
    return None


def _fit_experts(
    given: _Given, experts: Sequence[Parameter], chain: int, stages: Sequence[Sequence[Chunk]]
) -> Positions | None:
    """Experts have buffers of their own, in the order of tensor, expert and pipeline rank.

    Args:
        experts: in the order of registration
    """
    model = given.model
    groups = sorted(group for own, group in given.buffers if own == chain)
    number = 1 + max(parameter.expert for parameter in model.parameters)
    tensor = model.expert_tensor_size
    expert_size = len(groups) // (tensor * len(stages))
    if groups != list(range(tensor * len(stages) * expert_size)) or number % max(expert_size, 1):
        raise CheckpointError(
            f'{given.checkpoint.directory}: {len(groups)} positions of {number} experts, expected '
            f'a multiple of {len(stages)} pipeline stages and {tensor} tensor-parallel ranks'
        )
    local = number // expert_size
    of_rank: dict[tuple[str, int, int], list[tuple[int, Parameter]]] = defaultdict(list)
    for place, parameter in enumerate(experts):
        rank = parameter.expert // local
        of_rank[parameter.block, parameter.layer, rank].append((place, parameter))
    positions: Positions = {}
    for group in groups:
        expert_rank, stage = group // tensor % expert_size, group // (tensor * expert_size)
        left, placed = list(given.buffers[chain, group]), []
        for chunk in stages[stage]:
            found = [
                pair for layer in chunk.layers for pair in of_rank.get((*layer, expert_rank), ())
            ]
            own = [parameter for _, parameter in sorted(found)]
            if not own:
                continue
            used = len({parameter.dtype for parameter in own})
            fitted = fit_buffers(own, left[:used])
            if fitted is None:
                return None
            placed += fitted
            left = left[used:]
        if left:
            return None
        positions[chain, group] = placed
    return positions


def _plan(given: _Given, settings: list[dict[str, Any]], positions: Positions) -> OptimizerPlan:
    checkpoint = given.checkpoint
    in_a_bucket = next(iter(given.buffers.values()))[0].buckets[0].tensors
    states = [PARAM, *sorted(set(in_a_bucket) - {PARAM})]
    stored: Stored = defaultdict(list)
    report: list[Position] = []
    padding = 0
    for position, placed in positions.items():
        own = [bucket for buffer in given.buffers[position] for bucket in buffer.buckets]
        elements = sum(p.parameter.numel for p in placed)
        if own:
            name = own[0].name.partition('.gbuf_idx_')[0]
            report.append(Position(name, len(placed), elements, len(own)))
        padding += sum(bucket.numel for bucket in own) - elements
        for p in placed:
            _take_pieces(given, stored, position, p, states)
    return OptimizerPlan(
        tensors=_tensors(checkpoint, stored, states),
        chunks=list(_chunks(checkpoint, stored, states)),
        settings=settings,
        positions=report,
        padding=padding,
        without_state=sorted(checkpoint.weights.keys() - {key for key, _ in stored}),
    )


def _chunks(checkpoint: Checkpoint, stored: Stored, states: Sequence[str]) -> Iterator[OutputChunk]:
    """The output's chunks; the first position's parameter is written, the others are copies."""
    for (weight, box), (first, *others) in stored.items():
        copies = {state: [copy[state] for copy in others] for state in states}
        yield from output_chunks(checkpoint, weight, box, first, copies)


def _take_pieces(
    given: _Given, stored: Stored, position: tuple[int, int], placed: Placed, states: Sequence[str]
) -> None:
    at, bucket = placed.place.start, placed.place.bucket
    for part in placed.parameter.parts(given.tensor_rank(position)):
        count = part[1].numel
        stored[part].append(
            {state: tuple(bucket.pieces(given.checkpoint, state, at, count)) for state in states}
        )
        at += count


def _tensors(
    checkpoint: Checkpoint, found: Iterable[Part], states: Sequence[str]
) -> dict[str, OutputTensor]:
    boxes: dict[str, list[Box]] = defaultdict(list)
    for weight, box in found:
        boxes[weight].append(box)
    tensors: dict[str, OutputTensor] = {}
    for weight, own in boxes.items():
        entry = checkpoint.weights[weight]
        if set(own) != set(entry.chunks):
            raise CheckpointError(
                f'{checkpoint.directory}: {weight}: {len(own)} of its {len(entry.chunks)} chunks '
                'have optimizer state, expected all or none'
            )
        for state in states:
            tensors[state_key(state, weight)] = OutputTensor(entry.shape, torch.float32, tuple(own))
    return tensors
