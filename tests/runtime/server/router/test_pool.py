"""Test which models are loaded: within the memory limit, LRU eviction, no endless waiting."""

import asyncio

import pytest

from mycli.runtime.server.http.api_error import ApiError
from tests.support.model_pools import Bench, model, run, settle


def test_the_least_recently_used_model_leaves() -> None:
    async def test() -> None:
        bench = Bench(model("a"), model("b"), model("c"))
        for name in ("a", "b", "a", "c", "a", "b"):
            await bench.ask(name)
        assert bench.events == ["+a", "+b", "-b", "+c", "-c", "+b"]
        assert [slot.evictions for slot in bench.slots.values()] == [0, 1, 1]

    run(test)


def test_a_pinned_model_stays_and_a_large_one_takes_the_room_of_several() -> None:
    async def test() -> None:
        bench = Bench(model("pinned", pinned=True), model("a"), model("b"), model("large", 2), room=3)
        bench.pool.start_pinned()
        for name in ("a", "b", "large", "pinned", "a"):
            await bench.ask(name)
        assert sorted(bench.events[:3]) == ["+a", "+b", "+pinned"]
        assert sorted(bench.events[3:5]) == ["-a", "-b"] and bench.events[5:] == ["+large", "-large", "+a"]
        bench.slots["pinned"].idle = 0.0
        await bench.ask("pinned")
        assert bench.slots["pinned"].state == "loaded"

    run(test)


@pytest.mark.parametrize(
    ("nbytes", "pinned", "words"),
    [(3, False, "it needs 3 bytes; models may use 2 bytes"), (2, True, "pinned models use 1 byte")],
)
def test_a_model_that_can_never_fit_is_refused(nbytes: int, pinned: bool, words: str) -> None:
    async def test() -> None:
        bench = Bench(model("large", nbytes), model("small", pinned=pinned))
        with pytest.raises(ApiError, match=words) as error:
            await bench.ask("large")
        assert (error.value.status, error.value.code) == (503, "model_too_large")
        assert bench.events == []

    run(test)


def test_requests_wait_while_a_model_loads_and_a_busy_model_finishes_first() -> None:
    async def test() -> None:
        bench, release = Bench(model("a"), model("b"), room=1), asyncio.Event()
        busy = [asyncio.create_task(bench.ask("a", release.wait)) for _ in range(3)]
        await settle()
        other = asyncio.create_task(bench.ask("b"))
        await settle()
        late = asyncio.create_task(bench.ask("a"))  # after b: a takes no more requests
        await settle()
        assert bench.events == ["+a"] and bench.slots["a"].active == 3 and bench.pool.waiting == 2
        release.set()
        await asyncio.gather(*busy, other, late)
        assert bench.events == ["+a", "-a", "+b", "-b", "+a"]

    run(test)


def test_a_busy_model_works_at_least_as_long_as_it_loaded() -> None:
    async def test() -> None:
        bench = Bench(model("a"), model("b"), room=1, load=0.2)
        served = 0

        async def client() -> None:
            nonlocal served
            while bench.slots["b"].loads == 0:
                await bench.ask("a", lambda: asyncio.sleep(0.01))
                served += 1

        clients = [asyncio.create_task(client()) for _ in range(2)]
        await asyncio.sleep(0.25)
        await bench.ask("b")
        assert bench.events[:3] == ["+a", "-a", "+b"] and served > 10
        await asyncio.gather(*clients)

    run(test)


async def _b_waits_for_a(bench: Bench, release: asyncio.Event) -> tuple[asyncio.Task[None], asyncio.Task[None]]:
    busy = asyncio.create_task(bench.ask("a", release.wait))
    await settle()
    other = asyncio.create_task(bench.ask("b"))
    await settle()
    return busy, other


def test_a_model_whose_requester_has_left_goes_on() -> None:
    async def test() -> None:
        bench, release = Bench(model("a"), model("b"), room=1), asyncio.Event()
        busy, other = await _b_waits_for_a(bench, release)
        late = asyncio.create_task(bench.ask("a"))
        await settle()
        assert bench.slots["a"].leaving and not late.done()
        other.cancel()
        await late
        assert bench.events == ["+a"] and bench.pool.waiting == 0
        release.set()
        await busy
        assert bench.slots["a"].active == 0

    run(test)


def test_a_failed_load_is_told_to_all_and_not_repeated_at_once() -> None:
    async def test() -> None:
        bench = Bench(model("a"), model("b"), load=0.01)
        bench.failures["a"] = "config.json: no such file"
        errors = await asyncio.gather(*(bench.ask("a") for _ in range(3)), bench.ask("b"), return_exceptions=True)
        assert [str(error) for error in errors[:3]] == ["a cannot be loaded: config.json: no such file"] * 3
        assert errors[3] is None and bench.slots["a"].shown_state == "failed"
        bench.failures.clear()
        with pytest.raises(ApiError, match="no such file"):
            await bench.ask("a")
        bench.slots["a"].retry_at = 0.0
        await bench.ask("a")
        assert bench.slots["a"].shown_state == "loaded"

    run(test)


def test_a_dead_process_is_started_again() -> None:
    async def test() -> None:
        bench = Bench(model("a"), model("pinned", pinned=True))
        bench.pool.start_pinned()
        await bench.ask("a")
        for name in ("a", "pinned"):
            bench.processes[name].over.set()
        await settle()
        assert bench.slots["a"].deaths == 1 and bench.slots["a"].shown_state == "failed"
        await asyncio.sleep(0.01)
        assert bench.slots["pinned"].loads == 2, "a pinned model is loaded again without a request"
        await bench.ask("a")
        assert bench.slots["a"].loads == 2 and any("SIGKILL" in line for line in bench.log)

    run(test)


def test_an_idle_model_is_unloaded() -> None:
    async def test() -> None:
        bench = Bench(model("a", idle=0.05), model("b"))
        await bench.ask("b")
        await bench.ask("a", lambda: asyncio.sleep(0.1))
        assert "-a" not in bench.events
        await asyncio.sleep(0.02)
        await bench.ask("a")
        await asyncio.sleep(0.2)
        assert bench.events == ["+b", "+a", "-a"]
        bench.pool.unload(bench.slots["b"])
        await settle()
        assert bench.events[-1] == "-b" and bench.slots["b"].idle is None

    run(test)


def test_unloading_a_model_that_is_not_loaded_changes_nothing() -> None:
    async def test() -> None:
        bench = Bench(model("a"))
        bench.pool.unload(bench.slots["a"])
        await bench.ask("a")
        await settle()
        assert bench.events == ["+a"]
        bench.pool.unload(bench.slots["a"])
        await settle()
        assert bench.events == ["+a", "-a"]

    run(test)


def test_the_queue_is_bounded_in_length_and_time() -> None:
    async def test() -> None:
        bench = Bench(model("a"), load=60, waiting=2, queue_seconds=0.05)
        tasks = [asyncio.create_task(bench.ask("a")) for _ in range(3)]
        codes = [error.code for error in await asyncio.gather(*tasks, return_exceptions=True)]  # type: ignore[union-attr]  # all fail
        assert sorted(codes) == ["queue_full", "queue_timeout", "queue_timeout"]
        await bench.pool.close()
        with pytest.raises(ApiError, match="shutting down"):
            await bench.ask("a")

    run(test)


def test_many_clients_and_models_lose_no_request() -> None:
    async def test() -> None:
        bench = Bench(*(model(f"m{index}") for index in range(5)), load=0.001)
        done = await asyncio.gather(
            *(bench.ask(f"m{index * 7 % 5}", lambda: asyncio.sleep(0.001)) for index in range(250))
        )
        assert len(done) == 250 and bench.pool.active == 0 and bench.pool.waiting == 0
        await bench.pool.close()
        assert all(process.over.is_set() for process in bench.processes.values())

    run(test)


def test_models_are_added_and_removed() -> None:
    async def test() -> None:
        bench = Bench(model("a"), model("b"))
        await bench.ask("a")
        bench.pool.add(model("c"))
        await bench.ask("c")
        await bench.pool.remove(bench.slots["a"])
        assert bench.events == ["+a", "+c", "-a"] and set(bench.slots) == {"b", "c"}
        async with bench.pool.use(bench.slots["c"]):
            with pytest.raises(ApiError, match="c is in use"):
                await bench.pool.remove(bench.slots["c"])
        with pytest.raises(ApiError, match="not served here"):
            bench.pool.find("a")

    run(test)


@pytest.mark.parametrize("failure", ["", "its files are damaged"], ids=["loaded", "failed"])
def test_a_client_that_leaves_in_the_moment_of_its_admission_is_not_counted(failure: str) -> None:
    async def test() -> None:
        bench = Bench(model("a"), load=0.01)
        if failure:
            bench.failures["a"] = failure
        gone = asyncio.create_task(bench.ask("a"))
        await asyncio.sleep(0.001)
        bench.slots["a"].waiters[0].add_done_callback(lambda _: gone.cancel())
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert bench.slots["a"].active == 0 and bench.pool.waiting == 0

    run(test)


def test_a_model_that_requests_wait_for_is_not_removed() -> None:
    async def test() -> None:
        bench, release = Bench(model("a"), model("b"), room=1), asyncio.Event()
        busy, other = await _b_waits_for_a(bench, release)
        with pytest.raises(ApiError, match="b is in use"):
            await bench.pool.remove(bench.slots["b"])
        release.set()
        await asyncio.gather(busy, other)
        assert bench.events == ["+a", "-a", "+b"]

    run(test)


def test_a_place_without_a_limit_has_no_room() -> None:
    async def test() -> None:
        bench = Bench(model("gpu", place="cuda:0"))
        with pytest.raises(ApiError, match="it needs 1 byte; models may use 0 bytes"):
            await bench.ask("gpu")

    run(test)
