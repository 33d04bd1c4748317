"""Constrained output: at every step only tokens that can still lead to a text of a schema or expression.

Built on llguidance, an optional dependency (extra `structured`). Knows tokens and grammars; does not know models,
sampling settings or commands: `Sampler` takes a `GrammarState` as its constraint.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.tokenizer.tokenizer import Tokenizer

MAX_SOURCE = 1 << 16  # characters of a schema or expression: compiling takes time quadratic in the properties
MAX_DEPTH = 64
LEXER_FUEL = 200_000  # work to begin with: a{100000000} and (a{1000}){1000} take 0.2 s; the usual 1,000,000 take 4 s
# Between two tokens of JSON: enough to indent, not enough to fill a context with (some models would).
WHITESPACE = r"[ \t\r\n]{0,40}"
JSON_MODE = '{"type": "object"}'


def library() -> Any:
    """llguidance. Raises UsageError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise UsageError(
            "constrained output needs llguidance, which is not installed", "pip install 'mycli-llm[structured]'"
        ) from None
    return llguidance


class _Vocabulary:
    """What llguidance asks of a tokenizer: the bytes of every token, which are control tokens, and how to encode."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        pieces = [tokenizer.piece(index, first=False) for index in range(len(tokenizer.vocabulary))]
        control = {index for index, piece in enumerate(pieces) if piece is None} | tokenizer.control_ids | stop_ids
        self.eos_token_id = min(stop_ids)
        self.bos_token_id = tokenizer.bos
        self.special_token_ids = sorted(control)
        self.tokens = [
            (tokenizer.vocabulary[index] or f"<unused {index}>").encode() if index in control else piece or b""
            for index, piece in enumerate(pieces)
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(whole, add_special=False)


class Grammar:
    """A JSON schema or regular expression, compiled for one tokenizer; `start` begins a text of it.

    Made by `from_schema` and `from_regex`, which refuse with UsageError what is not valid, not supported, too large or
    can match nothing.
    """

    def __init__(self, source: str, kind: str, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        """`source` is a grammar of llguidance, `kind` its name in messages."""
        llguidance = library()
        if not stop_ids:
            raise ModelError("the model has no end token, so it cannot end a constrained reply", "use another model")
        vocabulary = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, stop_ids))
        table = llguidance.LLTokenizer(
            vocabulary, n_vocab=len(tokenizer.vocabulary), eos_token=sorted(stop_ids), slices=None
        )
        limits = llguidance.LLParserLimits(initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)
        self.kind = kind
        self._start = llguidance.LLMatcher(table, source, log_level=0, limits=limits)
        self._start.compute_bitmask()  # some limits are only met, and some emptiness only found, by the first step
        if self._start.is_error() or self._start.is_stopped():
            cause = " ".join(self._start.get_error().replace("<non-verbose/>", "").split())
            known = {
                "": "nothing can match",
                "NoExtensionBias": "nothing can match",
                "NoExtension": "nothing can match",
            }
            raise UsageError(f"{kind}: {known.get(cause, cause):.300}", "write a simpler one, or one that can match")

    @classmethod
    def from_schema(cls, text: str, source: str, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> "Grammar":
        """Of a JSON schema. `source` names it in messages. References are not fetched."""
        _check_size(text, source)
        try:
            schema = json.loads(text)
            if not isinstance(schema, dict):
                raise ValueError(f"a schema is an object, not a {type(schema).__name__}")
            if _deeper_than(schema, MAX_DEPTH):
                raise ValueError(f"nested more than {MAX_DEPTH} deep")
            options = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": True}
            grammar = library().LLMatcher.grammar_from_json_schema(schema, overrides=options)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{source}: not a usable JSON schema: {error}", "see https://json-schema.org") from None
        return cls(grammar, source, tokenizer, stop_ids)

    @classmethod
    def from_regex(cls, pattern: str, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> "Grammar":
        """Of a regular expression that the whole reply must match; no look-around and no back-references."""
        _check_size(pattern, "regular expression")
        return cls(library().LLMatcher.grammar_from_regex(pattern), "regular expression", tokenizer, stop_ids)

    def start(self, sequences: int = 1) -> "GrammarState":
        """A constraint for replies from their beginning."""
        return GrammarState(self.kind, [self._start.deep_copy() for _ in range(sequences)])


def _check_size(text: str, source: str) -> None:
    if not text or len(text) > MAX_SOURCE:
        raise UsageError(f"{source}: {len(text)} characters", f"between 1 and {MAX_SOURCE}")


def _deeper_than(value: Any, depth: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth == 0 or any(_deeper_than(child, depth - 1) for child in children)


class GrammarState:
    """Where the replies of one generation stand in a grammar: masks logits before a draw and follows what is drawn."""

    def __init__(self, kind: str, matchers: Sequence[Any]) -> None:
        self._kind = kind
        self._matchers = list(matchers)

    @property
    def complete(self) -> bool:
        """Whether every reply so far is a whole text of the grammar."""
        return all(matcher.is_accepting() or matcher.stop_reason() == "EndOfSentence" for matcher in self._matchers)

    def apply(self, logits: Tensor) -> Tensor:
        """Logits fp32 [sequences, vocab] with -inf for what leaves the grammar. Ended rows stay as they are.

        Raises ModelError where no token can go on: the grammar and the vocabulary contradict each other here.
        """
        rows = [self._allowed(matcher, logits.shape[-1]) for matcher in self._matchers]
        return logits.masked_fill(~torch.stack(rows).to(logits.device), -math.inf)

    def _allowed(self, matcher: Any, count: int) -> Tensor:
        if matcher.stop_reason() == "EndOfSentence":
            return torch.ones(count, dtype=torch.bool)
        words = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        bits = words.unsqueeze(1).bitwise_right_shift(torch.arange(8, dtype=torch.uint8)) & 1
        allowed = bits.flatten()[:count].bool()
        if matcher.is_error() or not bool(allowed.any()):
            cause = matcher.get_error().split("\n")[0] or "no token of the model can continue the text"
            raise ModelError(f"{self._kind}: dead end: {cause:.300}", "write a simpler schema or expression")
        return allowed

    def follow(self, tokens: Sequence[int]) -> None:
        """One drawn token for every sequence."""
        for matcher, token in zip(self._matchers, tokens, strict=True):
            if matcher.stop_reason() != "EndOfSentence" and not matcher.consume_token(token):
                raise ModelError(f"{self._kind}: {matcher.get_error().splitlines()[0]:.300}", "simplify it")
