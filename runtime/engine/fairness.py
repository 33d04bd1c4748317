"""Shares a machine among users: each gets tokens in proportion to its weight, not to its number of requests.

Weighted fair queueing: every user has a virtual time, the tokens computed for it divided by its weight, and the user
with the smallest virtual time is served first. A user that returns after a pause starts at the smallest virtual time of
the active users or where it was, so it gets no credit for the pause and none for leaving.

A pass is not interrupted, so a new prompt waits for the one that runs. Prompts of a user with many replies are
therefore cut smaller while prompts of users with fewer are expected (`FairShares.pass_size`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mycli.runtime.engine.sequence import Sequence as RequestSequence
from mycli.runtime.engine.sequence import Status

# How far the virtual time of an active user may be behind, in tokens of weight 1: a user with one long reply must not
# gain the right to hold up all others afterwards.
MAX_CREDIT = 4096
# How long after its last prompt another one of a user is expected.
EXPECTED_SECONDS = 60.0
# The smallest part of a chunk that prompts are cut to. Smaller passes gain little: passes of running replies, which
# are not cut, have as many rows.
SMALLEST_PART = 8


@dataclass(frozen=True)
class ExpectedPrompt:
    """The last interactive prompt of a user: when it started, its tokens, and the weight of the user."""

    started: float
    tokens: int
    weight: float


class FairShares:
    """The virtual times of users. With a single user the order is that of arrival."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}  # only of users that have sequences
        self._left: dict[str, float] = {}  # the virtual times of the other users when they left; at most one a key
        self._sequences: Counter[str] = Counter()
        self._floor = 0.0  # the virtual time of a user that arrives at an idle engine
        self._prompts: dict[str, ExpectedPrompt] = {}  # by user

    def enter(self, sequence: RequestSequence) -> None:
        """Count a new sequence of its user."""
        user = sequence.request.user
        if not self._sequences[user]:
            least = min(self._times.values(), default=self._floor)
            self._times[user] = max(least, self._left.pop(user, least))
        self._sequences[user] += 1

    def leave(self, sequence: RequestSequence) -> None:
        """Count a sequence that has ended."""
        user = sequence.request.user
        self._sequences[user] -= 1
        if not self._sequences[user]:
            # Never decreases: a user that leaves and returns must not regain time that it has used.
            self._left[user] = self._times.pop(user)
            self._floor = max(self._floor, self._left[user])
            del self._sequences[user]

    def charge(self, sequence: RequestSequence, tokens: int) -> None:
        """Add computed tokens to the virtual time of a sequence's user."""
        # Tokens, not requests or seconds: requests differ in length, and passes are shared by all users.
        time = self._times[sequence.request.user] + tokens / sequence.request.weight
        self._times[sequence.request.user] = time
        if len(self._times) > 1:
            for user, other in self._times.items():
                self._times[user] = max(other, time - MAX_CREDIT)

    def expect(self, sequence: RequestSequence, now: float) -> None:
        """Note a prompt that starts now: the next one of its user will be similar."""
        request = sequence.request
        if not request.batch:
            self._prompts[request.user] = ExpectedPrompt(now, sequence.uncomputed, request.weight)

    def pass_size(self, sequence: RequestSequence, most: int, running: Iterable[RequestSequence], now: float) -> int:
        """Return how many tokens a pass with a part of this prompt may have, at most `most`.

        Half a typical prompt of each user that has fewer replies by weight: one that arrives meanwhile waits for less
        time than it takes itself.
        """
        request = sequence.request
        if not request.batch and self._prompts.keys() <= {request.user}:
            return most
        expected = {user: prompt for user, prompt in self._prompts.items() if now - prompt.started < EXPECTED_SECONDS}
        counts, self._prompts = Counter(other.request.user for other in running if not other.request.batch), expected
        replies = (counts[request.user] + (sequence.status is not Status.RUNNING)) / request.weight
        sizes = [
            prompt.tokens
            for user, prompt in expected.items()
            if request.batch or counts[user] / prompt.weight < replies
        ]
        return min(most, max(min(sizes) // 2, most // SMALLEST_PART, 1)) if sizes else most

    def ordered(
        self, sequences: Sequence[RequestSequence], running: Sequence[RequestSequence]
    ) -> Sequence[RequestSequence]:
        """Return sequences in the order in which their next tokens are computed; `sequences`: in order of arrival."""
        # The usual case, one user without batch requests, skips the sort: it runs before every pass.
        if len(self._times) < 2 and not any(sequence.request.batch for sequence in sequences):
            return sequences
        counts = Counter(sequence.request.user for sequence in running)
        return sorted(sequences, key=lambda sequence: self._rank(sequence, counts))

    def precedes(self, sequence: RequestSequence, other: RequestSequence, running: Sequence[RequestSequence]) -> bool:
        """Return whether a waiting sequence is computed before another user's that is running, or before batch."""
        if sequence.request.batch != other.request.batch:
            return other.request.batch
        if sequence.request.user == other.request.user:
            return False
        counts = Counter(sequence.request.user for sequence in running)
        return self._rank(sequence, counts) < self._rank(other, counts)

    def first(self, waiting: Sequence[RequestSequence], running: Sequence[RequestSequence]) -> RequestSequence:
        """Return the waiting sequence to start next: one of the user with the fewest running sequences by weight."""
        if len(self._times) < 2:
            return self.ordered(waiting, running)[0]
        # Places count before time: a place is held for a whole reply, and virtual time is charged only as tokens come.
        counts = Counter(sequence.request.user for sequence in running)

        def rank(sequence: RequestSequence) -> tuple[bool, float, float, int]:
            batch, time, count, number = self._rank(sequence, counts)
            return batch, count, time, number

        return min(waiting, key=rank)

    def _rank(self, sequence: RequestSequence, counts: Counter[str]) -> tuple[bool, float, float, int]:
        request = sequence.request
        return request.batch, self._times[request.user], counts[request.user] / request.weight, sequence.id

    @staticmethod
    def victim(running: Sequence[RequestSequence]) -> RequestSequence:
        """Return the sequence to preempt: the newest of the user with the most by weight; batch sequences first."""
        # The newest has the fewest computed tokens to recompute, as a rule, and older ones are sure to finish.
        counts = Counter(sequence.request.user for sequence in running)
        return max(
            running,
            key=lambda sequence: (
                sequence.request.batch,
                counts[sequence.request.user] / sequence.request.weight,
                sequence.id,
            ),
        )

    @staticmethod
    def gives_way(running: Iterable[RequestSequence], waiting: RequestSequence) -> RequestSequence | None:
        """Return the running sequence that `waiting` may replace; None if its user already has its share."""
        running = list(running)
        if not running:
            return None
        victim = FairShares.victim(running)
        counts = Counter(sequence.request.user for sequence in running)
        if victim.request.batch and not waiting.request.batch:
            return victim
        if victim.request.batch != waiting.request.batch or victim.request.user == waiting.request.user:
            return None
        # After the exchange the victim's user still has at least as much as the other one. With a weaker condition the
        # two could replace each other's sequences in turn, each time recomputing a prompt.
        mine = (counts[waiting.request.user] + 1) / waiting.request.weight
        theirs = (counts[victim.request.user] - 1) / victim.request.weight
        return victim if mine <= theirs else None
