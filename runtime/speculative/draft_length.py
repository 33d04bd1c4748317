"""Chooses how many tokens to draft, from the measured cost of passes and the acceptance of drafts.

The unit is the plain step: the time of a token without drafts, measured recently. Losses are paid from a budget that
starts small and grows by gains and a share of every token, so speculation is never much slower than plain decoding.
"""

import statistics
from collections import deque
from collections.abc import Callable

LENGTHS = (1, 2, 3, 4, 6, 8)  # tokens of a draft; few, as kernels are chosen anew for each
START_BUDGET, BUDGET_PER_TOKEN = 0.8, 0.01  # with one wrong expectation: 3 % from 80 tokens on
MIN_GAIN = 1.02  # tokens per plain step of time from which a draft is worth it
COST_RATE, ACCEPTANCE_MEMORY = 0.25, 0.97  # weight of the newest pass; weight of the older tokens, per token compared
PLAIN_STEPS, REFRESH = 3, 32  # plain steps before the first draft; passes until one more, as the machine may be busier
FIRST_COOLDOWN, LONGEST_COOLDOWN = 32, 512  # tokens until it is tried again, doubling
# Expected before anything was measured: tokens (accepted, compared); a pass costs a base and a part per token.
PRIOR_ACCEPTANCE, PASS_COST, TOKEN_COST = (3.0, 4.0), 1.04, 0.02
FREE_LAG, READ_COST = 32, 1 / 16  # unread tokens that cost what one does; the cost of each beyond, in drafted tokens


class DraftLengthPolicy:
    """Chooses draft lengths and observes the results. This one never drafts."""

    step_seconds: float | None = None  # of a plain step, None before one was measured

    def length(self, room: int, lag: int) -> int:
        """Return the number of tokens to draft, at most `room`. lag: tokens the proposer must compute first."""
        return 0

    def observe_plain(self, seconds: float, wasted: float = 0.0) -> None:
        """Record a step without a draft; `wasted`: seconds in which the proposer found nothing."""

    def observe_draft(self, drafted: int, accepted: int, lag: int, seconds: float) -> None:
        """Record a draft of which the first `accepted` tokens were accepted; seconds: of draft and pass."""


class FixedDraftLength(DraftLengthPolicy):
    """Always drafts the same length; for tests and measurements."""

    def __init__(self, count: int) -> None:
        self._count = count

    def length(self, room: int, lag: int) -> int:
        return min(self._count, room)


def expected_tokens(acceptance_rate: float, drafted: int) -> float:
    """Return the expected tokens of a pass (Leviathan et al., arXiv 2211.17192, eq. 1): 1 + a + ... + a^drafted."""
    return sum(acceptance_rate**power for power in range(drafted + 1))


class AdaptiveDraftLength(DraftLengthPolicy):
    """Drafts the length with the largest gain, or none; calls `notice` once when it stops. Keeps what it learned
    between replies.
    """

    def __init__(self, draft_cost: float, notice: Callable[[str], None] = lambda text: None) -> None:
        """draft_cost: expected cost of a draft token, in plain steps."""
        self._draft_cost, self._notice, self._told = draft_cost, notice, False
        self._plain: deque[float] = deque(maxlen=9)  # seconds
        self._budget, self._cooldown, self._passes = START_BUDGET, FIRST_COOLDOWN, 0
        self._pause = PLAIN_STEPS  # plain steps to make before the next draft
        self._forget()

    def _forget(self) -> None:
        self._costs = {size: PASS_COST + (self._draft_cost + TOKEN_COST) * size for size in LENGTHS}  # in plain steps
        self._tried: set[int] = set()
        self._accepted, self._compared = PRIOR_ACCEPTANCE

    def length(self, room: int, lag: int) -> int:
        """Return the length with the largest gain among those whose complete refusal the budget covers."""
        if self._pause:
            return 0
        rate = self._accepted / self._compared
        gains = {size: expected_tokens(rate, size) / cost for size, cost in self._costs.items()}
        if max(gains.values()) < MIN_GAIN:
            self._stop(rate, max(gains.values()))
            return 0
        limit = min(room, 2 * max(self._tried, default=0))  # expectations hold near what was measured
        payable = self._budget + 1 - self._reading(lag)
        sizes = [s for s in LENGTHS if s <= room and gains[s] >= MIN_GAIN and self._costs[s] <= payable]
        return max([s for s in sizes if s <= limit] or sizes[:1], key=gains.__getitem__, default=0)

    def _reading(self, lag: int) -> float:
        return lag * self._draft_cost * READ_COST if lag > FREE_LAG else 0.0

    def _stop(self, rate: float, best: float) -> None:
        """Pause, then start again without what was learned: only the budget remains, without earlier gains."""
        if self._tried and not self._told:
            self._told = True
            self._notice(
                f"speculation is off: it does not pay here ({rate:.0%} of the drafted tokens are accepted, "
                f"{best:.2f}x is the most to expect); it is tried again from time to time"
            )
        self._pause, self._cooldown = self._cooldown, min(2 * self._cooldown, LONGEST_COOLDOWN)
        self._budget = min(self._budget, START_BUDGET)
        self._forget()

    def observe_plain(self, seconds: float, wasted: float = 0.0) -> None:
        """Measure a plain step, which earns a little for trying."""
        self._plain.append(seconds)
        self.step_seconds = statistics.median(self._plain)
        self._pause = max(self._pause - 1, 0)
        self._budget += BUDGET_PER_TOKEN - wasted / self.step_seconds

    def observe_draft(self, drafted: int, accepted: int, lag: int, seconds: float) -> None:
        """Earn the time that the tokens would have cost, and spend what the draft cost."""
        fade = ACCEPTANCE_MEMORY**drafted
        self._accepted = self._accepted * fade + accepted
        self._compared = self._compared * fade + min(accepted + 1, drafted)
        size = next(size for size in LENGTHS if size >= drafted)
        expected = self._costs[size] + self._reading(lag)
        cost = min(seconds / self.step_seconds, 2 * expected) if self.step_seconds else expected
        if lag <= 2:  # as usual: what was read for it besides was the last token, and one accepted before it unread
            change = (cost - expected) * (COST_RATE if size in self._tried else 1.0)
            self._tried.add(size)
            # Other lengths were expected too cheap or too dear by as much, unless they were tried.
            self._costs.update((s, self._costs[s] + change) for s in LENGTHS if s == size or s not in self._tried)
            cost = self._costs[size]
        self._budget += (1 + BUDGET_PER_TOKEN) * (accepted + 1) - cost
        if self._budget > START_BUDGET + 2:  # it pays
            self._cooldown = FIRST_COOLDOWN
        self._passes += 1
        self._pause = int(self._passes % REFRESH == 0)
