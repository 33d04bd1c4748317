"""Shares a machine among users, by weight and not by number of requests, and a user's share among its requests.

Weighted fair queueing: every user has a virtual time, the tokens computed for it divided by its weight, and the user
with the smallest virtual time is served first. A user that returns after a pause starts at the smallest virtual time of
the active users or where it was, so it gets no credit for the pause and none for leaving.

Within a user, the sequences of one request are a group, and groups take turns: the next place goes to the group with
the fewest running sequences, and a group with several gives one up for a group without any. Between equal groups, and
between prompts, the order is that in which they would end if all groups got tokens at the same rate. So equal prompts
are served in the order of arrival, and a short prompt overtakes long ones, but no prompt is served later than with
equal rates. A group whose sequence ends is due as if it had just arrived.

The beams of a search advance together, so one that gives up its place pauses the search. Searches do not replace each
other's beams; a search pauses for `PAUSE_TOKENS` of other work, then gets the next places, and then keeps all until
its beams are `RESUMED_TOKENS` longer.

A pass is not interrupted, so a new prompt waits for the one that runs. Prompts of a user with many replies are
therefore cut smaller while prompts of users with fewer are expected (`FairShares.pass_size`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mycli.runtime.engine.sequence import RequestSequence, Status

# How far the virtual time of an active user may be behind, in tokens of weight 1: a user with one long reply must not
# gain the right to hold up all others afterwards.
MAX_CREDIT = 4096
# How long after its last prompt another one of a user is expected.
EXPECTED_SECONDS = 60.0
# The smallest part of a chunk that prompts are cut to. Smaller passes gain little: passes of running replies, which
# are not cut, have as many rows.
SMALLEST_PART = 8
# Enough for a few short replies. The search then has all places for about a second at most: a token of 32 beams of pico
# takes about 0.2 s on two cores.
PAUSE_TOKENS = 32
RESUMED_TOKENS = 4


@dataclass(frozen=True)
class ExpectedPrompt:
    """The last interactive prompt of a user: when it started, its tokens, and the weight of the user."""

    started: float
    tokens: int
    weight: float


@dataclass
class GroupTurns:
    """The sequences of one request; due: when its last prompt ends; again: earliest time of its next place.

    Of a beam search that has paused: the total of tokens at which it resumes, and how many tokens its beams must have
    before the next pause.
    """

    due: float
    again: float = 0.0
    sequences: int = 0
    resumes: int = 0
    pausable_at: int = 0


@dataclass
class UserTurns:
    """The groups of one user by name; clock: tokens that each would have got so far at equal rates."""

    clock: float = 0.0
    groups: dict[str, GroupTurns] = field(default_factory=dict)


@dataclass(frozen=True)
class Places:
    """The numbers of running sequences by user and by group."""

    users: Counter[str]
    groups: Counter[str]

    @classmethod
    def of(cls, running: Iterable[RequestSequence]) -> "Places":
        """Count the places of running sequences."""
        running = list(running)
        return cls(Counter(other.request.user for other in running), Counter(other.group for other in running))

    def share(self, sequence: RequestSequence) -> float:
        """Return the places of the user of a sequence, divided by its weight."""
        return self.users[sequence.request.user] / sequence.request.weight


class FairShares:
    """The virtual times of users, and the turns of the groups of each."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}  # only of users that have sequences
        self._left: dict[str, float] = {}  # the virtual times of the other users when they left; at most one a key
        self._sequences: Counter[str] = Counter()
        self._turns: dict[str, UserTurns] = {}  # by user
        self._work = 0  # tokens computed so far
        self._floor = 0.0  # the virtual time of a user that arrives at an idle engine
        self._prompts: dict[str, ExpectedPrompt] = {}  # by user

    def enter(self, sequence: RequestSequence, prompt: int) -> None:
        """Count a new sequence of its user; `prompt`: tokens that it computes by itself, 0 for a branch."""
        user = sequence.request.user
        if not self._sequences[user]:
            least = min(self._times.values(), default=self._floor)
            self._times[user] = max(least, self._left.pop(user, least))
        self._sequences[user] += 1
        turns = self._turns.setdefault(user, UserTurns())
        group = turns.groups.setdefault(sequence.group, GroupTurns(turns.clock))
        # The prompts of one request follow each other, as if it sent one after another.
        group.due = sequence.due = max(turns.clock, group.due) + prompt
        group.sequences += 1

    def leave(self, sequence: RequestSequence) -> None:
        """Count a sequence that has ended."""
        user = sequence.request.user
        turns = self._turns[user]
        group = turns.groups[sequence.group]
        group.sequences -= 1
        group.again = turns.clock + sequence.prompt_length
        if not group.sequences:
            del turns.groups[sequence.group]
        self._sequences[user] -= 1
        if not self._sequences[user]:
            # Never decreases: a user that leaves and returns must not regain time that it has used.
            self._left[user] = self._times.pop(user)
            self._floor = max(self._floor, self._left[user])
            del self._sequences[user], self._turns[user]

    def charge(self, sequence: RequestSequence, tokens: int) -> None:
        """Add computed tokens to the virtual time of a sequence's user and to the clock of its groups."""
        turns = self._turns[sequence.request.user]
        turns.clock += tokens / len(turns.groups)
        self._work += tokens
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

    def ordered(self, prompts: Sequence[RequestSequence], running: Iterable[RequestSequence]) -> list[RequestSequence]:
        """Return running prompts in the order in which their next tokens are computed."""
        if len(prompts) < 2:  # the usual case: this runs before every other pass
            return list(prompts)
        places = Places.of(running)
        return sorted(prompts, key=lambda sequence: self._rank(sequence, places))

    def precedes(self, sequence: RequestSequence, other: RequestSequence, running: Iterable[RequestSequence]) -> bool:
        """Return whether a waiting sequence is computed before the prompt of one that is running."""
        if sequence.request.batch == other.request.batch and sequence.request.user == other.request.user:
            return (sequence.due, sequence.id) < (other.due, other.id)
        return self.interrupts(sequence, other, running)

    def interrupts(self, sequence: RequestSequence, other: RequestSequence, running: Iterable[RequestSequence]) -> bool:
        """Return whether a waiting sequence is computed before one of another user that is running, or before batch."""
        if sequence.request.batch != other.request.batch:
            return other.request.batch
        if sequence.request.user == other.request.user:
            return False
        places = Places.of(running)
        return self._rank(sequence, places) < self._rank(other, places)

    def first(self, waiting: Iterable[RequestSequence], running: Iterable[RequestSequence]) -> RequestSequence:
        """Return the waiting sequence to start next: one of the user, and of its request, with the fewest running."""
        places = Places.of(running)

        # Places count before time: a place is held for a whole reply, and virtual time is charged only as tokens come.
        def rank(sequence: RequestSequence) -> tuple[bool, bool, float, float, int, float, int]:
            user, batch, group = sequence.request.user, sequence.request.batch, self._group(sequence)
            count, search = places.groups[sequence.group], sequence.request.beams is not None
            if search and count and self._work >= group.resumes:
                return batch, False, 0.0, 0.0, 0, 0.0, sequence.id  # its other beams wait and keep their places
            due = max(sequence.due, group.again)
            return batch, True, places.share(sequence), self._times[user], 0 if search else count, due, sequence.id

        return min(waiting, key=rank)

    def pause(self, sequence: RequestSequence) -> None:
        """Note that a sequence gives up its place: a search pauses with it."""
        group = self._group(sequence)
        if sequence.request.beams is not None and self._work >= group.resumes:
            group.resumes, group.pausable_at = self._work + PAUSE_TOKENS, sequence.sampled + RESUMED_TOKENS

    def resume(self) -> None:
        """End all pauses: nothing else can run."""
        for turns in self._turns.values():
            for group in turns.groups.values():
                group.resumes = min(group.resumes, self._work)

    def _pausable(self, sequence: RequestSequence, waiting: RequestSequence) -> bool:
        """Return whether a sequence may lose its place to a waiting one, as far as its search is concerned."""
        if sequence.request.beams is None or (sequence.request.batch and not waiting.request.batch):
            return True
        group = self._group(sequence)
        paused = self._work < group.resumes
        return waiting.request.beams is None and (paused or sequence.sampled >= group.pausable_at)

    def _group(self, sequence: RequestSequence) -> GroupTurns:
        return self._turns[sequence.request.user].groups[sequence.group]

    def _rank(self, sequence: RequestSequence, places: Places) -> tuple[bool, float, float, float, int]:
        time = self._times[sequence.request.user]
        return sequence.request.batch, time, places.share(sequence), sequence.due, sequence.id

    @staticmethod
    def victim(running: Sequence[RequestSequence]) -> RequestSequence:
        """Return the sequence to preempt: the newest of the largest group of the user with the most by weight.

        Batch sequences come first.
        """
        # The newest has the fewest computed tokens to recompute, as a rule, and older ones are sure to finish.
        places = Places.of(running)
        return max(
            running,
            key=lambda sequence: (
                sequence.request.batch,
                places.share(sequence),
                places.groups[sequence.group],
                sequence.id,
            ),
        )

    def gives_way(
        self, candidates: Iterable[RequestSequence], waiting: RequestSequence, running: Iterable[RequestSequence]
    ) -> RequestSequence | None:
        """Return which of the candidates `waiting` may replace; None if its user and its group have their share."""
        candidates = [other for other in candidates if self._pausable(other, waiting)]
        if not candidates:
            return None
        places, replaceable = Places.of(running), Places.of(candidates)
        victim, user = self.victim(candidates), waiting.request.user
        if victim.request.batch and not waiting.request.batch:
            return victim
        if victim.request.batch == waiting.request.batch and victim.request.user != user:
            # After the exchange the victim's user still has at least as much as the other one. With a weaker condition
            # the two could replace each other's sequences in turn, each time recomputing a prompt.
            mine = (places.users[user] + 1) / waiting.request.weight
            theirs = (replaceable.users[victim.request.user] - 1) / victim.request.weight
            if mine <= theirs:
                return victim
        kind = waiting.request.batch
        others = [other for other in candidates if other.request.user == user and other.request.batch == kind]
        if not others:
            return None
        victim = self.victim(others)
        # The same condition among the groups of a user.
        fair = places.groups[waiting.group] + 1 <= replaceable.groups[victim.group] - 1
        return victim if fair else None
