"""Why two checkpoints can't be merged, by the merge's own checks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.directory import resolve_checkpoint
from ..common.errors import CheckpointError
from ..common.paths import real_path
from ..merge.common_state import load_common_state
from ..merge.source import Source, read_source
from ..merge.validate import Difference, differences

MODEL_ONLY = '--model-only'


@dataclass
class Comparison:
    """Two checkpoints as inputs of one merge.

    Attributes:
        directories: of the two
        faults: one line for each of them that the merge refuses by itself
        differences: everything in which the second differs from the first
        options: of the merge, which it needs to take the two
    """

    directories: Sequence[Path]
    faults: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    options: list[str] = field(default_factory=list)

    @property
    def mergeable(self) -> bool:
        """Whether the merge takes the two, given the options."""
        return not self.faults and all(item.option for item in self.differences)

    def groups(self) -> list[list[Difference]]:
        """The differences by kind, in the order of checking."""
        groups: dict[str, list[Difference]] = {}
        for item in self.differences:
            groups.setdefault(item.kind, []).append(item)
        return list(groups.values())

    def as_json(self) -> dict[str, Any]:
        """The same as one JSON object, with every difference."""
        return {
            'directories': list(map(str, self.directories)),
            'mergeable': self.mergeable,
            'options': self.options,
            'faults': self.faults,
            'differences': [
                {'kind': d.kind.rstrip(':'), 'key': d.key, 'text': d.text, 'option': d.option}
                for d in self.differences
            ],
        }


def compare_checkpoints(first: str | Path, other: str | Path) -> Comparison:
    """Compare two checkpoints as the merge does; only metadata and common state are read.

    Raises:
        CheckpointError: one of the paths is no checkpoint that the merge knows, or both are the
            same
    """
    directories = resolve_checkpoint(first), resolve_checkpoint(other)
    if real_path(directories[0]) == real_path(directories[1]):
        raise CheckpointError(f'{other}: the same checkpoint as {first}; name two')
    comparison = Comparison(directories)
    sources: list[Source] = []
    for directory in comparison.directories:
        try:
            source = read_source(directory, model_only=True)
            load_common_state(source)
        except CheckpointError as error:
            comparison.faults.append(str(error))
        else:
            sources.append(source)
    if comparison.faults:
        return comparison
    comparison.differences = list(differences(sources[1], sources[0]))
    needed = [MODEL_ONLY] if any(source.left_out for source in sources) else []
    needed += [item.option for item in comparison.differences if item.option]
    if comparison.mergeable:
        comparison.options = list(dict.fromkeys(needed))
    return comparison
