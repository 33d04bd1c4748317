"""Token ids to bytes, one token at a time, so that a stream and a whole text are the same text by construction.

Knows the two decoders of the supported families: byte-level BPE, and SentencePiece written as Replace / ByteFallback /
Fuse / Strip or as Metaspace. Does not use the library's decoder: it needs the whole text, and is a stranger's program.
Equal to it except where the model writes bytes that are not UTF-8: there, byte tokens give one U+FFFD per ill-formed
sequence (Unicode's recommended practice), where the library gives one per byte and damages the valid bytes around it.
"""

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from mycli.runtime.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for the 256 bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _unsupported(decoder: object) -> ModelError:
    return ModelError(
        f"tokenizer.json: decoder {str(decoder)[:120]} is not supported",
        "readable: ByteLevel, Metaspace, and sequences of Replace, ByteFallback, Fuse, Strip",
    )


class Detokenizer:
    """The bytes of each token.

    `vocabulary` is indexed by id (None: no such token), `hidden` are ids that show nothing (special tokens), `decoder`
    is the section of tokenizer.json. Raises ModelError for a decoder it does not know.
    """

    def __init__(self, vocabulary: Sequence[str | None], hidden: Set[int], decoder: Any) -> None:
        self._vocabulary = vocabulary
        self._hidden = hidden
        self._bytes: Mapping[str, int] | None = None
        self._replace: list[tuple[str, str]] = []
        self._byte_tokens = False
        self._metaspace = ""  # removed from the first token
        self.strip_spaces = 0  # how many spaces the start of a text loses
        sequence = isinstance(decoder, dict) and decoder.get("type") == "Sequence"
        steps = decoder.get("decoders") if sequence else [decoder]
        if not steps or not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
            raise _unsupported(decoder)
        fused = False
        for step in steps:
            kind = step.get("type")
            if kind == "ByteLevel" and len(steps) == 1:
                self._bytes = _byte_alphabet()
            elif kind == "Metaspace" and len(steps) == 1:
                mark = str(step.get("replacement", "▁"))
                self._replace.append((mark, " "))
                self._metaspace = "" if step.get("prepend_scheme") == "never" else mark
            elif kind == "Replace" and not fused and not self._byte_tokens:
                self._replace.append(self._read_replace(step))
            elif kind == "ByteFallback" and not fused:
                self._byte_tokens = True
            elif kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused and step.get("content") == " " and not step.get("stop"):
                self.strip_spaces = int(step.get("start", 0))
            else:
                raise _unsupported(step)

    @staticmethod
    def _read_replace(step: Mapping[str, Any]) -> tuple[str, str]:
        pattern, content = step.get("pattern"), step.get("content")
        source = pattern.get("String") if isinstance(pattern, dict) else None
        if not isinstance(source, str) or not source or not isinstance(content, str) or len(content) > 8:
            raise _unsupported(step)
        return source, content

    def piece(self, token_id: int, first: bool) -> bytes | None:
        """The bytes of a token; None for one that shows nothing. `first`: no token was shown before it."""
        token = self._vocabulary[token_id] if 0 <= token_id < len(self._vocabulary) else None
        if token is None or token_id in self._hidden:
            return None
        if self._bytes is not None:
            try:
                return bytes(self._bytes[character] for character in token)
            except KeyError:  # an added token with characters outside the alphabet stands for itself
                return token.encode()
        if first and self._metaspace:
            token = token.replace(self._metaspace, "")
        for source, content in self._replace:
            token = token.replace(source, content)
        if self._byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()
