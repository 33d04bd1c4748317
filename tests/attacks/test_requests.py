"""Check that every route answers an invalid body with a reply or an error in its own format.

Fields of valid requests are replaced by arbitrary JSON, removed or added; the engine's replies are scripted, so that
only parsing and validation are under test.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.utils.dtypes import FLOATS
from tests.support.paths import PICO
from tests.support.served import ScriptedEngine, Served, serving

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["x"], "logit_bias": {"5": 1}, "max_tokens": 2}
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **SAMPLING,
        **{"model": "pico", "messages": TALK, "n": 1, "stream": False, "logprobs": True, "top_logprobs": 2},
        **{"tools": [TOOL], "tool_choice": "auto", "response_format": {"type": "text"}, "stream_options": None},
        **{"reasoning_effort": "low", "chat_template_kwargs": {}, "frequency_penalty": 0.5, "user": "me"},
    },
    "/v1/completions": {**SAMPLING, "model": "pico", "prompt": "Hello", "echo": True, "logprobs": 1, "n": 2},
    "/v1/responses": {"model": "pico", "input": "Hello", "max_output_tokens": 2, "instructions": "x", "stream": False},
    "/v1/responses/input_tokens": {"input": [{"role": "user", "content": "Hello"}], "instructions": "x"},
    "/v1/messages": {"model": "pico", "max_tokens": 2, "system": "x", "messages": TALK[1:], "stop_sequences": ["x"]},
    "/v1/messages/count_tokens": {"model": "pico", "messages": TALK[1:]},
    "/tokenize": {"prompt": "Hello", "add_special_tokens": True},
    "/detokenize": {"tokens": [5, 6]},
    "/apply-template": {"messages": TALK},
}
ODD = st.sampled_from(
    [None, True, 0, -1, 1 << 31, 1 << 70, 0.5, -1e308, "", "\0", "\ud800", "x" * 4000, [], [[]], {}, {"type": "text"}]
    + [{"type": "json_schema", "json_schema": {"schema": {"$ref": "file:///etc/passwd"}}}, [TOOL] * 3, TALK, "auto"]
    + [{"type": "regex", "regex": "(((a*)*)*"}, {"type": "lark", "lark": "start: start"}, [None], ["a", 1], [1.5], [-1]]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    folder = open_model_folder(PICO)
    loaded = LoadedModel.load(folder, EngineConfig(device="cpu", dtype=FLOATS["bf16"]).place(folder.config))
    with serving(loaded, ScriptedEngine(lambda request: [5, 6, 7])) as served:
        yield served


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value in a body."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inner:
        yield from places(entry, (*path, key))


def replaced(body: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Return a copy of `body` with another value at `path`; `...` removes it."""
    copy = json.loads(json.dumps(body))
    at = copy
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return copy


@st.composite
def bodies(draw: st.DrawFn, route: str) -> Any:
    body = BODIES[route]
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(body)) or [("x",)]))
        value = draw(st.just(...) | ODD | JSON)
        if value is ... and len(list(places(body))) < 2:
            continue
        body = replaced(body, path, value)
    return body


def check(server: Served, route: str, body: Any) -> None:
    answer = server.ask("POST", route, json.dumps(body).encode())
    assert answer.status == 200 or 400 <= answer.status < 500, (answer.status, answer.body[:300], body)
    if answer.status != 200:
        assert answer.json["error"]["message"], body
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert b"internal" not in answer.body, body


def run(server: Served, route: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies(route))
    def attack(body: Any) -> None:
        check(server, route, body)

    attack()
    assert not [line for line in server.log if "failed:" in line], "a bug that was caught on its way"


@pytest.mark.parametrize("route", BODIES)
def test_a_valid_body_is_answered(server: Served, route: str) -> None:
    assert server.ask("POST", route, BODIES[route]).status == 200


@pytest.mark.parametrize("route", BODIES)
def test_no_body_makes_a_route_fail(server: Served, route: str) -> None:
    run(server, route, 40)


@pytest.mark.slow
@pytest.mark.parametrize("route", BODIES)
def test_no_body_of_thousands_makes_a_route_fail(server: Served, route: str) -> None:
    run(server, route, 3000)
