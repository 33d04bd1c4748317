"""Checks a precompiled map of characters (SentencePiece): the library trusts its trie, and panics if it is damaged."""

import struct
from base64 import b64decode

_MAX_TEXT = 64  # bytes that a map gives for a character; NFKC has 33 for one
_LEAF = 1 << 8  # the unit has a value, in the first of its children
_VALUE = (1 << 31) - 1


def is_sound(encoded: object) -> bool:
    """Return whether no text leads out of the map, in base64: the trie's bytes, the trie, and texts ended by zeros.

    A unit of the trie (darts-clone) at i has its children in the 256 units around i ^ offset.
    """
    if not isinstance(encoded, str):
        return False
    try:
        data = b64decode(encoded, validate=True)
        (nbytes,) = struct.unpack_from("<I", data)
        units = struct.unpack_from(f"<{nbytes // 4}I", data, 4)
        texts = data[4 + nbytes // 4 * 4 :]
        texts.decode()
    except (ValueError, struct.error):
        return False
    if not units or max(map(len, texts.split(b"\0"))) > _MAX_TEXT:
        return False
    for index, unit in enumerate(units):
        if unit > _VALUE:  # a value itself
            continue
        child = index ^ (unit >> 10) << ((unit & 1 << 9) >> 6)
        if child | 0xFF >= len(units):
            return False
        start = units[child] & _VALUE
        if unit & _LEAF and (start >= len(texts) or texts[start] & 0xC0 == 0x80):
            return False
    return True
