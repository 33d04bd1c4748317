"""Shares a machine among users: each gets tokens in proportion to its weight, not to its number of requests.

Weighted fair queueing: every user has a virtual time, the tokens computed for it divided by its weight, and the user
with the smallest virtual time is served first. A user that returns after a pause starts at the smallest virtual time of
the active users, so it gets no credit for the pause.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from mycli.runtime.engine.sequence import Sequence as RequestSequence


class FairShares:
    """The virtual times of users. With a single user the order is that of arrival."""

    def __init__(self) -> None:
        # Only of users that have sequences; `_floor` keeps how far the others were.
        self._times: dict[str, float] = {}
        self._sequences: Counter[str] = Counter()
        self._floor = 0.0  # the virtual time of a user that arrives at an idle engine

    def enter(self, sequence: RequestSequence) -> None:
        """Count a new sequence of its user."""
        user = sequence.request.user
        if not self._sequences[user]:
            self._times[user] = min(self._times.values(), default=self._floor)
        self._sequences[user] += 1

    def leave(self, sequence: RequestSequence) -> None:
        """Count a sequence that has ended."""
        user = sequence.request.user
        self._sequences[user] -= 1
        if not self._sequences[user]:
            # Never decreases: a user that leaves and returns must not regain time that it has used.
            self._floor = max(self._floor, self._times.pop(user))
            del self._sequences[user]

    def charge(self, sequence: RequestSequence, tokens: int) -> None:
        """Add computed tokens to the virtual time of a sequence's user."""
        # Tokens, not requests or seconds: requests differ in length, and passes are shared by all users.
        self._times[sequence.request.user] += tokens / sequence.request.weight

    def ordered(self, sequences: Sequence[RequestSequence]) -> Sequence[RequestSequence]:
        """Return sequences in the order in which their next tokens are computed; `sequences`: in order of arrival."""
        # The usual case, one user without batch requests, skips the sort: it runs before every pass.
        if len(self._times) < 2 and not any(sequence.request.batch for sequence in sequences):
            return sequences
        return sorted(sequences, key=self._rank)

    def first(self, waiting: Sequence[RequestSequence], running: Sequence[RequestSequence]) -> RequestSequence:
        """Return the waiting sequence to start next: one of the user with the fewest running sequences by weight."""
        if len(self._times) < 2:
            return self.ordered(waiting)[0]
        # Places count before time: a place is held for a whole reply, and virtual time is charged only as tokens come.
        counts = Counter(sequence.request.user for sequence in running)

        def rank(sequence: RequestSequence) -> tuple[bool, float, float, int]:
            batch, time, number = self._rank(sequence)
            return batch, counts[sequence.request.user] / sequence.request.weight, time, number

        return min(waiting, key=rank)

    def _rank(self, sequence: RequestSequence) -> tuple[bool, float, int]:
        return sequence.request.batch, self._times[sequence.request.user], sequence.id

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
