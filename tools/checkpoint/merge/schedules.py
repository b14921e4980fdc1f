"""Weights of the checkpoints of one run: a table of schedules.

A schedule of ``n`` checkpoints is the discrete difference of a decay curve f that falls from
f(0) = 1 to f(1) = 0: checkpoint ``i`` weighs ``f(i/n) - f((i+1)/n)``. The weights sum to 1, and the
merge stands for a run whose learning rate had followed that curve.
"""

import math
import random
from collections.abc import Callable, Sequence

Weights = Callable[[int], list[float]]


def _falling(curve: Callable[[float], float]) -> Weights:
    """Differences of a decay curve at the positions 0, 1/n, … 1."""
    return lambda n: [curve(i / n) - curve((i + 1) / n) for i in range(n)]


SCHEDULES: dict[str, Weights] = {
    'linear': lambda n: [1 / n] * n,
    'minus-sqrt': _falling(lambda x: 1 - math.sqrt(x)),
    'cosine': _falling(lambda x: (1 + math.cos(math.pi * x)) / 2),
    'inverse-sqrt': _falling(lambda x: 2 / math.sqrt(1 + 3 * x) - 1),
}
MODIFIERS = ('reverse', 'scramble')
STYLES = [name + suffix for name in SCHEDULES for suffix in ('', *(f'__{m}' for m in MODIFIERS))]


def checkpoint_coefficients(
    iterations: Sequence[int], style: str = 'linear', seed: int = 0
) -> dict[int, float]:
    """Weight of each checkpoint of a run.

    Args:
        iterations: iterations of the checkpoints, each once, in any order
        style: a name in ``SCHEDULES``, plain or with ``__reverse`` or ``__scramble``
        seed: of ``__scramble``; the same seed gives the same order on every machine

    Returns:
        iteration to weight, in rising order of iteration. ``minus-sqrt`` weighs the oldest
        checkpoint most: it stands for the learning rate that falls first

    Raises:
        ValueError: unknown style, no checkpoint, or an iteration given twice
    """
    name, _, modifier = style.partition('__')
    if style not in STYLES:
        raise ValueError(f'style {style!r}: expected one of {", ".join(STYLES)}')
    ordered = sorted(iterations)
    if not ordered:
        raise ValueError('no checkpoints to weigh')
    twice = sorted({i for i in ordered if ordered.count(i) > 1})
    if twice:
        raise ValueError(f'iterations given twice: {", ".join(map(str, twice))}')
    weights = SCHEDULES[name](len(ordered))
    if modifier == 'reverse':
        weights.reverse()
    elif modifier == 'scramble':
        random.Random(seed).shuffle(weights)
    return dict(zip(ordered, weights, strict=True))
