"""Test scheduler and block pool against a cache of lists in which every position stores its token prefix.

On random histories of submits, branches, cancels, drafts and preemptions: a pass reads only its own sequence's data,
writes nothing that another sequence can see, no block leaks, and every reply equals the reply alone.
"""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.prefix_index import Node, PrefixIndex
from mycli.runtime.engine.scheduled import ScheduledSequence
from mycli.runtime.engine.scheduler import SCORED_CHUNK_TOKENS, Limits, Scheduler
from mycli.runtime.engine.sequence import FinishReason, Request, RequestSequence, Status
from mycli.runtime.errors import UsageError
from tests.support.engines import text_of

VOCAB = 3
STOP = frozenset((7,))


def following(text: tuple[int, ...]) -> int:
    value = hash(text) % 31
    return 7 if value == 0 else value % VOCAB


def alone(prompt: tuple[int, ...], limit: int) -> tuple[int, ...]:
    text = prompt
    while len(text) - len(prompt) < limit and (token := following(text)) not in STOP:
        text = (*text, token)
    return text[len(prompt) :]


class World:
    """Simulates a scheduler with a cache of token lists and tracks the expected replies."""

    def __init__(self, blocks: int, block_size: int, context: int, chunk: int, running: int) -> None:
        self.now = 0.0
        self.pool = BlockPool(blocks, PrefixIndex(block_size))
        self.scheduler = Scheduler(self.pool, Limits(context, chunk, running), lambda: self.now)
        self.cache: list[list[tuple[int, ...] | None]] = [[None] * block_size for _ in range(blocks)]
        self.under_way: dict[int, RequestSequence] = {}
        self.ended: dict[int, FinishReason] = {}
        self.steps = 0
        self.users = False

    def submit(
        self, prompt: tuple[int, ...], limit: int | None, deadline: float | None = None
    ) -> RequestSequence | None:
        # Users with different shares in random proportions; one user for all requests if the world has just one.
        kind = hash(prompt) % 7 if self.users else 0
        user, weight = ("", "heavy", "light")[kind % 3], (1.0, 4.0, 0.5)[kind % 3]
        request = Request(
            prompt, limit=limit, stop_ids=STOP, deadline=deadline, user=user, weight=weight, batch=kind == 6
        )
        context, held = self.scheduler.limits.context, self.pool.blocks * self.pool.block_size
        asked = context - len(prompt) + 1 if limit is None else limit
        fits = 0 < len(prompt) <= context and len(prompt) + asked - 1 <= min(context, held) or not asked
        try:
            sequence = self.scheduler.submit(request)
        except UsageError:
            assert not fits or len(prompt) > held or len(prompt) > context or not prompt
            return None
        self.under_way[sequence.id] = sequence
        return sequence

    def branch(self, sequence: RequestSequence) -> None:
        other = self.scheduler.branch(sequence, sequence.request)
        self.under_way[other.id] = other

    def end(self, sequence: RequestSequence, reason: FinishReason, wrong: bool = False) -> None:
        self.scheduler.finish(sequence, discard_cache=wrong)
        del self.under_way[sequence.id]
        self.ended[sequence.id] = reason
        expected = alone(sequence.request.prompt, sequence.limit)
        drawn = tuple(sequence.tokens[sequence.prompt_length :])
        if reason in ("stop", "length", "context"):
            assert drawn == expected
            assert (reason == "stop") == (len(drawn) < sequence.limit)
        else:
            assert drawn == expected[: len(drawn)]

    def step(self, guess: "random.Random | None" = None) -> None:
        """Run one pass; with `guess`, tokens are drafted, some of them wrong."""
        self.steps += 1
        for sequence in self.scheduler.late():
            self.end(sequence, "deadline")
        turns = self.scheduler.schedule((lambda _, room: guess.randint(0, min(3, room))) if guess else lambda *_: 0)
        for source, target in self.pool.take_copies():
            self.cache[target] = list(self.cache[source])
        assert sum(turn.count for turn in turns if not turn.is_decode) <= self.scheduler.limits.chunk
        assert all(turn.count > 0 for turn in turns), "who has its turn has a token to read"
        assert len({turn.sequence.id for turn in turns}) == len(turns) <= self.scheduler.limits.running
        ahead = self.ahead(turns) if self.steps % 3 == 0 else 1
        drafts = {turn.sequence.id: self.drafted(turn, guess, ahead) for turn in turns}
        for turn in turns:
            self.write(turn, drafts[turn.sequence.id])
        for turn in turns:
            self.draw(turn, drafts[turn.sequence.id])

    def ahead(self, turns: list[ScheduledSequence]) -> int:
        """Return how many tokens each sequence may get in one call without a preemption."""
        if not all(turn.is_decode and not turn.drafts for turn in turns) or not turns:
            return 1
        before = self.scheduler.counts.preemptions
        left = min(turn.sequence.limit - turn.sequence.sampled for turn in turns)
        found = self.scheduler.reserve_ahead(turns, left)
        assert 1 <= found <= left and self.scheduler.counts.preemptions == before
        return found

    def drafted(self, turn: ScheduledSequence, guess: "random.Random | None", ahead: int) -> list[int]:
        """Return what is written after the scheduled tokens: drafts, or tokens of a multi-step call."""
        text, drafted = tuple(turn.sequence.tokens), list[int]()
        for _ in range(ahead - 1):
            drafted.append(following((*text, *drafted)))
        for _ in range(turn.drafts):
            assert guess is not None
            drafted.append(following((*text, *drafted)) if guess.random() < 0.7 else guess.randrange(VOCAB))
        return drafted

    def write(self, turn: ScheduledSequence, drafted: list[int]) -> None:
        """Mark every position with its whole prefix, and check that earlier positions hold this sequence's prefix."""
        chunk, size = turn.chunk(drafted), self.pool.block_size
        text = (*turn.sequence.tokens[: turn.start], *chunk.tokens)
        for at in range(turn.start):
            assert self.cache[chunk.blocks[at // size]][at % size] == text[: at + 1]
        for at in range(turn.start, turn.start + len(chunk.tokens)):
            block = chunk.blocks[at // size]
            assert self.pool.references(block) == 1 and block not in self.pool.index, "written by one, seen by nobody"
            self.cache[block][at % size] = text[: at + 1]

    def draw(self, turn: ScheduledSequence, drafted: list[int]) -> None:
        sequence, drawn = turn.sequence, list[int]()
        everyone = [turn]
        if turn.completes and sequence.limit:
            text = tuple(sequence.tokens)
            everyone += self.scheduler.start_branches(turn)
            for guess in [*drafted, None]:
                drawn.append(following((*text, *drawn)))
                if drawn[-1] != guess:
                    break
        for one in everyone:
            _, reason = self.scheduler.advance(one, drawn)
            if reason is not None:
                self.end(one.sequence, reason)

    def check(self) -> None:
        pool, scheduler = self.pool, self.scheduler
        held = [block for one in self.under_way.values() for block in one.table.blocks]
        for block in range(pool.blocks):
            assert pool.references(block) == held.count(block)
        assert pool.free + pool.index.idle + pool.used == pool.blocks and pool.used == len(set(held))
        waiting = [pool.index.root]
        while waiting:
            node: Node = waiting.pop()
            waiting += node.children.values()
            if node.parent is not None:
                text = tuple(text_of(node))
                before = len(text) - len(node.tokens)
                content = self.cache[node.block][: len(node.tokens)]
                assert content == [text[: before + at + 1] for at in range(len(node.tokens))]
        assert [one.id for one in scheduler.running] == sorted(one.id for one in scheduler.running)
        assert [one.id for one in scheduler.waiting] == sorted(one.id for one in scheduler.waiting)
        for one in scheduler.waiting:
            assert one.status is Status.WAITING and not one.table.blocks

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work and not self.under_way
        assert self.pool.used == 0
        self.check()
        self.pool.clear()
        assert self.pool.free == self.pool.blocks


TOKENS = st.integers(0, VOCAB - 1)


class Machine(RuleBasedStateMachine):
    @rule(
        blocks=st.integers(1, 9),
        size=st.integers(1, 5),
        context=st.integers(2, 24),
        chunk=st.integers(1, 9),
        running=st.integers(1, 5),
        users=st.booleans(),
    )
    @precondition(lambda self: not hasattr(self, "world"))
    def begin(self, blocks: int, size: int, context: int, chunk: int, running: int, users: bool) -> None:
        self.world = World(blocks, size, context, chunk, running)
        self.world.users = users
        self.random = random.Random(0)

    @rule(
        prompt=st.lists(TOKENS, max_size=14),
        limit=st.none() | st.integers(0, 16),
        deadline=st.none() | st.integers(0, 4),
        forks=st.integers(0, 3),
    )
    @precondition(lambda self: hasattr(self, "world") and len(self.world.under_way) < 12)
    def submit(self, prompt: list[int], limit: int | None, deadline: int | None, forks: int) -> None:
        sequence = self.world.submit(tuple(prompt), limit, deadline)
        for _ in range(forks if sequence is not None else 0):
            assert sequence is not None
            self.world.branch(sequence)

    @rule(seconds=st.integers(0, 2), guess=st.booleans(), times=st.integers(1, 6))
    @precondition(lambda self: hasattr(self, "world"))
    def step(self, seconds: int, guess: bool, times: int) -> None:
        self.world.now += seconds
        for _ in range(times):
            self.world.step(self.random if guess else None)

    @rule(which=st.integers(0, 99), wrong=st.booleans())
    @precondition(lambda self: hasattr(self, "world") and self.world.under_way)
    def cancel(self, which: int, wrong: bool) -> None:
        found = list(self.world.under_way.values())
        self.world.end(found[which % len(found)], "error" if wrong else "cancelled", wrong)

    @invariant()
    def books(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestAnyHistory = Machine.TestCase
TestAnyHistory.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def history(seed: int, steps: int) -> Scheduler:
    chance = random.Random(seed)
    size = chance.randint(1, 6)
    context = chance.randint(8, 40)
    blocks = -(-context // size) + chance.randint(0, 6)
    world = World(blocks, size, context, chance.randint(1, 16), chance.randint(1, 8))
    world.users = seed % 2 == 1
    begins = [tuple(chance.randrange(VOCAB) for _ in range(chance.randint(1, context // 2))) for _ in range(4)]
    while world.steps < steps:
        if len(world.under_way) < 10 and chance.random() < 0.4:
            rest = tuple(chance.randrange(VOCAB) for _ in range(chance.randint(0, 6)))
            begin = chance.choice(begins)
            prompt = (*begin[: chance.randint(0, len(begin))], *rest)
            sequence = world.submit(prompt, chance.choice((None, 0, 1, 5, 12)), chance.choice((None, None, 9.0)))
            for _ in range(chance.choice((0, 0, 0, 2)) if sequence is not None else 0):
                assert sequence is not None
                world.branch(sequence)
        if world.under_way and chance.random() < 0.05:
            world.end(chance.choice(list(world.under_way.values())), "cancelled")
        world.now += 1
        world.step(chance if chance.random() < 0.5 else None)
        if world.steps % 10 == 0:
            world.check()
    world.finish()
    return world.scheduler


def test_a_life_of_a_few_thousand_steps_preempts_shares_and_leaks_nothing() -> None:
    counts = [history(seed, 400).counts for seed in range(5)]
    assert sum(one.preemptions for one in counts) > 50
    assert sum(one.hits for one in counts) > 200
    assert {reason.split(" ")[0] for one in counts for reason in one.misses} >= {"differs", "evicted", "no", "the"}


@pytest.mark.slow
def test_a_hundred_thousand_steps() -> None:
    for seed in range(100, 150):
        history(seed, 2000)


def scheduler(blocks: int, size: int, context: int, chunk: int = 100, running: int = 9) -> Scheduler:
    return Scheduler(BlockPool(blocks, PrefixIndex(size)), Limits(context, chunk, running))


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    """G23."""
    tight = scheduler(blocks=2, size=4, context=30)
    with pytest.raises(UsageError, match="6 prompt tokens and 4 more do not fit the cache of 8 tokens") as caught:
        tight.submit(Request((1,) * 6, limit=4))
    assert caught.value.data == {"tokens": 3}
    tight.submit(Request((1,) * 6, limit=3))
    with pytest.raises(UsageError, match="31 tokens, the context has room for 30"):
        tight.submit(Request((1,) * 31, limit=1))
    with pytest.raises(UsageError, match="empty"):
        tight.submit(Request(()))


def test_prompts_and_replies_take_turns() -> None:
    busy = scheduler(blocks=20, size=4, context=40, chunk=5)
    first = busy.submit(Request((1, 2), limit=30))
    (turn,) = busy.schedule()
    busy.advance(turn, [0])
    busy.submit(Request((2,) * 18, limit=3))
    kinds = []
    for _ in range(7):
        turns = busy.schedule()
        kinds.append(turns[0].is_decode)
        for turn in turns:
            busy.advance(turn, [0] if turn.completes else [])
    assert kinds[:7] == [True, False, True, False, True, False, True] and first.sampled == 5


@pytest.mark.parametrize(("limit", "context"), [(6, 40), (None, 8)], ids=["limit", "context"])
def test_as_many_tokens_are_drafted_as_the_reply_may_have(limit: int | None, context: int) -> None:
    """With all drafts accepted, the pass after the prompt's ends the reply."""
    eager = scheduler(blocks=20, size=4, context=context)
    sequence = eager.submit(Request((1, 2), limit=limit))
    for expected in (None, "length" if limit else "context"):
        (part,) = eager.schedule(lambda _, room: room)
        tokens, reason = eager.advance(part, [0] * (1 + part.drafts))
        assert len(tokens) == 1 + part.drafts and reason == expected
    assert sequence.sampled == sequence.limit


def test_the_newest_gives_way_and_goes_on_later() -> None:
    """G40: both sequences need their last block in the same pass."""
    tight = scheduler(blocks=4, size=2, context=8)
    one, two = (tight.submit(Request((token, token), limit=6)) for token in (1, 2))
    order = []
    while tight.has_work:
        for turn in tight.schedule():
            _, reason = tight.advance(turn, [0])
            if reason:
                tight.finish(turn.sequence)
                order.append(turn.sequence.id)
    assert order == [one.id, two.id] and one.sampled == two.sampled == 6
    assert tight.counts.preemptions == 1


def test_waiting_ends_at_the_deadline_and_running_does_not() -> None:
    """G24."""
    now = 0.0
    patient = Scheduler(BlockPool(1, PrefixIndex(8)), Limits(8, 8, 1), lambda: now)
    first = patient.submit(Request((1,), limit=5, deadline=3.0))
    second = patient.submit(Request((2,), limit=5, deadline=3.0))
    patient.advance(patient.schedule()[0], [0])
    now = 2.9
    assert not patient.late()
    now = 3.0
    assert patient.late() == [second] and first.status is Status.RUNNING


def test_the_time_before_the_first_turn_is_kept_through_a_preemption() -> None:
    now = 0.0
    tight = Scheduler(BlockPool(4, PrefixIndex(2)), Limits(8, 8, 2), lambda: now)
    sequences = [tight.submit(Request((token, token), limit=6)) for token in (1, 2)]
    while tight.has_work:
        now += 1.5
        for turn in tight.schedule():
            _, reason = tight.advance(turn, [0])
            if reason:
                tight.finish(turn.sequence)
    assert tight.counts.preemptions == 1 and [one.queued for one in sequences] == [1.5, 1.5]


def test_a_pass_keeps_logits_of_a_bounded_number_of_prompt_tokens() -> None:
    machine = Scheduler(BlockPool(64, PrefixIndex(16)), Limits(512, 512, 4))
    scored = [machine.submit(Request((index,) * 50, limit=1, prompt_logprobs=True)) for index in range(5)]
    other = machine.submit(Request((9,) * 50, limit=1))
    parts = machine.schedule()
    assert sum(part.count for part in parts if part.scored) == SCORED_CHUNK_TOKENS
    assert [(part.sequence, part.count) for part in parts] == [
        (scored[0], 50),
        (scored[1], 50),
        (scored[2], 28),
        (other, 50),
    ]
