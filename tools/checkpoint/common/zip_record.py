"""Where the bytes of a record of an uncompressed zip begin, as its own header says."""

import struct

HEADER = struct.Struct('<4s5H3L2H')


def payload_start(header: bytes | bytearray, name: bytes) -> int | None:
    """Bytes from a record's local header to its content.

    The lengths in the header decide where the content is looked for, and torch checks none of them:
    name and extra fields must fill them exactly.

    Returns:
        the distance; None where the header is damaged
    """
    if len(header) < HEADER.size:
        return None
    magic, *_, name_size, extra_size = HEADER.unpack_from(header)
    at = HEADER.size + name_size
    end = at + extra_size
    if magic != b'PK\x03\x04' or header[HEADER.size : at] != name or end > len(header):
        return None
    while at + 4 <= end:
        at += 4 + int.from_bytes(header[at + 2 : at + 4], 'little')
    return end if at == end else None
