"""Test fair scheduling among users: by weight, independent of the number of requests, interactive before batch."""

from collections import Counter
from collections.abc import Callable

import pytest

from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.prefix_index import PrefixIndex
from mycli.runtime.engine.scheduler import Limits, Scheduler
from mycli.runtime.engine.sequence import Request, Sequence, Status


def scheduler(running: int = 4, chunk: int = 8, blocks: int = 200) -> Scheduler:
    return Scheduler(BlockPool(blocks, PrefixIndex(4)), Limits(100, chunk, running))


def prompt(seed: int, length: int = 8) -> tuple[int, ...]:
    return tuple(seed * 100 + at for at in range(length))


def submit(
    engine: Scheduler, seed: int, user: str, weight: float = 1.0, batch: bool = False, limit: int = 50, length: int = 8
) -> Sequence:
    return engine.submit(Request(prompt(seed, length), limit=limit, user=user, weight=weight, batch=batch))


def step(engine: Scheduler) -> Counter[str]:
    """Run a pass and return the number of tokens computed for each user."""
    tokens: Counter[str] = Counter()
    for part in engine.schedule():
        tokens[part.sequence.request.user] += part.count
        _, reason = engine.advance(part, [1] if part.completes and part.sequence.limit else [])
        if reason is not None:
            engine.finish(part.sequence)
    return tokens


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
