"""A look over a pickle before it is loaded: does it ask for more memory than its size explains?

``pickle.Unpickler`` makes room for a memo entry of any number and for a string of any length before
it sees whether there is one, so one flipped bit can cost 64 GiB.
"""

import pickle
import pickletools
import re


def _runs() -> re.Pattern[bytes]:
    """As many operations as there are in a row that can't ask for much."""
    short = b'|'.join(re.escape(bytes([n])) + b'.{%d}' % n for n in range(256))
    fixed: dict[int, bytes] = {}
    lengths, lines = b'', b''
    for operation in pickletools.opcodes:
        code = operation.code.encode('latin-1')
        size = 0 if operation.arg is None else operation.arg.n
        if operation.name in ('STOP', 'PUT', 'LONG_BINPUT'):
            continue
        if size >= 0:
            fixed[size] = fixed.get(size, b'') + re.escape(code)
        elif size == pickletools.TAKEN_FROM_ARGUMENT1:
            lengths += re.escape(code)
        elif size == pickletools.UP_TO_NEWLINE and operation.name not in ('GLOBAL', 'INST'):
            lines += re.escape(code)
    one_of = [b'[%s].{%d}' % (codes, size) for size, codes in sorted(fixed.items())]
    one_of += [
        b'[%s](?:%s)' % (lengths, short),
        rb'[%s][^\n]*+\n' % lines,
        rb'[ci](?:[^\n]*+\n){2}',
    ]
    return re.compile(b'(?:%s)*+' % b'|'.join(one_of), re.DOTALL)


_RUNS = _runs()
_LENGTHS = {  # code to bytes of the length that follows
    operation.code.encode('latin-1')[0]: 8 if operation.arg.n == -5 else 4
    for operation in pickletools.opcodes
    if operation.arg is not None and operation.arg.n < pickletools.TAKEN_FROM_ARGUMENT1
}
_LONG_BINPUT, _PUT = b'r'[0], b'p'[0]


def refuse_memory_request(data: bytes | bytearray) -> None:
    """Refuse a pickle that would make ``pickle.Unpickler`` ask for more memory than it can fill.

    Raises:
        pickle.UnpicklingError: a memo entry or a string larger than the whole pickle
    """
    at, total = 0, len(data)
    while True:
        found = _RUNS.match(data, at)
        at = found.end() if found else at
        code = data[at] if at < total else None
        if code == _LONG_BINPUT:
            _refuse(int.from_bytes(data[at + 1 : at + 5], 'little'), total)
            at += 5
        elif code == _PUT:
            end = data.find(b'\n', at)
            if end < 0:
                return
            digits = data[at + 1 : end]
            _refuse(int(digits) if digits.isdigit() and len(digits) < 20 else total + 1, total)
            at = end + 1
        elif code in _LENGTHS:
            start = at + 1 + _LENGTHS[code]
            size = int.from_bytes(data[at + 1 : start], 'little')
            _refuse(size, total)
            at = start + size
        else:
            return  # the end, or what the unpickler itself will refuse


def _refuse(number: int, total: int) -> None:
    if number > total:
        raise pickle.UnpicklingError(f'asks for {number} entries or bytes in a pickle of {total}')
