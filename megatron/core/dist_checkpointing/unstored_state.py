"""State that a checkpoint doesn't have, and the options with which a run doesn't ask for it.

Merged checkpoints have weights alone. FusedAdam allocates its moments in its first step, and
megatron-core without this package stores those that there are.
"""

from collections.abc import Collection, Mapping

from .checkpoint_keys import OPTIMIZER, PARAM, RNG, is_in_buckets, kind_of
from .format_names import TORCH_DIST
from .stored_checkpoint import StoredCheckpoint

# by its name in the run's state dict
_OPTIONS = {OPTIMIZER: '--no-load-optim', RNG: '--no-load-rng'}
NO_OPTIMIZER = 'no optimizer state'
NO_RNG = 'no random state'
NO_MOMENTS = "no moments in its optimizer state, saved before the optimizer's first step"


def unstored_state(stored: StoredCheckpoint) -> dict[str, str]:
    """What of the state that runs ask for by default isn't there, in words, by its name.

    Args:
        stored: the checkpoint; nothing is known of one whose keys aren't looked at.
    """
    found, layout = {}, stored.layout
    if stored.release:
        return {}
    if saved_without_optimizer(stored) or (layout is not None and not layout.has_optimizer):
        found[OPTIMIZER] = NO_OPTIMIZER
    if layout is None or stored.format != TORCH_DIST:
        return found
    in_buckets = {key.rpartition('.')[2] for key in layout.keys if is_in_buckets(key)}
    if in_buckets == {PARAM} and getattr(stored.args, 'optimizer', None) == 'adam':
        found[OPTIMIZER] = NO_MOMENTS
    # no run asks for what its arguments say was left out
    left_out = getattr(stored.args, 'no_save_rng', False) is True
    if not left_out and not any(kind_of(key) == RNG for key in layout.keys):
        found[RNG] = NO_RNG
    return found


def saved_without_optimizer(stored: StoredCheckpoint) -> bool:
    """Whether the checkpoint's arguments say that its optimizer was left out."""
    return getattr(stored.args, 'no_save_optim', False) is True


def unstored_options(unstored: Collection[str]) -> list[str]:
    """Options of a run that doesn't ask for it."""
    return [_OPTIONS[name] for name in unstored]


def unstored_reason(unstored: Mapping[str, str]) -> str:
    """One sentence with the way out; empty where nothing is missing."""
    if not unstored:
        return ''
    weights_only = unstored.get(OPTIMIZER) == NO_OPTIMIZER and RNG in unstored
    merged = ', as merged ones' if weights_only else ''
    them = 'them' if len(unstored) > 1 else 'it'
    return (
        f'The checkpoint has {" and ".join(unstored.values())}{merged}; pass '
        f'{" ".join(unstored_options(unstored))} to start {them} fresh.'
    )
