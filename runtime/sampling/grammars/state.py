"""The parser state of a reply under a grammar: masks tokens, and steers the reply to a matching end within its limits.

- Where the grammar does not allow the end token yet, its probability is given to the next token of the shortest
  ending: a model that has finished its sentence closes the string.
- Towards the token limit or the deadline the probability of the ending rises; finally only the ending is allowed.
- Reasoning is closed at its budget, in a loop, and when the remaining tokens or time are reserved for the answer.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.sampling.grammars.ending import Ending, Symbols, SymbolTable
from mycli.runtime.sampling.grammars.loops import LoopDetector

# Reasoning leaves one part in `ANSWER_SHARE` of the tokens and of the time to the answer, and at least `ANSWER_TOKENS`
# tokens, the closing tag included.
ANSWER_TOKENS = 16
ANSWER_SHARE = 4
# Minimum number of tokens before the limit at which the probability of the ending begins to rise: a string that ends
# between words is better than one cut inside a word, and later values need tokens of their own.
CLOSING_TOKENS = 16
_NEGLIGIBLE = 12.0  # nats below the likeliest token: a chance of 6e-6
_BLANKS = frozenset(b" \t\r\n")  # may precede the opening tag
_HINT = "use a simpler schema or expression"


@dataclass(frozen=True)
class ReplyLimits:
    """The limits of one reply: `tokens`, the end token included; `ends_at`: seconds of `clock`; None: no limit."""

    tokens: int | None = None
    ends_at: float | None = None
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Reasoning:
    """The tags around reasoning as symbols, and its limits.

    opened: the reply begins inside it; budget: tokens, None for as many as the limits of the reply allow.
    """

    open: Symbols
    close: Symbols
    opened: bool
    budget: int | None


class _Thought:
    # Tracks whether a reply is inside its reasoning, and when that must be closed.

    def __init__(self, reasoning: Reasoning, limits: ReplyLimits, closes: bool) -> None:
        self._tags, self._limits = reasoning, limits
        self.inside, self._over = reasoning.opened, False
        self._recent: Symbols = ()  # outside: the reply so far, without leading whitespace; inside: its last symbols
        self._count = 0
        self._loops = LoopDetector()
        self._looping = False
        self._began = limits.clock()
        self._most = reasoning.budget
        if limits.tokens is not None and (closes or reasoning.budget is not None or limits.ends_at is not None):
            room = max(limits.tokens - max(limits.tokens // ANSWER_SHARE, ANSWER_TOKENS), 0)
            self._most = room if self._most is None else min(self._most, room)

    def add(self, token: int, symbols: Symbols) -> None:
        if self._over:
            return
        if self.inside:
            self._count += 1
            self._looping = self._looping or self._loops.add(token)
        inside, recent = self._after(symbols)
        if inside != self.inside:
            self.inside, self._over, recent = inside, self.inside, ()
        elif not inside and recent != self._tags.open[: len(recent)]:
            self._over = True  # the answer came first; an opening tag in it is text
        self._recent = recent

    def inside_after(self, symbols: Symbols) -> bool:
        """Return whether the reply is inside its reasoning after `symbols` more."""
        return not self._over and self._after(symbols)[0]

    def _after(self, symbols: Symbols) -> tuple[bool, Symbols]:
        if not self.inside:
            reply = tuple(itertools.dropwhile(lambda symbol: symbol in _BLANKS, (*self._recent, *symbols)))
            return reply[: len(self._tags.open)] == self._tags.open, reply
        tag = self._tags.close
        recent = (*self._recent[1 - len(tag) or len(self._recent) :], *symbols)
        return not _contains(recent, tag), recent

    def must_close(self, token_seconds: float, ending: int) -> bool:
        if not self.inside:
            return False
        if self._looping or (self._most is not None and self._count >= self._most):
            return True
        ends_at = self._limits.ends_at
        if ends_at is None:
            return False
        now = self._limits.clock()
        share = (ends_at - self._began) / ANSWER_SHARE
        return ends_at - now <= max(share, (ending + ANSWER_TOKENS) * token_seconds)


class GrammarState:
    """The state of one reply: masks logits and advances by sampled tokens.

    shortened: a limit ended the reply, which matches the grammar, but the model would have written more.
    """

    def __init__(
        self,
        kind: str,
        parser: Any,
        ending: Ending,
        table: SymbolTable,
        limits: ReplyLimits = ReplyLimits(),  # noqa: B008  # frozen
        reasoning: Reasoning | None = None,
        free: bool = False,
    ) -> None:
        """ending: the ending of an empty reply; free: the grammar allows any text, which may be cut at the limit."""
        self._kind, self._parser, self._ending, self._table = kind, parser, ending.copy(parser), table
        self._free, self._limits = free, limits
        self._thought = None if reasoning is None else _Thought(reasoning, limits, not free)
        self._ended = False
        self.shortened = False
        self._pushed: int | None = None  # the next token, if only a limit of the reply makes it likely
        self._count = 0
        self._last: float | None = None
        self._token_seconds = 0.0  # a moving average

    @property
    def complete(self) -> bool:
        """Whether the reply so far matches the whole grammar."""
        return self._ended or bool(self._parser.is_accepting())

    @property
    def may_be_cut(self) -> bool:
        """Whether the grammar allows any text, and the reply has some."""
        return self._free and self.complete

    def resume(self, tokens: Sequence[int], shortened: bool) -> None:
        """Advance by the tokens that the reply had when it was interrupted."""
        for token in tokens:
            self.accept(token)
        self.shortened = shortened

    def apply(self, logits: Tensor) -> Tensor:
        """Return logits fp32 [1, vocab] in which forbidden tokens are -inf; those of an ended reply do not change.

        Raises ModelError if the vocabulary has no token that the grammar allows.
        """
        if self._ended:
            return logits
        masked = logits.masked_fill(~self._allowed(logits.shape[-1]).to(logits.device), -math.inf)
        self._lead(logits[0], masked[0])
        return masked

    def _allowed(self, count: int) -> Tensor:
        words = torch.frombuffer(bytearray(self._parser.compute_bitmask()), dtype=torch.uint8)
        bits = words.unsqueeze(1).bitwise_right_shift(torch.arange(8, dtype=torch.uint8)) & 1
        allowed = bits.flatten()[:count].bool()
        if self._parser.is_error():
            raise self._limit()
        if not bool(allowed.any()):
            cause = "the vocabulary has no token that continues the reply"
            raise ModelError(f"{self._kind}: dead end: {cause}", _HINT)
        return allowed

    def _lead(self, logits: Tensor, masked: Tensor) -> None:
        """Move the allowed logits `masked` [vocab] towards the ending; `logits`: of all tokens."""
        self._pushed = None
        if self._ending.tokens is None or self.may_be_cut:
            return
        must_end, share = self._must_end(), self._closing_share()
        if (must_end or share) and self._needs_no_lead(int(masked.argmax())):
            must_end, share = False, 0.0
        if must_end or self._must_close_reasoning():
            forced = self._ending.next_tokens[-1]
            if must_end and int(masked.argmax()) != forced:
                self._pushed = forced
            # The logit is not taken from `masked`: the mask has only the usual tokenization of forced text, but the
            # parser accepts others as well.
            masked.fill_(-math.inf)
            masked[forced] = logits[forced]
            return
        if self.complete:
            return
        ends = [float(logits[token]) for token in self._table.ends if token < len(logits)]
        # Most tokens return here: the model wants to continue, and no limit is near.
        if max(ends, default=-math.inf) < float(masked.max()) - _NEGLIGIBLE and not share:
            return
        following = torch.tensor(self._ending.next_tokens, device=masked.device)
        likeliest = following[masked[following].argmax()]
        masked[likeliest] = torch.logaddexp(masked[likeliest], masked.new_tensor(ends).logsumexp(0))
        if share:
            floor = masked.logsumexp(0) + math.log(share / (1 - share))
            if floor > masked[likeliest]:
                self._pushed = int(likeliest)
            masked[likeliest] = torch.maximum(masked[likeliest], floor)

    def accept(self, token: int) -> int:
        """Advance by a sampled token, or by the next one of the ending if the sampled token leaves no room to end.

        Returns the token that it advanced by.
        """
        if self._ended:
            return token
        saved, room = self._ending.save(), self._room()
        self.shortened = self.shortened or token == self._pushed
        self._consume(token)
        if token in self._table.ends:
            self._ended = True
            return token
        # A token may open something whose ending is longer than all tokens that are left. The ending before it still
        # fits.
        before, after = saved[1], self._ending.tokens
        if before is not None and after is not None and len(after) > room >= len(before) - 1:
            self._parser.rollback(1)
            self._ending.restore(saved)
            token = before[0]
            self._consume(token)
            self.shortened = True
        self._count += 1
        if self._limits.ends_at is not None:
            self._measure()
        if self._thought is not None:
            self._thought.add(token, self._table.symbols(token))
        return token

    def _consume(self, token: int) -> None:
        if not self._parser.consume_token(token):
            raise self._limit()
        self._ending.advance(token, self._inside_after(token))

    def _inside_after(self, token: int) -> bool:
        return self._thought is not None and self._thought.inside_after(self._table.symbols(token))

    def _limit(self) -> UsageError:
        # An allowed token cannot fail for another reason.
        return UsageError(f"{self._kind}: {self._parser.get_error().splitlines()[0]:.300}", _HINT)

    def _measure(self) -> None:
        now = self._limits.clock()
        if self._last is not None:
            seconds = now - self._last
            self._token_seconds = 0.7 * self._token_seconds + 0.3 * seconds if self._token_seconds else seconds
        self._last = now

    def _left(self) -> float:
        """Return the number of tokens that the limits leave."""
        left = math.inf if self._limits.tokens is None else self._limits.tokens - self._count
        if self._limits.ends_at is not None and self._token_seconds:
            left = min(left, (self._limits.ends_at - self._limits.clock()) // self._token_seconds)
        return left

    def _room(self) -> float:
        """Return how many tokens, the end token included, an ending after the next token may have."""
        left = self._left()
        # Without room for the end token, the last token may be that of the text.
        return left - 1 if left >= len(self._ending.tokens or ()) else left

    def _must_end(self) -> bool:
        return self._left() <= len(self._ending.tokens or ())

    def _needs_no_lead(self, token: int) -> bool:
        # One of several words, a digit or another key is not what has to be ended: if its own ending fits the limits,
        # the model chooses. It also chooses how a reply begins for which the limit has no room.
        tokens = self._limits.tokens
        if tokens is not None and tokens - self._count < len(self._ending.tokens or ()) - 1:
            return True
        branch = self._parser.deep_copy()
        ending = self._ending.copy(branch)
        if not branch.consume_token(token):
            return False
        ending.advance(token, self._inside_after(token))
        return ending.tokens is not None and len(ending.tokens) <= self._room() and not self._ending.follows(ending)

    def _must_close_reasoning(self) -> bool:
        length = len(self._ending.tokens or ())
        return self._thought is not None and self._thought.must_close(self._token_seconds, length)

    def _closing_share(self) -> float:
        """Return the minimum probability of the ending's next token: 0 far from the limits, 1 at them."""
        # Squared, so that the first tokens of the window are hardly changed.
        length = len(self._ending.tokens or ())
        if self._thought is not None and self._thought.inside:
            return 0.0
        window = max(CLOSING_TOKENS, length)
        return max(1 - (self._left() - length) / window, 0.0) ** 2


def _contains(symbols: Symbols, part: Symbols) -> bool:
    return any(symbols[start : start + len(part)] == part for start in range(len(symbols) - len(part) + 1))
