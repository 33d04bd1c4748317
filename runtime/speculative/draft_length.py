"""Chooses the draft length from the measured cost of passes and the acceptance rate; 0 where drafting does not pay.

Policy: costs are in plain steps (the recent time of a token without a draft). Losses are paid from a budget that starts
small and grows by gains and by a share of every token, so generation is never much slower than without speculation.
"""

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Tokens per draft; few, because kernels are chosen again for each length. A pass has one row more, the last token: at
# most `memory.graphs.DRAFT_ROWS`, to which GPU passes are captured before the first request.
LENGTHS = (1, 2, 3, 5, 7)
LONG_LENGTHS = (*LENGTHS, 11, 15, 23, 31)  # where a drafted token costs nothing
START_BUDGET, BUDGET_PER_TOKEN = 0.8, 0.01  # costs at most 3 % from 80 tokens on, after one wrong estimate
MIN_GAIN = 1.02  # draft only above this expected speedup
COST_RATE, ACCEPTANCE_MEMORY = 0.25, 0.97  # weight of the newest pass; weight of the older tokens, per token compared
PLAIN_STEPS, REFRESH = 3, 32  # plain steps before the first draft; passes between later ones, since load changes
FIRST_COOLDOWN, LONGEST_COOLDOWN = 32, 512  # tokens until the next try, doubling
# Estimates before any measurement: tokens (accepted, compared); the cost of a pass and of each token in it.
PRIOR_ACCEPTANCE, PASS_COST, TOKEN_COST = (3.0, 4.0), 1.04, 0.02
# Up to 32 unread tokens cost the proposer as much as one; above, each costs 1/16 of a draft token.
FREE_LAG, READ_COST = 32, 1 / 16


class DraftLengthPolicy:
    """Chooses the draft length and learns from results. This base class never drafts."""

    step_seconds: float | None = None  # of a plain step; None before the first measurement

    def length(self, room: int, lag: int, evidence: int = 0) -> int:
        """Return the number of tokens to draft, at most `room`. `lag`: tokens that the proposer must read first.

        evidence: a class of proposals whose acceptance is learned separately.
        """
        return 0

    def stopped(self, evidence: int = 0) -> bool:
        """Return whether drafting pauses for some tokens, so that a pass may take several plain steps in one call."""
        return False

    def observe_plain(self, seconds: float, wasted: float = 0.0, tokens: int = 1) -> None:
        """Record tokens without a draft that took `seconds` each, after `wasted` seconds of the proposer."""

    def observe_draft(self, drafted: int, accepted: int, lag: int, seconds: float, evidence: int = 0) -> None:
        """Record a pass: the first `accepted` of `drafted` tokens were right; drafting and pass took `seconds`."""


class FixedDraftLength(DraftLengthPolicy):
    """A constant draft length, for tests and benchmarks."""

    def __init__(self, count: int) -> None:
        self._count = count

    def length(self, room: int, lag: int, evidence: int = 0) -> int:
        return min(self._count, room)


def draft_lengths(draft_cost: float, gpu: bool) -> Sequence[int]:
    """Return the lengths of drafts whose token costs `draft_cost` plain steps."""
    # On a GPU each length has graphs of its own, whose memory is counted for short ones.
    return LENGTHS if draft_cost or gpu else LONG_LENGTHS


def expected_tokens(acceptance_rate: float, drafted: int) -> float:
    """Return the expected tokens of a pass (Leviathan et al., arXiv 2211.17192, eq. 1): 1 + a + ... + a^drafted."""
    return sum(acceptance_rate**power for power in range(drafted + 1))


@dataclass
class _Acceptance:
    """The statistics of one class of proposals: tokens accepted and compared, and when to try it again."""

    accepted: float = PRIOR_ACCEPTANCE[0]
    compared: float = PRIOR_ACCEPTANCE[1]
    pause: int = 0  # plain steps to make before the next draft
    cooldown: int = FIRST_COOLDOWN

    def add(self, drafted: int, accepted: int) -> None:
        fade = ACCEPTANCE_MEMORY**drafted
        self.accepted = self.accepted * fade + accepted
        self.compared = self.compared * fade + min(accepted + 1, drafted)


class AdaptiveDraftLength(DraftLengthPolicy):
    """Chooses the length with the highest expected speedup; learns across replies. Calls `notice` at the first stop."""

    def __init__(
        self,
        draft_cost: float,
        notice: Callable[[str], None] = lambda message: None,
        lengths: Sequence[int] = LENGTHS,
    ) -> None:
        """`draft_cost`: the estimated cost of drafting a token, in plain steps."""
        self._draft_cost, self._notice, self._notified = draft_cost, notice, False
        self._lengths = lengths
        self._plain: deque[float] = deque(maxlen=9)  # seconds
        self._budget, self._passes = START_BUDGET, 0
        self._pause = PLAIN_STEPS  # plain steps to make before the next draft
        self._classes: dict[int, _Acceptance] = {}
        self._reset_costs()

    def _reset_costs(self) -> None:
        self._costs = {size: PASS_COST + (self._draft_cost + TOKEN_COST) * size for size in self._lengths}
        self._tried: set[int] = set()

    def length(self, room: int, lag: int, evidence: int = 0) -> int:
        # The length with the highest speedup among those that the budget can pay even if all tokens are rejected.
        known = self._classes.setdefault(evidence, _Acceptance())
        if self._pause or known.pause:
            return 0
        rate = known.accepted / known.compared
        gains = {size: expected_tokens(rate, size) / cost for size, cost in self._costs.items()}
        if max(gains.values()) < MIN_GAIN:
            self._stop(known, rate, max(gains.values()))
            return 0
        limit = min(room, 2 * max(self._tried, default=0))  # estimates are reliable only near measured lengths
        payable = self._budget + 1 - self._lag_cost(lag)
        sizes = [s for s in self._lengths if s <= room and gains[s] >= MIN_GAIN and self._costs[s] <= payable]
        return max([s for s in sizes if s <= limit] or sizes[:1], key=gains.__getitem__, default=0)

    def stopped(self, evidence: int = 0) -> bool:
        known = self._classes.get(evidence)
        return known is not None and known.pause > 0

    def _lag_cost(self, lag: int) -> float:
        return lag * self._draft_cost * READ_COST if lag > FREE_LAG else 0.0

    def _stop(self, known: _Acceptance, rate: float, best: float) -> None:
        # Pause, then start again from the estimates, since conditions may have changed. The budget stays, but capped:
        # earlier gains must not pay for new losses.
        known.pause, known.cooldown = known.cooldown, min(2 * known.cooldown, LONGEST_COOLDOWN)
        known.accepted, known.compared = PRIOR_ACCEPTANCE
        self._budget = min(self._budget, START_BUDGET)
        if any(not other.pause for other in self._classes.values()):
            return
        if self._tried and not self._notified:
            self._notified = True
            self._notice(
                f"speculation is paused: it is not faster here ({rate:.0%} of draft tokens are accepted, "
                f"expected speedup at most {best:.2f}x); it is tried again later"
            )
        self._reset_costs()

    def observe_plain(self, seconds: float, wasted: float = 0.0, tokens: int = 1) -> None:
        # Every plain step adds to the budget for the next try.
        self._plain.extend([seconds] * tokens)
        self.step_seconds = statistics.median(self._plain)
        self._pause = max(self._pause - tokens, 0)
        for known in self._classes.values():
            known.pause = max(known.pause - tokens, 0)
        self._budget += BUDGET_PER_TOKEN * tokens - wasted / self.step_seconds

    def observe_draft(self, drafted: int, accepted: int, lag: int, seconds: float, evidence: int = 0) -> None:
        # The budget gains the plain cost of the tokens and pays the cost of the pass, at most four times the estimate:
        # an interruption would have hit plain steps too, but a pass of a small model costs as much as three plain ones.
        known = self._classes.setdefault(evidence, _Acceptance())
        known.add(drafted, accepted)
        size = next(size for size in self._lengths if size >= drafted)
        expected = self._costs[size] + self._lag_cost(lag)
        cost = min(seconds / self.step_seconds, 4 * expected) if self.step_seconds else expected
        if lag <= 2:  # the usual case: the last token, and at most one accepted token that the proposer has not read
            change = (cost - expected) * (COST_RATE if size in self._tried else 1.0)
            self._tried.add(size)
            # Shift the estimates of untried lengths by the same error.
            self._costs.update((s, self._costs[s] + change) for s in self._lengths if s == size or s not in self._tried)
            cost = self._costs[size]
        self._budget += (1 + BUDGET_PER_TOKEN) * (accepted + 1) - cost
        if self._budget > START_BUDGET + 2:  # speculation pays
            known.cooldown = FIRST_COOLDOWN
        self._passes += 1
        self._pause = int(self._passes % REFRESH == 0)
