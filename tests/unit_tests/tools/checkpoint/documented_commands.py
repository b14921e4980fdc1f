"""The shell commands in the documents, and small real checkpoints to run them on.

A document stays readable by leaving things out; what stands in for them here:

- a path of the document (``/ckpt/gpt``, ``ROOT``, ``D``) is a small checkpoint of that kind, an
  output (``OUT``, ``MERGED``) a new directory;
- iterations of thousands are those of the small run;
- ``…`` at the end of a pattern goes on as the pattern began, and in the place of arguments stands
  for those that the sentence before it names (``ELLIPSES``).
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[4]
DOCUMENTS = [
    *(REPOSITORY / name for name in ('README.md', 'CONTRIBUTING.md', 'benchmarks/README.md')),
    *sorted((REPOSITORY / 'docs').glob('*.md')),
]

_PROGRAM = re.compile(
    r'(\$ )?([A-Z_]+=\S+ )*'
    r'(([\w./-]*/)?python3?|make|pip|torchrun|srun|bash|git|ruff|mypy|export|pretrain_\w+\.py'
    r'|megatron-[\w-]+) (?!checkpoint toolkit)'
)
_SPAN = re.compile(r'`([^`\n]+(?:\n[^`\n]+)?)`')
_COMMENT = re.compile(r'\s{2,}#.*|^#.*')


@dataclass(frozen=True)
class Command:
    """One command: the file, the line it begins on, and its text on one line."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f'{self.file}:{self.line}: {self.text}'

    @property
    def words(self) -> list[str]:
        """As the shell splits it, without a prompt and variables in front."""
        words = shlex.split(self.text.removeprefix('$ '))
        while re.fullmatch(r'[A-Z_]+=.*', words[0]):
            del words[0]
        return words


def documented_commands() -> list[Command]:
    """Every command of every document: in fenced and indented blocks, and in running text."""
    return [command for file in DOCUMENTS if file.exists() for command in _commands_of(file)]


def _commands_of(file: Path) -> list[Command]:
    name, found, prose = str(file.relative_to(REPOSITORY)), [], []
    fenced, blank, indented = False, True, False
    lines = file.read_text().splitlines()
    at = 0
    while at < len(lines):
        line, first = lines[at], at + 1
        at += 1
        if line.startswith('```'):
            fenced, blank, indented = not fenced, True, False
            prose.append('')
            continue
        indented = line.startswith('    ') and (blank or indented)
        blank = not line.strip()
        if not (fenced or indented):
            prose.append(line)
            continue
        prose.append('')
        text = _COMMENT.sub('', line.strip())
        while text.endswith('\\') and at < len(lines):
            text = f'{text[:-1].rstrip()} {_COMMENT.sub("", lines[at].strip())}'
            at += 1
            prose.append('')
        if _PROGRAM.match(text):
            found.append(Command(name, first, text))
    text = '\n'.join(prose)
    for span in _SPAN.finditer(text):
        if _PROGRAM.match(span[1]):
            line = text.count('\n', 0, span.start()) + 1
            found.append(Command(name, line, ' '.join(span[1].split())))
    return found


# Arguments that `…` stands for, by what the command begins with.
ELLIPSES = {
    'merge --load-dir-edge': '--save-dir-edge E --save-dir-cloud C --merge-stages 0,3 '
    '--merge-cloud-stages 1,2',
    'reshape …': '--load-dir D --save-dir OUT --pipeline-size 2 --virtual-size 2',
    '--merge-inputs …': 'runs/a/iter_0009000:0.4 runs/a/iter_0010000:0.6 --model-only '
    '--merge-output merged',
}
ITERATIONS = {'8000': '4', '9000': '8', '10000': '12', '500': '4'}
LAYERS = {'3,2,2,3': '2,1,1,0'}  # of the four layers there are


def filled_in(words: list[str], places: dict[str, Path | str]) -> list[str]:
    """A tool's arguments with everything left out put in its place.

    Args:
        words: as they stand in the document
        places: what stands for each of its paths
    """
    text = ' '.join(words)
    for beginning, rest in ELLIPSES.items():
        if '…' in words and (text.startswith(beginning) or beginning in text):
            at = words.index('…')
            words = [*words[:at], *rest.split(), *words[at + 1 :]]
            break
    return [_in_place(word, places) for word in words]


def _in_place(word: str, places: dict[str, Path | str]) -> str:
    if word in ITERATIONS | LAYERS:
        return (ITERATIONS | LAYERS)[word]
    if word.endswith('…') and set(word) <= set('M*-E+…'):
        return 'M*-' * 4
    path, colon, weight = word.partition(':')
    for place, stands in places.items():
        if path == place or path.startswith(f'{place}/'):
            rest = re.sub(
                r'iter_0*(\d+)',
                lambda match: f'iter_{int(ITERATIONS.get(match[1], match[1])):07d}',
                path[len(place) :],
            )
            return f'{stands}{rest}{colon}{weight}'
    return word
