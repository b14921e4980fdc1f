"""What a tool tells its user: a progress bar on rank 0, and figures in units people read."""

import resource
import sys
from contextlib import AbstractContextManager
from pathlib import Path


class Progress(AbstractContextManager['Progress']):
    """A bar that nobody sees, and what the tools use of one that is seen."""

    def update(self, n: int = 1) -> object:
        """Count ``n`` more units as done; may be called from several threads."""
        return None

    def __exit__(self, *exc_info: object) -> None:
        pass


def progress_bar(total: int, description: str, *, unit: str = 'it', rank: int = 0) -> Progress:
    """A tqdm bar on standard error; none on other ranks, in logs and in pipes.

    Args:
        total: how many units there are; for bytes give ``unit='B'``
    """
    if rank != 0 or sys.stderr is None or not sys.stderr.isatty():
        return Progress()
    from tqdm import tqdm

    return tqdm(total=total, desc=description, unit=unit, unit_scale=unit == 'B', unit_divisor=1024)


def format_bytes(size: float) -> str:
    """``1.50 GiB`` for 1610612736."""
    for unit in ('B', 'KiB', 'MiB', 'GiB'):
        if abs(size) < 1024:
            return f'{size:.0f} B' if unit == 'B' else f'{size:.2f} {unit}'
        size /= 1024
    return f'{size:.2f} TiB'


def format_rate(size: float, seconds: float) -> str:
    """Bytes per second, such as ``1.25 GiB/s``; ``-`` where no time passed."""
    return f'{format_bytes(size / seconds)}/s' if seconds > 0 else '-'


def format_seconds(seconds: float) -> str:
    """``0.42 s``, or ``3 min 12 s`` from two minutes on."""
    if seconds < 120:
        return f'{seconds:.2f} s'
    return f'{int(seconds) // 60} min {int(seconds) % 60} s'


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes.

    From ``VmHWM`` where there is one: ``ru_maxrss`` starts with that of the parent process.
    """
    found = _process_status('VmHWM')
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if found is None else found


def resident_memory() -> int:
    """Resident size of this process in bytes; its peak where the system doesn't tell."""
    found = _process_status('VmRSS')
    return peak_memory() if found is None else found


def _process_status(name: str) -> int | None:
    try:
        for line in Path('/proc/self/status').read_text().splitlines():
            if line.startswith(f'{name}:'):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
