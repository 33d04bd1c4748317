"""The worker process that compiles grammars of clients first, where time and memory are limited.

Its vocabulary has the bytes as tokens, and as many further ones as the model has: what compiling costs depends on the
grammar.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LEXER_FUEL = 200_000


class _Bytes:
    # The tokenizer interface of llguidance; the end token is 0, byte b is token b + 1.

    def __init__(self, count: int) -> None:
        self.eos_token_id = 0
        self.bos_token_id = None
        self.special_token_ids = [0, *range(257, count)]
        self.tokens = [b"<end>", *(bytes([value]) for value in range(256))]
        self.tokens += [b"<%d>" % index for index in range(257, count)]

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [value + 1 for value in data]


def handler(setup: Any) -> Callable[[Any], float]:
    """Return the handler of a grammar in llguidance's format: the CPU seconds that compiling it takes."""
    import llguidance

    with suppress(OSError):
        os.nice(10)  # replies come first
    count = max(int(setup), 257)
    table = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(count)), n_vocab=count, eos_token=[0], slices=[])
    limits = llguidance.LLParserLimits(initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)

    def check(source: str) -> float:
        start = time.process_time()
        llguidance.LLMatcher(table, source, log_level=0, limits=limits).compute_bitmask()
        return time.process_time() - start

    return check
