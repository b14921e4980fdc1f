"""Damage for checkpoint files, as hypothesis strategies, and a guard that watches its effect."""

import copy
import io
import json
import os
import pickle
import resource
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, reject, settings
from hypothesis import strategies as st

from tools.checkpoint.common.errors import CheckpointError

# RELIABILITY_EXAMPLES=5000 makes a campaign: that many examples, from another seed each run.
EXAMPLES = int(os.environ.get('RELIABILITY_EXAMPLES', '0'))
MEMORY = 1 << 30  # bytes that a tool may ask for on top of what the process has
SECONDS = 20

_NUMBERS = [
    0,
    1,
    2,
    0x7F,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0xFFFFFFFF,
    2**40,
    2**63 - 1,
    2**64 - 1,
]
_ODD = [
    None,
    True,
    -1,
    0,
    3,
    2**31,
    2**40,
    2**70,
    10**500,
    10**5000,
    1.5,
    float('nan'),
    '',
    'x',
    'a\nb\x1b[31m',
    'a\0b',
    '\ud800',
    '../../etc/passwd',
    'decoder.layers.9999999999.mlp.linear_fc1.weight',
    'model99999999',
    b'',
    b'\x00' * 9,
    (),
    [],
    {},
    [[]],
    {'params': 3},
    (2**40, 2**40),
    torch.Size((2**40, 2**20)),
    torch.zeros(3),
    torch.float16,
    torch.int8,
]

_INDEX = st.integers(0, len(_ODD) - 1)  # hypothesis can't show all of them


def examples(number: int) -> Any:
    """Settings of a property: ``number`` fixed examples, or as many as a campaign asks for."""
    return settings(
        max_examples=EXAMPLES or number,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate] if not EXAMPLES else [Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def damaged_bytes(draw: Any, data: bytes) -> bytes:
    """``data`` with one to three of: bits flipped, bytes set, numbers replaced, parts cut, doubled
    or moved, or the end missing."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        if not found:
            break
        at = draw(st.integers(0, len(found) - 1))
        kind = draw(st.sampled_from(('bit', 'byte', 'number', 'cut', 'double', 'move', 'end')))
        if kind == 'bit':
            found[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == 'byte':
            found[at] = draw(st.integers(0, 255))
        elif kind == 'number':
            size = draw(st.sampled_from((1, 2, 4, 8)))
            number = draw(st.sampled_from(_NUMBERS)) % (1 << 8 * size)
            found[at : at + size] = number.to_bytes(size, 'little')
        elif kind == 'end':
            del found[at:]
        else:
            part = found[at : at + draw(st.integers(1, 64))]
            if kind != 'double':
                del found[at : at + len(part)]
            if kind != 'cut':
                to = draw(st.integers(0, len(found)))
                found[to:to] = part
    return bytes(found)


@st.composite
def damaged_object(draw: Any, value: Any) -> Any:
    """A copy of a tree of containers, dataclasses and namespaces with one to three nodes replaced
    by something odd, or left out, or renamed."""
    changed = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        node, key, children = changed, None, _children(changed)
        parent: Any = None
        while children and (parent is None or draw(st.integers(0, 3))):
            parent, key = node, draw(st.sampled_from(children))
            node = _child(parent, key)
            children = _children(node)
        if parent is None:
            return _ODD[draw(_INDEX)]
        kind = draw(st.sampled_from(('replace', 'replace', 'drop', 'rename')))
        _change(parent, key, kind, _ODD[draw(_INDEX)])
    return changed


@st.composite
def damaged_pickle(draw: Any, value: Any) -> bytes:
    """The pickle of what ``damaged_object`` makes, but for what can't be pickled."""
    changed = draw(damaged_object(value))
    try:
        return pickle.dumps(changed)
    except Exception:
        reject()


@st.composite
def damaged_json(draw: Any, value: Any) -> bytes:
    """The same as JSON, or that with damaged bytes."""
    changed = draw(damaged_object(value))
    try:
        whole = json.dumps(changed).encode()
    except Exception:
        reject()
    return draw(st.one_of(st.just(whole), damaged_bytes(whole)))


@st.composite
def looped_file(draw: Any, value: Any) -> bytes:
    """A saved copy of a tree of containers and namespaces of which one contains itself."""
    changed = copy.deepcopy(value)
    parents, node, key = [], changed, None
    while isinstance(node, (dict, list, Namespace)) and (children := _children(node)):
        parents.append(node)
        key = draw(st.sampled_from(children))
        node = _child(node, key)
    _change(parents[-1], key, 'replace', parents[draw(st.integers(0, len(parents) - 1))])
    return saved(changed)


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node)
    if isinstance(node, list):
        return list(range(len(node)))
    if isinstance(node, Namespace):
        return list(vars(node))
    if is_dataclass(node):
        return [field.name for field in fields(node) if hasattr(node, field.name)]
    return []


def _child(node: Any, key: Any) -> Any:
    return node[key] if isinstance(node, (dict, list)) else getattr(node, key)


def _change(parent: Any, key: Any, kind: str, odd: Any) -> None:
    if isinstance(parent, dict):
        value = parent.pop(key) if kind != 'replace' else None
        if kind == 'replace':
            parent[key] = odd
        elif kind == 'rename':
            try:
                parent[odd] = value
            except TypeError:
                pass
    elif isinstance(parent, list):
        if kind == 'replace':
            parent[key] = odd
        elif kind == 'drop':
            del parent[key]
        else:
            parent.insert(0, parent.pop(key))
    elif kind == 'drop':
        vars(parent).pop(key, None)
    else:
        object.__setattr__(parent, key, odd)


class Hang(BaseException):
    """The tool computed for longer than ``SECONDS``."""


_watching: list[str] = []
_hooked = False
_EVENTS = ('os.system', 'os.exec', 'os.posix_spawn', 'os.fork', 'socket.connect', 'os.putenv')


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and (event in _EVENTS or event == 'subprocess.Popen'):
        if event != 'subprocess.Popen' or arguments[0] != 'git':  # the provenance asks git
            _watching.append(event)


@contextmanager
def guarded() -> Iterator[None]:
    """Let a tool have ``MEMORY`` more bytes and ``SECONDS`` of processor time, and start nothing.

    Raises:
        AssertionError: it asked for more, or started something
        Hang: it computed for longer
    """
    global _hooked
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open('/proc/self/statm') as file:
        size = int(file.read().split()[0]) * resource.getpagesize()

    def expired(signum: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, expired)
    _watching[:] = ['']
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with mock.patch('os.fsync'):  # thousands of files that nobody will want after a crash
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        started, _watching[:] = _watching[1:], []
    assert not started, started


def refused(action: Callable[[], Any]) -> CheckpointError | None:
    """Run ``action`` guarded; the one-line error that it ended with, or None after success.

    Any other exception, and memory that ran out behind an error, come through.
    """
    try:
        with guarded():
            action()
    except CheckpointError as error:
        cause: BaseException | None = error
        while cause is not None:
            assert not isinstance(cause, MemoryError), f'asked for memory: {error}'
            assert 'allocate memory' not in str(cause), f'asked for memory: {cause}'
            cause = cause.__cause__ or cause.__context__
        assert str(error).isprintable() and str(error), repr(str(error))
        return error
    return None


def saved(value: Any) -> bytes:
    """What ``torch.save`` makes of ``value``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
