"""Common (non-sharded) state: which source gives it, what changes in it, where it goes."""

import copy
import io
import subprocess
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_overlay.optimizer_classes import is_optimizer_class

from ..common.core_classes import WithStandIns
from ..common.errors import CheckpointError, one_line
from ..common.numbers import whole
from ..common.paths import COMMON_FILE, parse_iteration_dirname
from ..common.stored import COMMON_KEY, read_common_state
from .inputs import Inputs
from .source import Source

PROVENANCE_KEY = 'weighted_merge_provenance'
_IMPLEMENTATION = 'dcp-metadata-same-layout'


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
        return whole(found)


def load_common_state(source: Source, *, trust: bool = False) -> CommonState | None:
    """Common state of a source, from ``common.pt`` or the embedded entry; None if it has none.

    Raises:
        CheckpointError: damaged, or holds a class that isn't admitted
    """
    state = read_common_state(source.directory, source.embedded_common, trust=trust)
    return None if state is None else CommonState(state, source.directory)


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
    states: dict[Path, CommonState | None] = {}

    def is_another_by_name(source: Source) -> bool:
        return parse_iteration_dirname(source.directory.name) != output_iteration

    # what isn't needed isn't read: it may hold what this environment lacks
    for source in sources if output_iteration is None else sorted(sources, key=is_another_by_name):
        try:
            state = load_common_state(source, trust=trust)
        except CheckpointError as error:
            raise CheckpointError(
                f'{error}; or take it from another checkpoint: --common-state-checkpoint'
            ) from error
        if state is not None and output_iteration in (None, state.iteration):
            return state
        states[source.directory] = state
    found = (states[source.directory] for source in sources)
    return next((state for state in found if state is not None), CommonState({}, None))


def output_common_state(
    chosen: CommonState, provenance: Mapping[str, object], output_iteration: int | None
) -> dict[str, Any]:
    """The state that is saved: a copy with the output's iteration and its provenance.

    Classes of optimizers are left out: Megatron stores them, and then refuses to read them.
    """
    state = dict(chosen.state)
    if 'optimizer' in state:
        state['optimizer'] = without_optimizer_classes(state['optimizer'])
    if output_iteration is not None:
        state['iteration'] = output_iteration
        args = copy.copy(state.get('args'))
        values = vars(args) if isinstance(args, Namespace) else args
        if isinstance(values, dict) and 'iteration' in values:
            values['iteration'], state['args'] = output_iteration, args
    state[PROVENANCE_KEY] = dict(provenance)
    return state


def without_optimizer_classes(value: Any) -> Any:
    """A copy without the classes of optimizers in it, which can't be saved again."""
    if isinstance(value, dict):
        return {
            key: without_optimizer_classes(part)
            for key, part in value.items()
            if not _is_optimizer_class(part)
        }
    if isinstance(value, list):
        return [without_optimizer_classes(part) for part in value if not _is_optimizer_class(part)]
    return value


def _is_optimizer_class(value: Any) -> bool:
    return isinstance(value, type) and is_optimizer_class(
        f'{value.__module__}.{value.__qualname__}'
    )


def refuse_unstorable(common: CommonState) -> None:
    """Raise where the state holds what can't be saved again, such as a stand-in for a class."""
    try:
        torch.save(output_common_state(common, {}, None), io.BytesIO(), pickle_module=WithStandIns)
    except Exception as error:
        raise CheckpointError(
            f"{common.origin}: its common state can't be saved again ({one_line(error)}); take it "
            'from another checkpoint: --common-state-checkpoint'
        ) from error


def save_common_state(state: Mapping[str, Any], directory: Path) -> None:
    """Write ``common.pt``, the form that every version of core reads.

    Raises:
        OSError: it can't be written
    """
    data = io.BytesIO()
    torch.save(dict(state), data, pickle_module=WithStandIns)
    (directory / COMMON_FILE).write_bytes(data.getvalue())


def make_provenance(
    inputs: Inputs,
    common_state_source: Path | None,
    extra_state_source: Path,
    *,
    save_dtype: str,
    balanced: bool,
) -> dict[str, object]:
    """Where the output comes from, in plain values, so that any reader of common state loads it."""
    return {
        'inputs': [str(directory.absolute()) for directory in inputs.directories],
        'iterations': inputs.iterations,
        'weights': list(inputs.weights),
        'normalized': inputs.normalized,
        'merge_style': inputs.style,
        'save_dtype': save_dtype,
        'common_state_source': common_state_source and str(common_state_source.absolute()),
        'extra_state_source': str(extra_state_source.absolute()),
        'implementation': _IMPLEMENTATION,
        'balance_rank_work': balanced,
        'git_revision': _git_revision(),
    }


def _git_revision() -> str | None:
    """Commit of the repository that tracks this file; None where none does."""
    file = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        return subprocess.run(
            ['git', '-C', str(file.parent), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()

    try:
        git('ls-files', '--error-unmatch', file.name)
        return git('rev-parse', 'HEAD')
    except (OSError, subprocess.SubprocessError):
        return None
