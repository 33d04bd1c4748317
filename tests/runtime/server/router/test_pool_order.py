"""Test what a pool of models counts, and in which order it loads and unloads them, at the limits of each rule."""

import asyncio

import pytest

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.router.pool import RETRY_SECONDS
from tests.support.model_pools import Bench, model, run, settle


def test_a_failed_pinned_model_is_tried_again_after_the_time_of_a_refusal() -> None:
    async def test() -> None:
        bench = Bench(model("a", pinned=True), load=1.0)
        bench.failures["a"] = "no memory"
        bench.pool.start_pinned()
        await asyncio.sleep(1 + RETRY_SECONDS - 0.1)
        assert bench.slots["a"].state == "unloaded" and bench.slots["a"].shown_state == "failed"
        bench.failures.clear()
        await asyncio.sleep(1.2)
        assert bench.events == ["+a"] and bench.slots["a"].loads == 1

    run(test)


def test_a_failure_is_forgotten_at_the_end_of_its_time() -> None:
    async def test() -> None:
        bench = Bench(model("a"))
        bench.failures["a"] = "no memory"
        for seconds in (0.0, RETRY_SECONDS - 0.01):
            await asyncio.sleep(seconds)
            with pytest.raises(ApiError, match="a cannot be loaded: no memory") as caught:
                await bench.ask("a")
            assert (caught.value.status, caught.value.code) == (503, "model_load_failed")
        assert len(bench.log) == 1, "one attempt"
        bench.failures.clear()
        await asyncio.sleep(0.01)
        await bench.ask("a")
        assert bench.slots["a"].failure == ""

    run(test)


def test_the_time_until_a_model_is_unloaded_is_known() -> None:
    async def test() -> None:
        bench = Bench(model("a", idle=5.0), model("forever"), model("pinned", pinned=True, idle=5.0), room=9)
        slot = bench.slots["a"]
        async with bench.pool.use(slot):
            await asyncio.sleep(2)
            assert bench.pool.expiry(slot) == 5.0
        await asyncio.sleep(2)
        assert bench.pool.expiry(slot) == pytest.approx(3.0)
        for name in ("forever", "pinned"):
            await bench.ask(name)
            assert bench.pool.expiry(bench.slots[name]) is None
        await asyncio.sleep(10)
        assert bench.pool.expiry(slot) == 0.0
        states = {name: slot.state for name, slot in bench.slots.items()}
        assert states == {"a": "unloaded", "forever": "loaded", "pinned": "loaded"}

    run(test)


def test_loading_takes_its_time_and_the_idle_time_counts_from_its_end() -> None:
    async def test() -> None:
        bench = Bench(model("a", idle=1.0), load=3.0)
        await asyncio.sleep(2)
        asking = asyncio.create_task(bench.pool.load(bench.slots["a"]))
        await asyncio.sleep(3.5)
        slot = bench.slots["a"]
        assert asking.done() and slot.load_seconds == pytest.approx(3.0) and slot.state == "loaded"
        await asyncio.sleep(1)
        assert bench.events == ["+a", "-a"]

    run(test)


def test_models_of_other_places_take_no_room() -> None:
    async def test() -> None:
        bench = Bench(model("a", 2), model("gpu", 2, place="cuda:0", pinned=True), model("b", 2))
        bench.pool.rooms = {"cpu": 2, "cuda:0": 2}
        for name in ("gpu", "a", "b", "gpu"):
            await bench.ask(name)
        assert bench.events == ["+gpu", "+a", "-a", "+b"]

    run(test)


def test_a_pinned_model_leaves_exactly_its_room_for_others() -> None:
    async def test() -> None:
        bench = Bench(model("pinned", 2, pinned=True), model("a", 3), model("large", 4), room=5)
        for name in ("pinned", "a"):
            await bench.ask(name)
        with pytest.raises(ApiError, match="models may use 5 bytes, of which pinned models use 2 bytes"):
            await bench.ask("large")
        assert bench.events == ["+pinned", "+a"]

    run(test)


def test_an_idle_model_leaves_before_a_busy_one_that_was_used_earlier() -> None:
    async def test() -> None:
        bench, release = Bench(model("busy"), model("idle"), model("c")), asyncio.Event()
        working = asyncio.create_task(bench.ask("busy", release.wait))
        await settle()
        await bench.ask("idle")
        await bench.ask("c")
        assert bench.events == ["+busy", "+idle", "-idle", "+c"] and not bench.slots["busy"].leaving
        release.set()
        await working

    run(test)


def test_a_large_model_is_not_overtaken_by_a_small_one() -> None:
    async def test() -> None:
        bench, release = Bench(model("a"), model("large", 2), model("small")), asyncio.Event()
        working = asyncio.create_task(bench.ask("a", release.wait))
        await settle()
        others = [asyncio.create_task(bench.ask("large"))]
        await settle()
        others.append(asyncio.create_task(bench.ask("small")))
        await settle()
        assert bench.events == ["+a"], "there is room for the small one, but the large one came first"
        release.set()
        await asyncio.gather(working, *others)
        assert bench.events == ["+a", "-a", "+large", "-large", "+small"]

    run(test)


def test_memory_that_is_about_to_be_free_spares_other_models() -> None:
    async def test() -> None:
        bench = Bench(model("a"), model("b"), model("c"))
        for name in ("a", "b"):
            await bench.ask(name)
        stopping = asyncio.Event()
        stop = bench.processes["a"].stop

        async def slow_stop() -> None:
            await stopping.wait()
            await stop()
            await asyncio.sleep(0.01)  # the end of the process is seen before that of its unloading

        bench.processes["a"].stop = slow_stop  # type: ignore[method-assign]
        bench.pool.unload(bench.slots["a"])
        await settle()
        with pytest.raises(ApiError, match="a is in use"):
            await bench.pool.remove(bench.slots["a"])
        asking = asyncio.create_task(bench.ask("c"))
        await settle()
        assert bench.slots["b"].state == "loaded"
        stopping.set()
        await asking
        assert bench.events == ["+a", "+b", "-a", "+c"] and bench.slots["a"].evictions == 0
        assert bench.slots["a"].deaths == 0 and not bench.log

    run(test)


def test_names_lead_to_the_first_model_that_has_them() -> None:
    async def test() -> None:
        bench = Bench(model("a"), model("b"))
        first = bench.slots["a"]
        assert bench.pool.find(None) is bench.pool.find("a:latest") is first
        other = model("c")
        bench.pool.add(type(other)(("c", "a", "shared"), (), other.socket))
        assert bench.pool.find("a") is first and bench.pool.find("shared") is bench.slots["c"]
        await bench.pool.remove(bench.slots["c"])
        for name in ("shared", "c", ""):
            with pytest.raises(ApiError, match="served: a, b"):
                bench.pool.find(name)
        for slot in list(bench.slots.values()):
            await bench.pool.remove(slot)
        with pytest.raises(ApiError, match="not served here"):
            bench.pool.find(None)

    run(test)


def test_a_model_is_replaced_unless_it_is_loaded() -> None:
    async def test() -> None:
        bench = Bench(model("a"), model("b"))
        bench.failures["a"] = "no memory"
        for name in ("a", "b"):
            await bench.pool.load(bench.slots[name])
        bench.failures.clear()
        for name in ("a", "b"):
            bench.pool.add(model(name, 2))
        assert [slot.model.nbytes for slot in bench.slots.values()] == [2, 1]
        await bench.ask("a")  # at once: the failure was that of the other files
        assert bench.events == ["+b", "-b", "+a"]

    run(test)


@pytest.mark.parametrize("limit", [1, 2])
def test_as_many_requests_as_allowed_wait(limit: int) -> None:
    async def test() -> None:
        bench = Bench(model("a"), model("b"), load=1.0, waiting=limit)
        asking = [asyncio.create_task(bench.ask(name)) for name in ("a", "b", "a")[:limit]]
        await asyncio.sleep(0.1)
        assert bench.pool.waiting == limit and bench.pool.active == 0
        with pytest.raises(ApiError, match=f"{limit} requests are waiting, at most {limit} may") as caught:
            await bench.ask("b")
        assert caught.value.status == 429
        await asyncio.gather(*asking)

    run(test)


def test_only_a_model_that_cannot_be_loaded_is_shown_as_failed() -> None:
    async def test() -> None:
        bench = Bench(model("a"), model("damaged", problem="its files are damaged"))
        assert [slot.shown_state for slot in bench.slots.values()] == ["unloaded", "failed"]
        with pytest.raises(ApiError, match="damaged cannot be loaded: its files are damaged"):
            await bench.ask("damaged")
        await bench.ask("a")
        assert bench.slots["a"].shown_state == "loaded"

    run(test)
