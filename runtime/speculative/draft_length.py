"""When speculation pays, and how many tokens to draft: decided from what passes cost and how many drafts are accepted.

The unit is the plain step: the time of a token without speculation, measured here and lately. Losses come out of a
budget, which starts small and grows by gains and by a share of every token: so the whole is never much slower than
without. Knows numbers of tokens and seconds; does not know models or clocks.
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
    """Decides how many tokens to draft, and is told what came of it. This one never drafts; others derive from it."""

    step_seconds: float | None = None  # of a plain step, None before one was measured

    def length(self, room: int, lag: int) -> int:
        """Tokens to draft next, at most `room`; 0: none. `lag`: tokens that the proposer has to read first."""
        return 0

    def observe_plain(self, seconds: float, wasted: float = 0.0) -> None:
        """A token was made without a draft in `seconds`, after the proposer found nothing in `wasted` seconds."""

    def observe_draft(self, drafted: int, accepted: int, lag: int, seconds: float) -> None:
        """The first `accepted` of `drafted` tokens stood; drafting and the pass together took `seconds`."""


class FixedDraftLength(DraftLengthPolicy):
    """Always the same length, whatever it costs: to test and to measure."""

    def __init__(self, count: int) -> None:
        self._count = count

    def length(self, room: int, lag: int) -> int:
        """As many as fit."""
        return min(self._count, room)


def expected_tokens(acceptance_rate: float, drafted: int) -> float:
    """Tokens of a pass over `drafted` (Leviathan et al., arXiv 2211.17192, eq. 1): 1 + a + ... + a^drafted."""
    return sum(acceptance_rate**power for power in range(drafted + 1))


class AdaptiveDraftLength(DraftLengthPolicy):
    """Drafts as many tokens as pay most, none where none do. Tells `notice` once when it stops.

    Keeps what it learned from one reply to the next.
    """

    def __init__(self, draft_cost: float, notice: Callable[[str], None] = lambda text: None) -> None:
        """`draft_cost`: what drafting a token is expected to cost, in plain steps."""
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
        """The length with the largest gain among those whose complete refusal the budget can pay."""
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
        """Pause, then begin without prejudice: of what was learned only the budget remains, without old earnings."""
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
        """Measure a plain step; each earns a little for trying."""
        self._plain.append(seconds)
        self.step_seconds = statistics.median(self._plain)
        self._pause = max(self._pause - 1, 0)
        self._budget += BUDGET_PER_TOKEN - wasted / self.step_seconds

    def observe_draft(self, drafted: int, accepted: int, lag: int, seconds: float) -> None:
        """Earn what the tokens would have cost, spend what they did; an interruption would have hit plain steps too."""
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
