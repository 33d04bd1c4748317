"""Test fair scheduling among users: by weight, independent of the number of requests, interactive before batch."""

import time
from collections import Counter
from collections.abc import Callable

import pytest

from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.prefix_index import PrefixIndex
from mycli.runtime.engine.fairness import EXPECTED_SECONDS, MAX_CREDIT, PAUSE_TOKENS, RESUMED_TOKENS, FairShares
from mycli.runtime.engine.scheduler import Limits, Scheduler
from mycli.runtime.engine.sequence import BeamOptions, Request, RequestSequence, Status


def scheduler(
    running: int = 4, chunk: int = 8, blocks: int = 200, clock: Callable[[], float] = time.monotonic
) -> Scheduler:
    return Scheduler(BlockPool(blocks, PrefixIndex(4)), Limits(100, chunk, running), clock)


def prompt(seed: int, length: int = 8) -> tuple[int, ...]:
    return tuple(seed * 100 + at for at in range(length))


def submit(
    engine: Scheduler, seed: int, user: str, weight: float = 1.0, batch: bool = False, limit: int = 50, length: int = 8
) -> RequestSequence:
    return engine.submit(Request(prompt(seed, length), limit=limit, user=user, weight=weight, batch=batch))


def step(engine: Scheduler) -> Counter[str]:
    tokens: Counter[str] = Counter()
    for part in engine.schedule():
        tokens[part.sequence.request.user] += part.count
        _, reason = engine.advance(part, [1] if part.completes and part.sequence.limit else [])
        if reason is not None:
            engine.finish(part.sequence)
    return tokens


def passes(engine: Scheduler, count: int) -> list[tuple[str, int]]:
    shown = []
    for _ in range(count):
        scheduled = engine.schedule()
        users = "+".join(sorted({part.sequence.request.user for part in scheduled}))
        shown.append(("decode" if scheduled[0].is_decode else users, sum(part.count for part in scheduled)))
        for part in scheduled:
            engine.advance(part, [1] if part.completes else [])
    return shown


def until(engine: Scheduler, holds: Callable[[], bool], most: int = 50) -> int:
    for count in range(most):
        if holds():
            return count
        step(engine)
    raise AssertionError("not within the steps")


def test_one_user_is_served_in_the_order_of_arrival() -> None:
    engine = scheduler(running=2)
    first = [submit(engine, seed, "", limit=1) for seed in range(6)]
    ended: list[int] = []
    for _ in range(40):
        step(engine)
        ended += [s.id for s in first if s.status is Status.FINISHED and s.id not in ended]
    assert ended == [s.id for s in first]


def test_a_user_with_one_request_does_not_wait_for_another_one_with_many() -> None:
    engine = scheduler(running=4)
    many = [submit(engine, seed, "many") for seed in range(20)]
    until(engine, lambda: len(engine.running) == 4)
    one = submit(engine, 99, "one")
    assert until(engine, lambda: one.sampled > 0) <= 3
    assert len(engine.running) == 4 and engine.counts.preemptions == 1
    assert many[3].status is Status.WAITING, "the newest of the other user gave way"


def test_no_two_users_replace_each_other_in_turn() -> None:
    engine = scheduler(running=3)
    for seed in range(6):
        submit(engine, seed, "a", limit=30)
        submit(engine, 50 + seed, "b", limit=30)
    until(engine, lambda: not engine.has_work, 900)
    assert engine.counts.preemptions <= 4


def test_prompts_share_a_pass_by_weight() -> None:
    engine, tokens = scheduler(running=8, chunk=4), Counter[str]()
    for seed in range(12):
        submit(engine, seed, "heavy", weight=3.0, limit=1, length=40)
        submit(engine, 50 + seed, "light", limit=1, length=40)
    for _ in range(120):
        tokens += step(engine)
    assert 2.2 < tokens["heavy"] / tokens["light"] < 3.8


def test_batch_requests_wait_and_give_way() -> None:
    engine = scheduler(running=2)
    for seed in range(4):
        submit(engine, seed, "batch", batch=True)
    until(engine, lambda: len(engine.running) == 2)
    interactive = [submit(engine, 50 + seed, "other") for seed in range(2)]
    assert until(engine, lambda: all(s.sampled for s in interactive)) <= 4
    assert not any(s.request.batch for s in engine.running)
    until(engine, lambda: not engine.has_work, 900)


def test_a_pause_earns_nothing() -> None:
    engine, tokens = scheduler(running=2, chunk=4), Counter[str]()
    submit(engine, 0, "late", limit=1)
    for seed in range(1, 8):
        submit(engine, seed, "busy", limit=1, length=40)
    for _ in range(60):
        step(engine)
    for seed in range(20, 26):
        submit(engine, seed, "late", limit=1, length=40)
        submit(engine, 50 + seed, "busy", limit=1, length=40)
    for _ in range(60):
        tokens += step(engine)
    assert 0.6 < tokens["late"] / tokens["busy"] < 1.7


def test_shares_of_the_cache_give_way_too() -> None:
    engine = scheduler(running=50, blocks=20)
    many = [submit(engine, seed, "many", limit=10) for seed in range(8)]
    until(engine, lambda: engine.pool.available < 3)
    one = submit(engine, 99, "one", limit=4)
    assert until(engine, lambda: one.sampled > 0) <= 3
    until(engine, lambda: all(s.status is Status.FINISHED for s in [*many, one]), 900)


@pytest.mark.parametrize("weights", [(1.0, 0.1), (5.0, 1.0)])
def test_everybody_ends(weights: tuple[float, float]) -> None:
    engine = scheduler(running=3, blocks=30)
    sequences = [submit(engine, seed, f"u{seed % 2}", weights[seed % 2], seed % 5 == 0, 20) for seed in range(20)]
    until(engine, lambda: not engine.has_work, 3000)
    assert all(s.status is Status.FINISHED and s.sampled == 20 for s in sequences)


def test_a_new_prompt_comes_before_prompts_that_another_user_has_begun() -> None:
    engine = scheduler(running=8, chunk=8)
    for seed in range(4):
        submit(engine, seed, "many", length=20)
    assert passes(engine, 1) == [("many", 8)]
    submit(engine, 99, "one", length=8)
    assert passes(engine, 2) == [("one", 8), ("decode", 1)], "before the next decode step, and with a pass of its own"


def test_a_decode_step_follows_an_interruption() -> None:
    engine = scheduler(running=8, chunk=8)
    submit(engine, 0, "many", length=4)
    step(engine)
    submit(engine, 1, "many", length=30)
    assert passes(engine, 2) == [("decode", 1), ("many", 8)]
    submit(engine, 98, "one", length=8)
    submit(engine, 99, "two", length=8)
    assert [kind for kind, _ in passes(engine, 4)] == ["one", "decode", "two", "decode"]


@pytest.mark.parametrize("length", [20, 16], ids=["beyond the chunk", "exactly the chunk"])
def test_passes_are_small_while_a_prompt_of_another_user_is_expected(length: int) -> None:
    now = 0.0
    engine = scheduler(running=8, chunk=32, clock=lambda: now)
    submit(engine, 99, "one", limit=0, length=length)
    step(engine)
    submit(engine, 0, "many", length=4)
    assert passes(engine, 2) == [("many", 4), ("decode", 1)]
    for seed in range(1, 4):
        submit(engine, seed, "many", length=48)
    expected = [("many", length // 2)] * 4 + [("decode", 1)]
    assert passes(engine, 5) == expected, "half a prompt of the other user; no decode steps in between"
    now += EXPECTED_SECONDS
    assert passes(engine, 1) == [("many", 32)]


def test_a_sequence_without_room_in_the_pass_takes_no_place() -> None:
    engine = scheduler(running=8, chunk=32)
    submit(engine, 99, "one", limit=0, length=8)
    submit(engine, 0, "many")
    step(engine)
    submit(engine, 98, "one", length=20)
    for seed in range(1, 5):
        submit(engine, seed, "many")
    assert passes(engine, 2) == [("decode", 1), ("one", 20)]
    assert len(engine.running) == 2


def test_one_user_alone_has_the_whole_chunk() -> None:
    engine = scheduler(running=8, chunk=32)
    for seed in range(3):
        submit(engine, seed, "many", length=40)
    assert passes(engine, 3) == [("many", 32), ("many", 32), ("decode", 1)]


def test_batch_prompts_are_cut_for_interactive_ones_of_the_same_user() -> None:
    engine = scheduler(running=8, chunk=32)
    submit(engine, 0, "user", limit=0, length=20)
    step(engine)
    submit(engine, 1, "user", length=48, batch=True)
    assert passes(engine, 1) == [("user", 10)]


def test_the_credit_of_a_user_is_limited() -> None:
    shares, sequences = FairShares(), scheduler()
    slow, busy = submit(sequences, 0, "slow"), submit(sequences, 1, "busy")
    for sequence in (slow, busy):
        shares.enter(sequence, 0)
    shares.charge(busy, 100 * MAX_CREDIT)
    assert list(shares.ordered([busy, slow], [])) == [slow, busy]
    shares.charge(slow, MAX_CREDIT + 1)
    assert list(shares.ordered([slow, busy], [])) == [busy, slow]


def test_leaving_earns_nothing() -> None:
    engine, tokens = scheduler(running=2, chunk=4), Counter[str]()
    for seed in range(40):
        submit(engine, seed, "busy", limit=1, length=40)
    step(engine)
    for seed in range(100, 160):
        one = submit(engine, seed, "hops", limit=0, length=16)
        while one.status is not Status.FINISHED:
            tokens += step(engine)
    assert tokens["hops"] / tokens["busy"] < 1.7


def grouped(engine: Scheduler, seed: int, group: str, user: str = "user") -> RequestSequence:
    return engine.submit(Request(prompt(seed), limit=50, user=user, group=group))


def test_prompts_of_a_request_are_due_one_after_another_and_none_in_the_past() -> None:
    shares, engine = FairShares(), scheduler()
    first, second, third, other, last = (grouped(engine, seed, "a" if seed != 3 else "b") for seed in range(5))
    shares.enter(first, 8)
    shares.enter(second, 8)
    assert (first.due, second.due) == (8, 16)
    shares.charge(first, 40)
    shares.enter(third, 8)
    assert third.due == 48, "the clock of the user's requests has passed the end of the second"
    shares.enter(other, 8)
    shares.charge(first, 10)
    shares.enter(last, 0)
    assert (other.due, last.due) == (48, 48), "after the third"
    shares.charge(first, 20)
    shares.leave(last)
    shares.enter(last, 0)
    assert last.due == 55, "40 tokens for one request, then 30 for two"


def test_a_request_whose_reply_ended_is_due_as_if_it_had_just_arrived() -> None:
    shares, engine = FairShares(), scheduler()
    ended, again, other = (grouped(engine, seed, "a" if seed < 2 else "b") for seed in range(3))
    for sequence in (ended, again):
        shares.enter(sequence, 0)
    shares.enter(other, 4)
    assert shares.first([again, other], []) is again
    shares.leave(ended)  # its prompt had 8 tokens
    assert shares.first([again, other], []) is other


def test_a_new_user_has_no_advantage_over_one_that_returns() -> None:
    shares, engine = FairShares(), scheduler()
    returning, short, new = (submit(engine, seed, user) for seed, user in enumerate(("returning", "short", "new")))
    for sequence in (returning, short):
        shares.enter(sequence, 0)
    shares.charge(returning, 100)
    shares.charge(short, 10)
    shares.leave(returning)
    shares.leave(short)
    for sequence in (new, returning):
        shares.enter(sequence, 0)
    assert shares.ordered([new, returning], []) == [returning, new], "in the order of arrival"
    shares.charge(returning, 1)
    assert shares.ordered([new, returning], []) == [new, returning]


def test_a_user_that_returns_keeps_the_time_that_it_has_used() -> None:
    shares, engine = FairShares(), scheduler()
    returning, active = (submit(engine, seed, user) for seed, user in enumerate(("returning", "active")))
    for sequence in (returning, active):
        shares.enter(sequence, 0)
    shares.charge(returning, 100)
    shares.charge(active, 10)
    shares.leave(returning)
    shares.enter(returning, 0)
    assert shares.ordered([returning, active], []) == [active, returning]


def test_the_last_place_of_an_equal_share_is_given_up_and_no_more() -> None:
    engine = scheduler(running=4)
    for seed in range(6):
        submit(engine, seed, "many")
    until(engine, lambda: len(engine.running) == 4)
    few = [submit(engine, 90 + seed, "few") for seed in range(3)]
    for _ in range(8):
        step(engine)
    assert Counter(sequence.request.user for sequence in engine.running) == {"many": 2, "few": 2}
    assert [sequence.status for sequence in few] == [Status.RUNNING, Status.RUNNING, Status.WAITING]


def test_passes_are_not_cut_for_a_user_with_as_many_replies() -> None:
    engine = scheduler(running=8, chunk=32)
    submit(engine, 99, "one", length=20)
    step(engine)
    submit(engine, 0, "many", length=48)
    assert passes(engine, 1) == [("many", 32)]


@pytest.mark.parametrize(("chunk", "part"), [(32, 4), (4, 1)])
def test_passes_are_not_cut_to_nothing_for_a_short_prompt(chunk: int, part: int) -> None:
    engine = scheduler(running=8, chunk=chunk)
    submit(engine, 99, "one", limit=0, length=2)
    step(engine)
    submit(engine, 0, "many", length=48)
    assert passes(engine, 1) == [("many", part)]


@pytest.mark.parametrize("batch", [False, True])
def test_a_search_keeps_its_places_after_a_pause_unless_it_is_batch(batch: bool) -> None:
    shares, engine = FairShares(), scheduler()
    beams = [
        engine.submit(Request(prompt(0), limit=50, user="a", group="g", batch=batch, beams=BeamOptions(2)))
        for _ in range(2)
    ]
    one = submit(engine, 1, "b")
    for sequence in (*beams, one):
        shares.enter(sequence, 0)
    shares.pause(beams[1])
    assert shares.gives_way(beams, one, beams) is beams[1], "all its places, while it pauses"
    shares.charge(one, PAUSE_TOKENS)
    assert shares.gives_way(beams, one, beams) is (beams[1] if batch else None)
    for beam in beams:
        beam.tokens += [1] * RESUMED_TOKENS
    assert shares.gives_way(beams, one, beams) is beams[1]


def test_a_paused_search_continues_if_nothing_else_can() -> None:
    shares, engine = FairShares(), scheduler()
    beams = [engine.submit(Request(prompt(0), limit=50, user="a", group="g", beams=BeamOptions(2))) for _ in range(2)]
    one = submit(engine, 1, "b")
    for sequence in (*beams, one):
        shares.enter(sequence, 0)
    shares.pause(beams[1])
    assert shares.gives_way(beams, one, beams) is beams[1]
    shares.resume()
    assert shares.gives_way(beams, one, beams) is None


def test_a_short_prompt_of_a_user_comes_before_a_long_one() -> None:
    engine = scheduler(running=1)
    long, short = submit(engine, 0, "a", length=40), submit(engine, 1, "a", length=4)
    assert [part.sequence for part in engine.schedule()] == [short] and long.status is Status.WAITING


def test_a_further_reply_to_a_prompt_is_not_due_later_than_the_prompt() -> None:
    engine = scheduler()
    first = submit(engine, 0, "a", length=40)
    reply = engine.branch(first, first.request)
    assert reply.due == first.due == 40


def test_nothing_branches_off_a_prompt_once_a_token_is_sampled() -> None:
    engine = scheduler()
    first = submit(engine, 0, "a")
    (part,) = engine.schedule()
    engine.advance(part, [1])
    with pytest.raises(ValueError, match="has sampled tokens"):
        engine.branch(first, first.request)
