"""Shares a machine among users: each gets tokens in proportion to its weight, not to its number of requests.

Every user has a virtual time: the tokens that were computed for it, divided by its weight. The user whose time is
behind comes first. One that returns after a pause starts at the time of those that are at work: it is owed nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from mycli.runtime.engine.sequence import Sequence as RequestSequence


class FairShares:
    """The virtual times of users. With a single user all orders are by arrival."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}  # of users with sequences
        self._sequences: Counter[str] = Counter()
        self._floor = 0.0  # the time of a user that comes to an idle engine

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
            self._floor = max(self._floor, self._times.pop(user))
            del self._sequences[user]

    def charge(self, sequence: RequestSequence, tokens: int) -> None:
        """Add computed tokens to the time of the user of `sequence`."""
        self._times[sequence.request.user] += tokens / sequence.request.weight

    def ordered(self, sequences: Sequence[RequestSequence]) -> Sequence[RequestSequence]:
        """Return sequences, given by arrival, in the order in which their next tokens are computed."""
        if len(self._times) < 2 and not any(sequence.request.batch for sequence in sequences):
            return sequences
        return sorted(sequences, key=self._rank)

    def first(self, waiting: Sequence[RequestSequence], running: Sequence[RequestSequence]) -> RequestSequence:
        """Return the waiting sequence to start next: of the user with fewest running ones by weight."""
        if len(self._times) < 2:
            return self.ordered(waiting)[0]
        counts = Counter(sequence.request.user for sequence in running)

        def rank(sequence: RequestSequence) -> tuple[bool, float, float, int]:
            batch, time, number = self._rank(sequence)
            return batch, counts[sequence.request.user] / sequence.request.weight, time, number

        return min(waiting, key=rank)

    def _rank(self, sequence: RequestSequence) -> tuple[bool, float, int]:
        return sequence.request.batch, self._times[sequence.request.user], sequence.id

    @staticmethod
    def victim(running: Sequence[RequestSequence]) -> RequestSequence:
        """Return the sequence to preempt: the newest of the user that has most by weight, batch ones first."""
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
        """Return the running sequence that `waiting` may replace; None if its user has its share already.

        The other user still has at least as much as the first one then, so the two never replace each other in turn.
        """
        running = list(running)
        if not running:
            return None
        victim = FairShares.victim(running)
        counts = Counter(sequence.request.user for sequence in running)
        if victim.request.batch and not waiting.request.batch:
            return victim
        if victim.request.batch != waiting.request.batch or victim.request.user == waiting.request.user:
            return None
        mine = (counts[waiting.request.user] + 1) / waiting.request.weight
        theirs = (counts[victim.request.user] - 1) / victim.request.weight
        return victim if mine <= theirs else None
