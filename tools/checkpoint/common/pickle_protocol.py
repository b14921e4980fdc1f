"""Pickles of protocols 3 to 5 in protocol 2, the one that torch's restricted unpickler reads.

Nothing is unpickled here: operations are replaced by those that protocol 2 has for the same thing.
``SHORT_BINUNICODE 'torch', MEMOIZE, SHORT_BINUNICODE 'Size', MEMOIZE, STACK_GLOBAL`` becomes
``GLOBAL 'torch Size'``, for example. What may be loaded is still the restricted unpickler's to say.
"""

import pickle
import pickletools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_STRINGS = {'SHORT_BINUNICODE': 2, 'BINUNICODE': 5, 'BINUNICODE8': 9}  # bytes before the text
_BYTES = ('SHORT_BINBYTES', 'BINBYTES', 'BINBYTES8')
_PUTS = ('BINPUT', 'LONG_BINPUT')
_GETS = ('BINGET', 'LONG_BINGET')
_OWN_MEMO = 1 << 31  # numbers from here on are for globals; no pickle has as many entries


def as_protocol_2(data: bytes) -> bytes:
    """The same pickle in protocol 2.

    Raises:
        pickle.UnpicklingError: an operation that protocol 2 has no other for
        ValueError: truncated or garbage
    """
    translation = _Translation()
    for (operation, argument, at), (_, _, end) in pairwise(pickletools.genops(data)):
        if end is not None and at is not None:
            translation.add(operation, argument, data[at:end])
    return translation.result()


@dataclass
class _String:
    """A string on top of the stack.

    Attributes:
        text: UTF-8
        chunks: where it stands in the output
        memo: its number where it is defined there, None where it is only fetched
    """

    text: bytes
    chunks: list[int]
    memo: int | None = None


@dataclass
class _Set:
    """A set that is being filled: a list in protocol 2, and a call in the end.

    Attributes:
        start: where it begins in the output
        end: where it is finished so far
        memo: its number
    """

    start: int
    end: int | None = None
    memo: int | None = None


class _Translation:
    def __init__(self) -> None:
        self._out: list[bytes] = [b'\x80\x02']
        self._memo: set[int] = set()
        self._texts: dict[int, bytes] = {}  # strings by their number
        self._left_out: set[int] = set()  # those of them that only named a global so far
        self._globals: dict[tuple[bytes, bytes], int] = {}
        self._strings: list[_String] = []  # strings on top of the stack
        self._set: _Set | None = None  # set on top of the stack
        self._marks: list[tuple[int, _Set | None]] = []

    def result(self) -> bytes:
        """What was added, in protocol 2."""
        return b''.join(self._out) + pickle.STOP

    def add(self, operation: pickletools.OpcodeInfo, argument: object, raw: bytes) -> None:
        """Translate one operation.

        Raises:
            pickle.UnpicklingError: that can't be done
        """
        name = operation.name
        if name in ('PROTO', 'FRAME'):
            return
        if name == 'MEMOIZE' or name in _PUTS:
            number = len(self._memo) if name == 'MEMOIZE' else argument
            assert isinstance(number, int)
            self._put(number)
            return
        strings, self._strings = self._strings, []
        filled, self._set = self._set, None
        mark = None
        if pickletools.markobject in operation.stack_before:
            if not self._marks:
                raise pickle.UnpicklingError(f'{name} without a mark')
            mark = self._marks.pop()
        if name in _STRINGS:
            self._strings = [*strings[-1:], self._string(raw[_STRINGS[name] :])]
        elif name in _GETS and argument in self._texts:
            assert isinstance(argument, int)
            self._strings = [*strings[-1:], self._fetch(argument, raw)]
        elif name == 'STACK_GLOBAL':
            self._global(*self._named(strings))
        elif name in _BYTES or name == 'BYTEARRAY8':
            self._bytes(bytes(argument), name == 'BYTEARRAY8')  # type: ignore[call-overload]
        elif name == 'EMPTY_SET':
            self._set = _Set(self._write(raw))
        elif name == 'ADDITEMS':
            self._fill(mark[1] if mark else None)
        elif name == 'FROZENSET' and mark:
            self._out[mark[0]] = _plain_global(b'builtins', b'frozenset') + b']('
            self._write(b'e\x85R')
        else:
            at = self._write(raw)
            if name == 'MARK':
                self._marks.append((at, filled))

    def _write(self, data: bytes) -> int:
        self._out.append(data)
        return len(self._out) - 1

    def _put(self, number: int) -> None:
        self._memo.add(number)
        self._texts.pop(number, None)
        self._left_out.discard(number)
        at = self._write(_put(number))
        if self._strings and self._strings[-1].memo is None and len(self._strings[-1].chunks) == 1:
            self._strings[-1].memo = number
            self._strings[-1].chunks.append(at)
            self._texts[number] = self._strings[-1].text
        elif self._set is not None and self._set.memo is None:
            self._set.memo = number
            if self._set.end is None:  # it gets its number when it is finished
                self._set.end = at

    def _string(self, text: bytes) -> _String:
        return _String(text, [self._write(_unicode(text))])

    def _fetch(self, number: int, raw: bytes) -> _String:
        text = self._texts[number]
        if number not in self._left_out:
            return _String(text, [self._write(raw), self._write(b'')])
        self._left_out.discard(number)
        return _String(text, [self._write(_unicode(text)), self._write(_put(number))], number)

    def _named(self, strings: Sequence[_String]) -> tuple[bytes, bytes]:
        """Take the two strings that name a global out of the output again."""
        if len(strings) < 2:
            raise pickle.UnpicklingError('STACK_GLOBAL without two strings')
        for string in strings[-2:]:
            for at in string.chunks:
                self._out[at] = b''
            if string.memo is not None:
                self._left_out.add(string.memo)
        return strings[-2].text, strings[-1].text

    def _global(self, module: bytes, name: bytes) -> None:
        known = self._globals.get((module, name))
        if known is not None:
            self._write(pickle.LONG_BINGET + struct.pack('<I', known))
            return
        number = self._globals[module, name] = _OWN_MEMO + len(self._globals)
        self._write(_plain_global(module, name) + _put(number))

    def _bytes(self, value: bytes, mutable: bool) -> None:
        """As protocol 2 writes bytes: a string to be encoded."""
        if mutable:
            self._global(b'builtins', b'bytearray')
        self._global(b'_codecs', b'encode')
        self._write(_unicode(value.decode('latin-1').encode()) + _unicode(b'latin1') + b'\x86R')
        if mutable:
            self._write(b'\x85R')

    def _fill(self, filled: _Set | None) -> None:
        if filled is None:
            raise pickle.UnpicklingError('ADDITEMS to what is no new set')
        self._out[filled.start] = _plain_global(b'builtins', b'set') + b']'
        if filled.end is not None:
            before = self._out[filled.end]
            self._out[filled.end] = b'e' if before.startswith(b'e') else b''
        number = b'' if filled.memo is None else _put(filled.memo)
        filled.end = self._write(b'e\x85R' + number)
        self._set = filled


def _unicode(text: bytes) -> bytes:
    if len(text) >= 1 << 32:
        raise pickle.UnpicklingError(f'a string of {len(text)} bytes')
    return pickle.BINUNICODE + struct.pack('<I', len(text)) + text


def _put(number: int) -> bytes:
    return pickle.LONG_BINPUT + struct.pack('<I', number)


def _plain_global(module: bytes, name: bytes) -> bytes:
    if b'\n' in module + name:
        raise pickle.UnpicklingError('a global with a line break in its name')
    return pickle.GLOBAL + module + b'\n' + name + b'\n'
