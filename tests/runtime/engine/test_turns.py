"""Test turns within one user: every request gets its turn, however many replies another one of the user wants."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.prefix_index import PrefixIndex
from mycli.runtime.engine.scheduled import ScheduledSequence
from mycli.runtime.engine.scheduler import Limits, Scheduler
from mycli.runtime.engine.sequence import BeamOptions, Request, RequestSequence, Status
from tests.support.grids import chosen

LENGTH = 8


def scheduler(running: int = 4, chunk: int = 64, blocks: int = 400) -> Scheduler:
    return Scheduler(BlockPool(blocks, PrefixIndex(4)), Limits(256, chunk, running))


def submit(
    engine: Scheduler, seed: int, replies: int = 1, limit: int = 50, length: int = LENGTH
) -> list[RequestSequence]:
    """Submit a request of the only user with a prompt of its own; return the sequences of its replies."""
    first = engine.submit(Request(tuple(seed * 1000 + at for at in range(length)), limit=limit))
    return [first, *(engine.branch(first, first.request) for _ in range(replies - 1))]


def step(engine: Scheduler) -> list[ScheduledSequence]:
    """Run a pass; return its parts, with those of branches that it started."""
    scheduled = engine.schedule()
    parts = list(scheduled)
    for part in scheduled:
        if part.completes:
            parts += engine.start_branches(part)
    for part in parts:
        _, reason = engine.advance(part, [1] if part.completes else [])
        if reason is not None:
            engine.finish(part.sequence)
    return parts


def passes_until(engine: Scheduler, sequences: Sequence[RequestSequence], status: Status, most: int = 5000) -> int:
    for count in range(most):
        if all(sequence.status is status for sequence in sequences):
            return count
        step(engine)
    raise AssertionError("not within the passes")


def places(engine: Scheduler) -> Counter[str]:
    return Counter(sequence.group for sequence in engine.running)


def test_a_single_request_gets_a_place_at_once_beside_requests_for_64_replies() -> None:
    engine = scheduler(running=8)
    many = [submit(engine, seed, replies=64) for seed in range(4)]
    for _ in range(6):
        step(engine)
    assert len(engine.running) == 8
    (one,) = submit(engine, 99, limit=2)
    assert passes_until(engine, [one], Status.FINISHED) <= 4
    assert all(places(engine)[request[0].group] >= 1 for request in many), "each request keeps a turn"


def test_places_are_shared_evenly_among_requests() -> None:
    engine = scheduler(running=9)
    for seed in range(3):
        submit(engine, seed, replies=20)
    for _ in range(6):
        step(engine)
    assert sorted(places(engine).values()) == [3, 3, 3]


def test_a_request_alone_has_all_places_and_computes_its_prompt_once() -> None:
    engine = scheduler(running=8)
    submit(engine, 0, replies=20)
    assert [part.count for part in step(engine)] == [LENGTH, *[0] * 7]
    assert len(engine.running) == 8 and engine.counts.preemptions == 0


def test_single_requests_are_served_in_the_order_of_arrival_and_none_is_preempted() -> None:
    engine = scheduler(running=2)
    sequences = [sequence for seed in range(12) for sequence in submit(engine, seed, limit=1 + seed * 7 % 5)]
    started: list[int] = []
    while engine.has_work:
        for part in step(engine):
            if part.sequence.id not in started:
                started.append(part.sequence.id)
    assert started == [sequence.id for sequence in sequences] and engine.counts.preemptions == 0


def test_a_request_for_many_replies_keeps_a_turn_under_a_stream_of_single_ones() -> None:
    engine = scheduler(running=3)
    many = submit(engine, 0, replies=10, limit=5)
    seed = 1
    for _ in range(400):
        if len(engine.waiting) < 4:
            submit(engine, seed, limit=5)
            seed += 1
        step(engine)
    assert all(sequence.status is Status.FINISHED and sequence.sampled == 5 for sequence in many)


def test_a_short_prompt_overtakes_a_long_one_that_is_half_computed() -> None:
    engine = scheduler(chunk=16)
    submit(engine, 0, length=160)
    step(engine)
    submit(engine, 1, length=8)
    assert [(part.sequence.id, part.count) for part in step(engine)] == [(1, 8), (0, 8)]


def test_a_short_prompt_overtakes_many_long_ones() -> None:
    engine = scheduler(running=50, chunk=16)
    for seed in range(10):
        submit(engine, seed, length=160)
    for _ in range(70):
        step(engine)
    (one,) = submit(engine, 99)
    assert passes_until(engine, [one], Status.RUNNING) <= 2


def test_a_long_prompt_is_served_no_later_than_at_equal_rates() -> None:
    engine = scheduler(running=50, chunk=16)
    (long,) = submit(engine, 0, length=160)
    others, seed = 0, 1
    while not long.sampled:
        submit(engine, seed, limit=1, length=16)
        seed += 1
        others += sum(part.count for part in step(engine) if part.sequence is not long)
    assert 160 <= others <= 2 * 160, "two requests at a time"


def test_prompts_of_one_request_follow_each_other() -> None:
    engine = scheduler(running=50, chunk=16)
    for seed in range(10):
        engine.submit(Request(tuple(seed * 1000 + at for at in range(32)), limit=5, group="call"))
    for _ in range(4):
        step(engine)
    (one,) = submit(engine, 99, length=16)
    assert passes_until(engine, [one], Status.RUNNING) <= 2 and one.sampled == 0 or one.sampled == 1
    assert places(engine)["call"] < 10


def search(engine: Scheduler, seed: int, width: int, limit: int, length: int = LENGTH) -> list[RequestSequence]:
    first = engine.submit(
        Request(tuple(seed * 1000 + at for at in range(length)), limit=limit, beams=BeamOptions(width))
    )
    return [first, *(engine.branch(first, first.request) for _ in range(width - 1))]


class Searches:
    """Steps a scheduler with searches, whose beams get a token when all of them are computed."""

    def __init__(self, engine: Scheduler, searches: list[list[RequestSequence]]) -> None:
        self.engine, self.searches = engine, searches
        self._computed: set[int] = set()

    def step(self) -> None:
        engine = self.engine
        scheduled = engine.schedule()
        assert scheduled, "a pass without work"
        for part in scheduled:
            is_beam = part.sequence.request.beams is not None
            if is_beam and part.completes:
                self._computed.add(part.sequence.id)
                engine.start_branches(part)
            _, reason = engine.advance(part, [1] if part.completes and not is_beam else [])
            if reason is not None:
                engine.finish(part.sequence)
        for beams in self.searches:
            first = beams[0]
            members = beams if first.sampled else beams[:1]
            if first.status is not Status.FINISHED and all(member.id in self._computed for member in members):
                self._computed -= {member.id for member in beams}
                for member in beams:
                    member.tokens.append(1)
                if first.sampled == first.limit:
                    for member in reversed(beams):
                        engine.finish(member)


def test_a_search_gives_a_place_to_a_single_request_and_pauses() -> None:
    engine = scheduler(running=4)
    beams = search(engine, 0, 4, 100)
    world = Searches(engine, [beams])
    for _ in range(8):
        world.step()
    assert len(engine.running) == 4 and beams[0].sampled > 4
    (one,) = submit(engine, 99, limit=2)
    for _ in range(4):
        world.step()
    assert one.status is Status.FINISHED and beams[0].status is Status.RUNNING


def test_a_single_request_does_not_wait_for_searches_that_wait_for_others() -> None:
    engine = scheduler(running=4)
    world = Searches(engine, [search(engine, seed, 4, 40) for seed in range(3)])
    for _ in range(8):
        world.step()
    (one,) = submit(engine, 99, limit=2)
    for _ in range(4):
        world.step()
    assert one.status is Status.FINISHED and world.searches[0][0].status is Status.RUNNING


def test_a_search_ends_under_a_stream_of_single_requests() -> None:
    engine = scheduler(running=4)
    beams = search(engine, 0, 4, 60)
    world, seed = Searches(engine, [beams]), 1
    passes = 0
    while beams[0].status is not Status.FINISHED and passes < 6000:
        passes += 1
        while len(engine.waiting) < 4:
            submit(engine, seed, limit=5)
            seed += 1
        world.step()
    assert passes < 6000 and seed > 40, "both get on"


@pytest.mark.parametrize("seed", range(20))
def test_searches_and_replies_all_end(seed: int) -> None:
    chance = random.Random(seed)
    engine = scheduler(running=4, chunk=chance.choice((8, 64)), blocks=400 if seed % 2 else 80)
    world = Searches(engine, [])
    sequences: list[RequestSequence] = []
    for number in range(150):
        if chance.random() < 0.3:
            length = chance.choice((4, 8, 40))
            if chance.random() < 0.4:
                world.searches.append(search(engine, number, chance.randint(2, 4), chance.randint(1, 20), length))
                sequences += world.searches[-1]
            else:
                sequences += submit(engine, number, chance.choice((1, 1, 9)), chance.randint(1, 20), length)
        if engine.has_work:
            world.step()
    for _ in range(20_000):
        if engine.has_work:
            world.step()
    assert not engine.has_work and all(sequence.status is Status.FINISHED for sequence in sequences)
    assert engine.pool.used == 0


@pytest.mark.parametrize("seed", chosen(range(12), quick=range(5)))
def test_every_request_ends_and_waits_for_one_turn_of_each_other_at_most(seed: int) -> None:
    """Check random requests of one user with equal prompts: arrivals, replies, lengths and cancellations vary."""
    chance = random.Random(seed)
    running, blocks = chance.randint(2, 6), 400 if seed % 2 else 60
    engine = scheduler(running, chance.choice((8, 16, 64)), blocks)
    requests: list[list[RequestSequence]] = []
    ahead: dict[str, set[str]] = {}  # of a request without a place: the others that were there when it came
    turns: dict[str, Counter[str]] = {}  # and the turns that others have begun since then
    for number in range(300):
        if number < 200 and chance.random() < 0.3:
            request = submit(engine, number, chance.choice((1, 1, 1, 5, 30)), chance.randint(1, 12))
            ahead[request[0].group] = {sequence.group for other in requests for sequence in other if _alive(sequence)}
            turns[request[0].group] = Counter()
            requests.append(request)
        before = places(engine)
        step(engine)
        begun = [sequence for request in requests for sequence in request if sequence.started]
        for sequence in begun:
            ahead.pop(sequence.group, None)
        for group in ahead:
            turns[group].update(places(engine).keys() - before.keys())
        for group, others in ahead.items():
            assert turns[group].keys() <= others, "a later request was first"
            # A preempted sequence takes its place again, without a turn of its own, where blocks are few.
            assert blocks < 400 or all(count <= 1 for count in turns[group].values()), turns[group]
    sequences = [sequence for request in requests for sequence in request]
    passes_until(engine, sequences, Status.FINISHED, 20_000)
    assert all(sequence.sampled == sequence.limit for sequence in sequences)
    assert engine.pool.used == 0 and not engine.has_work


def _alive(sequence: RequestSequence) -> bool:
    return sequence.status is not Status.FINISHED
