"""Draw the merge schedules as SVG, from the table that the tool uses.

    python docs/draw_schedules.py [FILE]

Writes ``docs/schedules.svg``: for each schedule the weights of eight checkpoints as bars, oldest
first, and the decay curve whose steps they are.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.checkpoint.merge.schedules import SCHEDULES, checkpoint_coefficients

COUNT = 8
WIDTH, HEIGHT, GAP = 210, 170, 24
BAR, CURVE, INK = '#4c78a8', '#e45756', '#333333'


def panel(name: str, left: int, top: int) -> list[str]:
    """One schedule: its bars, scaled to the largest weight of all, and its curve from 1 to 0."""
    weights = list(checkpoint_coefficients(range(COUNT), name).values())
    highest = max(max(checkpoint_coefficients(range(COUNT), n).values()) for n in SCHEDULES)
    step, base = WIDTH / COUNT, top + HEIGHT
    parts = [
        f'<text x="{left}" y="{top - 8}" font-weight="bold">{name}</text>',
        f'<line x1="{left}" y1="{base}" x2="{left + WIDTH}" y2="{base}" stroke="{INK}"/>',
    ]
    remaining, points = 1.0, [f'{left},{top}']
    for index, weight in enumerate(weights):
        x, height = left + index * step, HEIGHT * weight / highest
        parts.append(
            f'<rect x="{x + 3:.1f}" y="{base - height:.1f}" width="{step - 6:.1f}" '
            f'height="{height:.1f}" fill="{BAR}"><title>{weight:.6f}</title></rect>'
        )
        parts.append(
            f'<text x="{x + step / 2:.1f}" y="{base + 11}" font-size="8" text-anchor="middle">'
            f'{weight:.3f}</text>'
        )
        remaining -= weight
        points.append(f'{x + step:.1f},{top + HEIGHT * (1 - remaining):.1f}')
    parts.append(
        f'<polyline points="{" ".join(points)}" fill="none" stroke="{CURVE}" stroke-width="2"/>'
    )
    parts.append(f'<text x="{left}" y="{base + 26}">oldest</text>')
    parts.append(f'<text x="{left + WIDTH}" y="{base + 26}" text-anchor="end">newest</text>')
    return parts


def draw() -> str:
    """The whole picture, two schedules a row."""
    rows = (len(SCHEDULES) + 1) // 2
    width, row = 2 * WIDTH + 3 * GAP, HEIGHT + 3 * GAP
    height = rows * row + 2 * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, name in enumerate(SCHEDULES):
        parts += panel(name, GAP + index % 2 * (WIDTH + GAP), GAP + 16 + index // 2 * row)
    for line, text in enumerate(
        (
            f'bars: weights of {COUNT} checkpoints, on one scale',
            'line: the decay of the learning rate that they stand for, from 1 to 0',
        )
    ):
        parts.append(f'<text x="{GAP}" y="{height - 30 + 16 * line}">{text}</text>')
    return '\n'.join([*parts, '</svg>']) + '\n'


if __name__ == '__main__':
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name('schedules.svg')
    target.write_text(draw())
