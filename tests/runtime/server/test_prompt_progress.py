"""Test the events that say how much of a prompt is computed."""

import time

from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.memory.cache_shape import CacheShape
from tests.support.served import serving


def test_a_stream_says_how_much_of_its_prompt_is_computed(loaded: LoadedModel) -> None:
    """As llama.cpp's page and plugins show it, from `return_progress`."""
    engine = Engine(loaded.runner, CacheShape.paged(512, 2048, 16), loaded.vocabulary_size, running=8, chunk=64)
    with serving(loaded, engine) as served:
        question, began = "one two three " * 60, time.perf_counter()
        first, again = (served.chat(question, stream=True, max_tokens=2, return_progress=True) for _ in range(2))
        elapsed = (time.perf_counter() - began) * 1000
        assert "x-mycli-omitted" not in first.headers
        assert not any("prompt_progress" in event for event in served.chat(question, stream=True, max_tokens=2).events)
        body = {"prompt": ["three two one " * 40, "Leo"], "max_tokens": 2, "stream": True, "return_progress": True}
        texts = served.ask("POST", "/v1/completions", body).events
    shown = [event["prompt_progress"] for event in first.events if "prompt_progress" in event]
    total = shown[0]["total"]
    assert total > 150 and [entry["cache"] for entry in shown] == [0] * len(shown)
    assert [entry["processed"] for entry in shown] == [*range(64, total, 64), total]
    times = [entry["time_ms"] for entry in shown]
    assert all(type(passed) is int for passed in times) and sorted(times) == times
    assert times[0] >= 0 and times[-1] <= elapsed, "milliseconds since the request came"
    contents = [event["choices"][0]["delta"].get("content") for event in first.events]
    assert contents[: len(shown) + 1] == ["", *[None] * len(shown)]
    (cached,) = [event["prompt_progress"] for event in again.events if "prompt_progress" in event]
    assert cached["cache"] == total - 1 and cached["processed"] == cached["total"] == total
    last = {e["choices"][0]["index"]: e["prompt_progress"] for e in texts if "prompt_progress" in e}
    assert last[0]["processed"] == last[0]["total"] > 64 > last[1]["processed"] == last[1]["total"] > 0
