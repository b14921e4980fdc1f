"""What the overlay adds to every start of the interpreter.

    python benchmarks/start_up.py

Starts ``python -c pass`` in a virtual environment with the overlay's wheel and in one without,
taking turns. Names the files that a start opens because of the overlay: a thousand ranks open them
at once, on one network file system.
"""

import argparse
import compileall
import os
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
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory(prefix='benchmark_start_up_') as directory:
        plain, overlaid = (make_environment(Path(directory, name)) for name in ('plain', 'with'))
        install(Path(directory), overlaid)
        measured = {plain: [], overlaid: []}
        for _ in range(runs):
            for environment, starts in measured.items():
                starts.append(start(environment))
        added = sorted(files_opened(overlaid) - files_opened(plain))
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
    print(f'\nFiles opened: {len(added)} more, {", ".join(Path(file).name for file in added)}')
    return 0


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
