"""What the overlay adds to every start of the interpreter, and how soon a tool answers.

    python benchmarks/start_up.py

Starts ``python -c pass`` in a virtual environment with the overlay's wheel and in one without,
taking turns. Names the files that a start opens because of the overlay: a thousand ranks open them
at once, on one network file system. Then runs each tool where it only looks, on checkpoints that
``examples/make_checkpoints.py`` makes, in turn with ``python -c "import torch"``.
"""

import argparse
import compileall
import os
import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
MERGE = 'weighted_merge.py --model-only --merge-output merged --dry-run --merge-inputs'
TOOLS = (
    'weighted_merge.py --help',
    'convert_ckpt_pp_vpp.py --help',
    'gpt_into_hybrid.py --help',
    'inspect_checkpoint.py --help',
    'inspect_checkpoint.py gpt',
    'inspect_checkpoint.py legacy',
    'gpt_into_hybrid.py gpt M*-M*-M*-M*-',
    f'{MERGE} gpt/iter_0000004:1 gpt/iter_0000008:1',
    f'{MERGE} gpt/iter_0000004:1 legacy:1',
    'convert_ckpt_pp_vpp.py merge --load-dir legacy --save-dir out --pipeline-size 2 --dry-run',
    'convert_ckpt_pp_vpp.py merge --load-dir legacy --save-dir out --pipeline-size 3',
)
# Start-up files are run in the order of their names.
COUNTER = (
    'import sys, atexit; sys.opened = getattr(sys, "opened", set()); '
    'sys.addaudithook(lambda event, args: event == "open" and sys.opened.add(args[0])); '
    'atexit.register(lambda: print(*sys.opened, sep="\\n"))\n'
)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--runs', type=int, default=300, help='of each (default: %(default)s)')
    parser.add_argument(
        '--tool-runs', type=int, default=5, help='of each tool (default: %(default)s)'
    )
    options = parser.parse_args()
    runs = options.runs
    with tempfile.TemporaryDirectory(prefix='benchmark_start_up_') as directory:
        plain, overlaid = (make_environment(Path(directory, name)) for name in ('plain', 'with'))
        install(Path(directory), overlaid)
        measured = {plain: [], overlaid: []}
        for _ in range(runs):
            for environment, starts in measured.items():
                starts.append(start(environment))
        opened = {environment: files_opened(environment) for environment in measured}
    added = sorted(opened[overlaid] - opened[plain])
    print('| `python -c pass` | median, ms | least, ms | processor time, median, ms |')
    print('|---|---|---|---|')
    rows = {}
    for label, environment in ('without the overlay', plain), ('with it', overlaid):
        wall, processor = zip(*measured[environment], strict=True)
        rows[label] = statistics.median(wall), min(wall), statistics.median(processor)
    without, with_it = rows.values()
    rows['added'] = [after - before for before, after in zip(without, with_it, strict=True)]
    for label, cells in rows.items():
        print(f'| {label} | {" | ".join(f"{cell:.2f}" for cell in cells)} |')
    ratios = (after / before for before, after in zip(without, with_it, strict=True))
    print(f'| ratio | {" | ".join(f"{ratio:.3f}" for ratio in ratios)} |')
    print(
        f'\nFiles opened: {len(opened[plain])} without, {len(opened[overlaid])} with it: ', end=''
    )
    print(', '.join(Path(file).name for file in added))
    print_tools(options.tool_runs)
    return 0


def print_tools(runs: int) -> None:
    """Print the table of the tools: processor time and memory, the least of all runs."""
    with tempfile.TemporaryDirectory(prefix='benchmark_start_up_') as directory:
        make = [sys.executable, '-W', 'ignore', REPOSITORY / 'examples/make_checkpoints.py']
        for words in ['gpt'], ['legacy', '--ckpt-format', 'torch', '--pipeline-size', '4']:
            subprocess.run([*make, *words], cwd=directory, check=True, stdout=subprocess.DEVNULL)
        commands = {'python -c "import torch"': ['-c', 'import torch']}
        commands['python -c "import torch.distributed.checkpoint"'] = [
            *('-c', 'import torch.distributed.checkpoint')
        ]
        for line in TOOLS:
            script, *words = shlex.split(line)
            commands[line] = [REPOSITORY / 'tools/checkpoint' / script, *words]
        measured = {label: [] for label in commands}
        for _ in range(runs + 1):  # the first one compiles
            for label, arguments in commands.items():
                measured[label].append(look(arguments, directory))
    print('\n| what | processor time, s | memory, MiB | ratio of time |')
    print('|---|---|---|---|')
    least = {label: tuple(map(min, zip(*found, strict=True))) for label, found in measured.items()}
    reference, _ = next(iter(least.values()))
    for label, (seconds, memory) in least.items():
        print(f'| `{label}` | {seconds:.2f} | {memory:.0f} | {seconds / reference:.2f} |')


def look(arguments: list, directory: str) -> tuple[float, float]:
    """Processor time in s and the most memory in MiB of ``python arguments``."""
    variables = {key: value for key, value in os.environ.items() if key[:6] != 'PYTHON'}
    child = subprocess.Popen(
        [sys.executable, '-W', 'ignore', *arguments],
        cwd=directory,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in (0, 1):
        raise RuntimeError(f'{arguments}: exited with {child.returncode}')
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def make_environment(root: Path) -> Path:
    """An empty virtual environment."""
    venv.create(root, with_pip=False, symlinks=True)
    return root


def install(directory: Path, environment: Path) -> None:
    """Build the overlay's wheel and unpack it, compiled, as pip does."""
    sources = directory / 'sources'
    tracked = ['git', '-C', REPOSITORY, 'ls-files', '-z', '--cached', '--others']
    listed = subprocess.run([*tracked, '--exclude-standard'], check=True, stdout=subprocess.PIPE)
    for name in listed.stdout.decode().split('\0'):
        if name and (REPOSITORY / name).is_file():
            copy = sources / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((REPOSITORY / name).read_bytes())
    subprocess.run(
        [sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-build-isolation', '--quiet']
        + ['--no-index', '--disable-pip-version-check', '-w', directory, sources],
        check=True,
    )
    (wheel,) = directory.glob('*.whl')
    version = f'python{sysconfig.get_python_version()}'
    site_packages = environment / 'lib' / version / 'site-packages'
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    compileall.compile_dir(site_packages, quiet=1)


def files_opened(environment: Path) -> set[str]:
    """What a start opens from its first start-up file on; relative paths in ``environment``."""
    version = f'python{sysconfig.get_python_version()}'
    counter = environment / 'lib' / version / 'site-packages' / 'a_counter.pth'
    counter.write_text(COUNTER)
    python = environment / 'bin' / 'python'
    run = subprocess.run([python, '-c', 'pass'], env={}, check=True, capture_output=True, text=True)
    counter.unlink()
    return {file.removeprefix(f'{environment}/') for file in run.stdout.splitlines()}


def start(environment: Path) -> tuple[float, float]:
    """Wall and processor time of one start, in ms."""
    begin = time.perf_counter()
    child = subprocess.Popen([environment / 'bin' / 'python', '-c', 'pass'], env={})
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f'{environment}: python exited with {child.returncode}')
    return 1000 * wall, 1000 * (usage.ru_utime + usage.ru_stime)


if __name__ == '__main__':
    sys.exit(main())
