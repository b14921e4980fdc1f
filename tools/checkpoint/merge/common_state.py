"""Common (non-sharded) state: which source gives it, what changes in it, where it goes."""

import copy
import io
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..common.errors import CheckpointError
from ..common.safe_load import load_torch
from .payload import read_bytes
from .source import COMMON_FILE, COMMON_KEY, Source

PROVENANCE_KEY = 'weighted_merge_provenance'


@dataclass
class CommonState:
    """Common state of one source.

    Attributes:
        state: the state dict; empty where no source has any
        origin: the checkpoint directory it comes from; None where there is none
    """

    state: dict[str, Any]
    origin: Path | None

    @property
    def iteration(self) -> int | None:
        """The iteration that the state records."""
        found = self.state.get('iteration')
        return found if isinstance(found, int) else None


def load_common_state(source: Source, *, trust: bool = False) -> CommonState | None:
    """Common state of a source, from ``common.pt`` or the embedded entry; None if it has none.

    Raises:
        CheckpointError: damaged, or holds a class that isn't admitted
    """
    if source.common_file is not None:
        name = str(source.common_file)
        state = load_torch(source.common_file, trust=trust)
    elif source.embedded_common is not None:
        piece = source.embedded_common
        path = source.directory / piece.file
        name = f'{path}: {COMMON_KEY}'
        state = load_torch(io.BytesIO(read_bytes(path, piece)), trust=trust, name=name)
        if isinstance(state, list) and len(state) == 1:  # a sharded object is saved as a list
            state = state[0]
    else:
        return None
    if not isinstance(state, dict):
        raise CheckpointError(f'{name}: holds {type(state).__name__}, expected a state dict')
    return CommonState(state, source.directory)


def choose_common_state(
    sources: Sequence[Source],
    *,
    output_iteration: int | None = None,
    given: Source | None = None,
    trust: bool = False,
) -> CommonState:
    """The common state that the output takes over.

    Args:
        sources: the inputs in merge order
        output_iteration: prefer the input that records it
        given: the checkpoint of ``--common-state-checkpoint``

    Raises:
        CheckpointError: ``given`` has none, or records another iteration
    """
    if given is not None:
        chosen = load_common_state(given, trust=trust)
        if chosen is None:
            raise CheckpointError(
                f'{given.directory}: no common state ({COMMON_FILE} or '
                f'{COMMON_KEY}), expected one in --common-state-checkpoint'
            )
        if None not in (output_iteration, chosen.iteration) and (
            chosen.iteration != output_iteration
        ):
            raise CheckpointError(
                f'{given.directory}: records iteration {chosen.iteration}, but --output-iteration '
                f'is {output_iteration}'
            )
        return chosen
    states = [load_common_state(source, trust=trust) for source in sources]
    present = [state for state in states if state is not None]
    if output_iteration is not None:
        for state in present:
            if state.iteration == output_iteration:
                return state
    return present[0] if present else CommonState({}, None)


def output_common_state(
    chosen: CommonState, provenance: Mapping[str, object], output_iteration: int | None
) -> dict[str, Any]:
    """The state that is saved: a copy with the output's iteration and its provenance."""
    state = dict(chosen.state)
    if output_iteration is not None:
        state['iteration'] = output_iteration
        if isinstance(state.get('args'), Namespace) and hasattr(state['args'], 'iteration'):
            state['args'] = copy.copy(state['args'])
            state['args'].iteration = output_iteration
    state[PROVENANCE_KEY] = dict(provenance)
    return state


def save_common_state(state: Mapping[str, Any], directory: Path) -> None:
    """Write ``common.pt``, the form that every version of core reads.

    Raises:
        OSError: it can't be written
    """
    data = io.BytesIO()
    torch.save(dict(state), data)
    (directory / COMMON_FILE).write_bytes(data.getvalue())
