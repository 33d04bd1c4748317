"""Converts token ids to bytes, one token at a time, so that streamed and complete text are equal by construction.

Supports byte-level BPE, SentencePiece (Replace / ByteFallback / Fuse / Strip, or Metaspace) and WordPiece.
"""

import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from mycli.runtime.errors import ModelError

# The library's decoder is not used: it needs the complete text. Results are equal except for invalid UTF-8, which here
# becomes one U+FFFD per ill-formed sequence (Unicode's recommended practice); the library writes one per byte and
# damages the valid bytes around it.
# What the library's WordPiece decoder with `cleanup` writes without the space before it.
_UNSPACED = re.compile(r" (\.|\?|!|,|n't|'m|'s|'ve|'re)")
_MAX_GROWTH = 8.0  # of a token, by replacements
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table of characters for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _unsupported(decoder: object) -> ModelError:
    return ModelError(
        f"tokenizer.json: decoder {str(decoder)[:120]} is not supported",
        "readable: ByteLevel, Metaspace, WordPiece, and sequences of Replace, ByteFallback, Fuse, Strip",
    )


class Detokenizer:
    """The bytes of each token. Raises ModelError for an unsupported decoder.

    vocabulary: token by id, or None. hidden: ids without text (special tokens). decoder: the section of tokenizer.json.
    """

    def __init__(self, vocabulary: Sequence[str | None], hidden: Set[int], decoder: Any) -> None:
        self._vocabulary = vocabulary
        self._hidden = hidden
        self._bytes: Mapping[str, int] | None = None
        self._replace: list[tuple[str, str]] = []
        self._byte_tokens = False
        self._metaspace = ""  # removed from the first token
        self._continues = ""  # WordPiece's mark of a token that continues a word; others follow a space
        self._cleanup = False
        self.strip_spaces = 0  # spaces removed from the start of a text
        sequence = isinstance(decoder, dict) and decoder.get("type") == "Sequence"
        steps = decoder.get("decoders") if sequence else [decoder]
        if not steps or not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
            raise _unsupported(decoder)
        fused = False
        for step in steps:
            kind = step.get("type")
            if kind == "ByteLevel" and len(steps) == 1:
                self._bytes = byte_alphabet()
            elif kind == "Metaspace" and len(steps) == 1:
                mark = str(step.get("replacement", "▁"))
                self._replace.append((mark, " "))
                self._metaspace = "" if step.get("prepend_scheme") == "never" else mark
            elif kind == "WordPiece" and len(steps) == 1 and step.get("prefix", "##"):
                self._continues, self._cleanup = str(step.get("prefix", "##")), step.get("cleanup") is not False
            elif kind == "Replace" and not fused and not self._byte_tokens:
                self._replace.append(self._read_replace(step))
            elif kind == "ByteFallback" and not fused:
                self._byte_tokens = True
            elif kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused and step.get("content") == " " and not step.get("stop"):
                self.strip_spaces = self._read_start(step)
            else:
                raise _unsupported(step)
        # How much longer a token may become: replacements in a row multiply.
        if math.prod(max(1, len(content) / len(source)) for source, content in self._replace) > _MAX_GROWTH:
            raise _unsupported(decoder)

    @staticmethod
    def _read_replace(step: Mapping[str, Any]) -> tuple[str, str]:
        pattern, content = step.get("pattern"), step.get("content")
        source = pattern.get("String") if isinstance(pattern, dict) else None
        if not isinstance(source, str) or not source or not isinstance(content, str):
            raise _unsupported(step)
        return source, content

    @staticmethod
    def _read_start(step: Mapping[str, Any]) -> int:
        start = step.get("start", 0)
        if type(start) is not int:
            raise _unsupported(step)
        return start

    def piece(self, token_id: int, first: bool) -> bytes | None:
        """Return the bytes of a token, None for a hidden one. first: no token with text came before."""
        token = self._vocabulary[token_id] if 0 <= token_id < len(self._vocabulary) else None
        if token is None or token_id in self._hidden:
            return None
        if self._bytes is not None:
            try:
                return bytes(self._bytes[character] for character in token)
            except KeyError:  # an added token with characters outside the table is plain text
                return token.encode()
        if self._continues:
            return self._word_piece(token, first).encode()
        if first and self._metaspace:
            token = token.replace(self._metaspace, "")
        for source, content in self._replace:
            token = token.replace(source, content)
        if self._byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()

    def _word_piece(self, token: str, first: bool) -> str:
        if not first:
            continues = token.startswith(self._continues)
            token = token.removeprefix(self._continues) if continues else f" {token}"
        return _UNSPACED.sub(r"\1", token) if self._cleanup else token
