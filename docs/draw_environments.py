"""Write the table of what the tests ran on, from the results that ``make test`` leaves.

    make test TORCH=2.6.0
    python docs/draw_environments.py

Replaces the rows of ``docs/environments.md`` that it has newer results for; a run of a part of the
tests replaces a row, too.
"""

from collections import Counter
from itertools import takewhile
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / 'docs' / 'environments.md'
RESULTS = REPOSITORY / 'build' / 'results'
PARTS = 'tools', 'overlay', 'dist_checkpointing', 'optimizer', 'training', 'cpu_megatron'
HEAD = f'| torch | megatron-core | Python | date | {" | ".join(PARTS)} | not passed |'
RULE = '|---' * (5 + len(PARTS)) + '|'


def main() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text(encoding='utf-8').partition(f'{HEAD}\n{RULE}\n')
    rows = list(takewhile(lambda line: line.startswith('|'), rest.splitlines()))
    after = '\n'.join(rest.splitlines()[len(rows) :])
    table = {key(row): row for row in [*rows, *map(row, sorted(RESULTS.glob('.venv*.xml')))]}
    lines = [HEAD, RULE, *(table[each] for each in sorted(table))]
    PAGE.write_text(f'{before}{"\n".join(lines)}\n{after}\n', encoding='utf-8')


def key(row: str) -> tuple[tuple[int, ...], ...]:
    """Versions of torch and of megatron-core, to be sorted by."""
    torch, core = (cell.strip() for cell in row.split('|')[1:3])
    return tuple(tuple(map(int, version.split('.'))) for version in (torch, core))


def row(results: Path) -> str:
    """What a run of pytest was on, and the tests that passed in each part."""
    suite = ElementTree.parse(results).getroot()[0]
    found = {each.get('name'): each.get('value') for each in suite.iter('property')}
    passed, others = Counter(), Counter()
    for case in suite.iter('testcase'):
        outcome = {child.tag for child in case} & {'failure', 'error', 'skipped'}
        if outcome:
            others.update(outcome)
        else:
            passed[case.get('classname').split('.')[2]] += 1
    cells = [found['torch'], found['megatron-core'], found['python'], suite.get('timestamp')[:10]]
    cells += [str(passed[part] or '') for part in PARTS]
    cells.append(', '.join(f'{count} {outcome}' for outcome, count in sorted(others.items())))
    return f'| {" | ".join(cells)} |'


if __name__ == '__main__':
    main()
