"""When speculation pays, and how many tokens to draft: decided from what passes cost and how many drafts are kept.

The unit is the plain step: the time of one token without speculation, as measured here and lately. Speculation may only
spend what it has earned, and a small part of the time of plain steps for trying: so the whole is never much slower than
without. Knows numbers of tokens and seconds; does not know models or clocks.
"""

import statistics
from collections import deque
from collections.abc import Callable
from typing import Protocol

LENGTHS = (1, 2, 3, 4, 6, 8)  # tokens of a draft; few, as kernels are chosen anew for each
FREE_LAG = 32  # tokens that are read in the same time as one: the weights are read once for all of them
# Losses are limited to START + SHARE x tokens plain steps, and one wrong expectation: 3 % from some 60 tokens on.
START = 1.0
SHARE = 0.01
PURSE = 64.0  # what may be kept of earnings: old successes do not pay for long failures
MARGIN = 1.02  # expected gain from which it is worth it
LATEST = 8  # passes of a length that count
REFRESH = 32  # passes after which the plain step is measured anew: the machine may have become busier
FIRST_REST, LONGEST_REST = 32, 512  # tokens until it is tried again, doubling
MEMORY = 0.97  # weight of older judgements, per token judged
# Before anything was measured: a draft model agrees 3 times of 4, a pass over 1 + k tokens costs 1.04 + 0.02 k steps,
# and reading a token in advance costs 1/16 of drafting one.
KEPT, JUDGED = 3.0, 4.0
PASS, PER_TOKEN = 0.04, 0.02
READING = 1 / 16


class Pace(Protocol):
    """Decides how many tokens to draft, and is told what came of it."""

    def length(self, room: int, lag: int) -> int:
        """Tokens to draft next, at most `room`; 0: none. `lag`: tokens that the drafter has to read first."""
        ...

    def plain(self, seconds: float) -> None:
        """A token was made without a draft."""
        ...

    def wasted(self, seconds: float) -> None:
        """The drafter took this long and had nothing to propose."""
        ...

    def judged(self, drafted: int, kept: int, lag: int, seconds: float) -> None:
        """`drafted` tokens were judged and the first `kept` stood; drafting and the pass together took `seconds`."""
        ...

    @property
    def step_seconds(self) -> float | None:
        """Of a plain step, None before one was measured."""
        ...


class Fixed:
    """Always the same length, whatever it costs: to test and to measure."""

    step_seconds = None

    def __init__(self, count: int) -> None:
        self._count = count

    def length(self, room: int, lag: int) -> int:
        """As many as fit."""
        return min(self._count, room)

    def plain(self, seconds: float) -> None:
        """Nothing is learned."""

    def wasted(self, seconds: float) -> None:
        """Nothing is learned."""

    def judged(self, drafted: int, kept: int, lag: int, seconds: float) -> None:
        """Nothing is learned."""


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Tokens of a pass that judges `drafted` (Leviathan et al., arXiv 2211.17192, eq. 1): 1 + a + ... + a^drafted."""
    return sum(acceptance**power for power in range(drafted + 1))


class Adaptive:
    """Drafts as many tokens as pay most, none where none do. Tells `notice` once when it stops.

    Keeps what it learned from one reply to the next.
    """

    def __init__(self, weight: float, notice: Callable[[str], None] = lambda text: None) -> None:
        """`weight`: the expected cost of drafting a token, in plain steps."""
        self._weight = weight
        self._notice = notice
        self._plain: deque[float] = deque(maxlen=15)  # seconds
        self._took: dict[int, deque[float]] = {}  # by tokens drafted: plain steps for drafting and judging
        self._costs: list[float] = []  # by tokens drafted: the same, typical or expected
        self._kept = self._judged = 0.0
        self._budget = START
        self._earned = 0.0  # since it was tried (again)
        self._passes = 0  # since the plain step was measured
        self._rest = 0
        self._next_rest = FIRST_REST
        self._told = False
        self._estimate()

    @property
    def step_seconds(self) -> float | None:
        """Mean of the latest plain steps: interruptions are a part of it, as of the time of a reply."""
        return statistics.fmean(self._plain) if self._plain else None

    def _steps(self, seconds: float) -> float:
        """In typical plain steps."""
        return seconds / statistics.median(self._plain) if self._plain else 1.0

    @property
    def acceptance(self) -> float:
        """The share of judged tokens that stand, expected from the latest."""
        return (self._kept + KEPT) / (self._judged + JUDGED)

    def _estimate(self) -> None:
        """Costs of all lengths from those measured, the nearest with a slope; this runs once a pass, so it is short."""
        slope = self._weight + PER_TOKEN
        # The first pass of a length chooses kernels and takes memory: it counts only until there is a second. Then one
        # of the faster counts: what interruptions take, they take from plain steps too, and losses are limited.
        typical = {}
        for size, took in self._took.items():
            found = sorted(list(took)[1:] or took)
            typical[size] = found[(len(found) - 1) // 3]
        if not typical:
            self._costs = [1 + PASS + slope * size for size in range(LENGTHS[-1] + 1)]
            return
        low, high = min(typical), max(typical)
        if low < high:
            slope = max((typical[high] - typical[low]) / (high - low), 0.0)
        self._costs = []
        for size in range(LENGTHS[-1] + 1):
            nearest = min(typical, key=lambda other: abs(other - size))
            self._costs.append(max(typical[nearest] + slope * (size - nearest), 1.0))

    def gains(self) -> list[float]:
        """By tokens drafted: expected tokens per plain step of time."""
        acceptance, tokens, power, found = self.acceptance, 1.0, 1.0, [1.0]
        for cost in self._costs[1:]:
            power *= acceptance
            tokens += power
            found.append(tokens / cost)
        return found

    def length(self, room: int, lag: int) -> int:
        """The length with the largest gain among those whose complete refusal can be afforded."""
        if len(self._plain) < 3 or self._passes >= REFRESH or self._rest > 0 or room < 1:
            return 0
        gains = self.gains()
        if max(gains[1:]) < MARGIN:
            self._stop(max(gains[1:]))
            return 0
        limit = self._budget + 1 - self._reading(lag)
        known = 2 * max(self._took, default=0) or 1  # expectations are not trusted much beyond what was measured
        best, chosen = MARGIN, 0
        for size in LENGTHS:
            possible = size <= room and self._costs[size] <= limit
            if possible and gains[size] > best and (size <= known or not chosen):
                best, chosen = gains[size], size
        return chosen

    def _reading(self, lag: int) -> float:
        """What it costs that the drafter reads so many tokens first, in plain steps."""
        return lag * self._weight * READING if lag > FREE_LAG else 0.0

    def _stop(self, best: float) -> None:
        if not self._told and self._judged:
            self._told = True
            self._notice(
                f"speculation is off: it does not pay here ({self.acceptance:.0%} of the drafted tokens stand, "
                f"{best:.2f}x is the best to expect); it is tried again from time to time"
            )
        # The next try starts without prejudice: of what was learned only the best costs remain, and the budget.
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, LONGEST_REST)
        self._kept = self._judged = self._earned = 0.0
        for found in self._took.values():
            found.extend([min(found)] * LATEST)
        self._estimate()

    def plain(self, seconds: float) -> None:
        """A token without a draft earns a little for trying."""
        self._plain.append(seconds)
        self._passes = 0
        self._rest = max(self._rest - 1, 0)
        self._pay(SHARE)

    def _pay(self, amount: float) -> None:
        self._budget = min(self._budget + amount, PURSE)

    def wasted(self, seconds: float) -> None:
        """Time lost."""
        self._pay(-self._steps(seconds))

    def judged(self, drafted: int, kept: int, lag: int, seconds: float) -> None:
        """Earns what the tokens would have cost, spends what they did."""
        self._passes += 1
        self._kept = self._kept * MEMORY**drafted + kept
        self._judged = self._judged * MEMORY**drafted + min(kept + 1, drafted)
        took = self._steps(seconds)
        if lag <= 2:  # the usual: the last token, and before it one that was accepted without having been read
            believed = 1.5 if drafted not in self._took else 2.0
            took = min(took, believed * self._costs[drafted])
            self._took.setdefault(drafted, deque(maxlen=LATEST)).append(took)
            self._estimate()
            took = self._costs[drafted]  # an interruption would have hit a plain step too
        else:
            took = min(took, 2 * (self._costs[drafted] + self._reading(lag)))
        earned = kept + 1 - took
        self._earned += earned
        self._pay(earned + SHARE * (kept + 1))
        if self._earned > 2:
            self._next_rest = FIRST_REST
