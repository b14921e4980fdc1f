"""Growth of processor time with the number of chunks, drawn as SVG."""

import math
from collections.abc import Iterator

WIDTH, HEIGHT, GAP = 300, 220, 50
COLOURS = {1: '#4c78a8', 8: '#72b7b2', 64: '#f58518', 1024: '#e45756'}
TIMES = 1e-4, 1e3  # s
CHUNKS = 1e3, 1e7


def draw(found: list[dict]) -> str:
    """Growth as SVG: a panel for each part, both axes logarithmic."""
    parts = list(dict.fromkeys(figures['part'] for figures in found))
    width, height = 2 * (WIDTH + GAP) + GAP, -(-len(parts) // 2) * (HEIGHT + 2 * GAP) + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, part in enumerate(parts):
        left, top = GAP + number % 2 * (WIDTH + GAP), GAP + number // 2 * (HEIGHT + 2 * GAP)
        lines += panel(part, [f for f in found if f['part'] == part], left, top)
    text = 'line: rank 0; dashed: another rank; grey: twice the time for twice the chunks. Ranks:'
    lines.append(f'<text x="{GAP}" y="{height - 20}">{text}</text>')
    for number, ranks in enumerate(sorted({figures['ranks'] for figures in found})):
        at = GAP + 470 + 50 * number
        lines.append(f'<text x="{at}" y="{height - 20}" fill="{COLOURS[ranks]}">{ranks}</text>')
    return '\n'.join([*lines, '</svg>']) + '\n'


def panel(part: str, found: list[dict], left: int, top: int) -> Iterator[str]:
    """One part: processor time by number of chunks."""

    def at(chunks: float, seconds: float) -> str:
        x, y = (
            math.log(value / low) / math.log(high / low)
            for value, (low, high) in ((chunks, CHUNKS), (max(seconds, TIMES[0]), TIMES))
        )
        return f'{left + WIDTH * x:.1f},{top + HEIGHT * (1 - y):.1f}'

    def line(points: list[tuple[float, float]], style: str) -> str:
        return f'<polyline points="{" ".join(at(*p) for p in points)}" fill="none" {style}/>'

    yield f'<text x="{left}" y="{top - 8}" font-weight="bold">{part}, s</text>'
    yield (
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#333"/>'
    )
    for power in range(-4, 4):
        x, y = at(CHUNKS[0], 10.0**power).split(',')
        yield f'<text x="{float(x) - 4}" y="{float(y) + 4}" text-anchor="end">1e{power}</text>'
        yield line([(CHUNKS[0], 10.0**power), (CHUNKS[1], 10.0**power)], 'stroke="#eee"')
    for power in range(3, 8):
        x, y = at(10.0**power, TIMES[0]).split(',')
        yield f'<text x="{x}" y="{float(y) + 14}" text-anchor="middle">1e{power}</text>'
    yield f'<text x="{left + WIDTH}" y="{top + HEIGHT + 28}" text-anchor="end">chunks</text>'
    yield line([(CHUNKS[0], 0.01), (CHUNKS[1], 100)], 'stroke="#bbb"')
    for ranks in sorted({figures['ranks'] for figures in found}):
        own = sorted((f for f in found if f['ranks'] == ranks), key=lambda f: f['chunks'])
        for which, dashes in ((0, ''), (1, 'stroke-dasharray="5 4"')):
            points = [(f['chunks'], f['seconds'][which]) for f in own if f['seconds'][which]]
            yield line(points, f'stroke="{COLOURS[ranks]}" stroke-width="2" {dashes}')
