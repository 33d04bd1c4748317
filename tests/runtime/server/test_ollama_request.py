"""Test the options, durations and times of Ollama's interface against their values, without a server."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.engine.sequence import Request
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.sampling.params import MAX_TEMPERATURE
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.ollama import rendering
from mycli.runtime.server.ollama.keep_alive import keep_alive_seconds
from mycli.runtime.server.ollama.rendering import OllamaRendering
from mycli.runtime.server.ollama.request import (
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaRequest,
    ollama_spec,
    read_format,
    read_options,
    refuse_fields,
    shown_name,
)
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall

SECOND = 1_000_000_000  # in nanoseconds


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0),
        (10, 10.0),
        (-1, None),
        (2.5, 2.5),
        ("0", 0.0),
        ("300", 300.0),
        ("-1", None),
        (" 5m ", 300.0),
        ("1h1m1.5s", 3661.5),
        ("250ms", 0.25),
        ("-5m", None),
    ],
)
def test_a_model_stays_loaded_for_a_duration_or_for_ever(value: Any, seconds: float | None) -> None:
    assert keep_alive_seconds(value) == seconds


@pytest.mark.parametrize("value", [True, None, [5], "", "m5", "5 m", "1d"])
def test_what_is_no_duration_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="must be a number of seconds"):
        keep_alive_seconds(value)


def test_a_request_may_say_how_long_or_leave_it_open() -> None:
    assert [OllamaRequest(keep_alive=value).keep_alive for value in (None, "5m", 0)] == [None, "5m", 0]
    with pytest.raises(ValidationError, match="must be a number of seconds"):
        OllamaRequest(keep_alive="1d")


def options(**values: Any) -> Any:
    return read_options(OllamaRequest(options=values), 512)


@pytest.mark.parametrize(("predict", "limit"), [(-2, None), (-1, None), (0, None), (1, 1), (9, 9)])
def test_a_limit_is_positive_or_none(predict: int, limit: int | None) -> None:
    assert options(num_predict=predict)[1] == limit


def test_options_are_those_of_the_other_interfaces() -> None:
    sampling, limit, omitted = options(temperature=5.0, repeat_penalty=1.25, top_k=3, seed=-1, stop=["a"], num_gpu=1)
    assert (sampling.temperature, sampling.repetition_penalty, sampling.top_k, sampling.seed) == (5.0, 1.25, 3, -1)
    assert (sampling.stop, limit, omitted) == (["a"], None, []) and options(stop=[])[0].stop is None
    assert read_options(OllamaRequest(), 512)[1:] == (None, [])


# The smallest and the largest value of each.
RANGES: dict[str, tuple[float, float]] = {
    "num_predict": (-2, 1 << 31),
    "num_ctx": (0, 1 << 31),
    "temperature": (0, MAX_TEMPERATURE),
    "top_k": (-1, 1 << 31),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repeat_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (-(1 << 63), (1 << 63) - 1),
}


@pytest.mark.parametrize("name", RANGES)
def test_options_end_at_their_limits(name: str) -> None:
    low, high = RANGES[name]
    for value in (low, high):
        assert getattr(OllamaOptions.model_validate({name: value}), name) == value
    step = 1 if isinstance(low, int) and abs(high) > 100 else 0.001
    for value in (low - step, high + step):
        with pytest.raises(ApiError) as error:
            options(**{name: value})
        assert error.value.param == f"options.{name}"


@pytest.mark.parametrize(
    ("values", "omitted"),
    [
        ({"num_ctx": 512}, []),
        ({"num_ctx": 513}, ["option num_ctx above 512"]),
        ({"num_thread": 4, "mirostat_tau": 1}, []),
        ({"mirostat": 0, "tfs_z": 1.0, "typical_p": 1}, []),
        ({"wished": 1, "a\nb": 1}, ["option wished", "option unprintable"]),
    ],
)
def test_options_without_an_effect_are_named_unless_they_change_nothing(
    values: dict[str, Any], omitted: list[str]
) -> None:
    assert options(**values)[2] == omitted


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"mirostat": 1}, "options.mirostat"),
        ({"tfs_z": 2}, "options.tfs_z"),
        ({"typical_p": 0.5}, "options.typical_p"),
        ({"typical_p": 2}, "options.typical_p"),
        ({"top_k": "a"}, "options.top_k"),
    ],
)
def test_an_option_that_would_change_the_reply_is_refused(values: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        options(**values)
    assert error.value.param == param


def test_alternatives_come_with_logprobs_alone() -> None:
    assert OllamaRequest(top_logprobs=2).top is None and OllamaRequest(logprobs=True).top == 0
    assert OllamaRequest(logprobs=True, top_logprobs=2).top == 2


@pytest.mark.parametrize(
    ("think", "arguments"),
    [
        (None, {}),
        ("", {}),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
    ],
)
def test_thinking_is_switched_or_has_an_effort(think: Any, arguments: dict[str, Any]) -> None:
    body = OllamaRequest(think=think)
    assert ollama_spec(body, [], read_options(body, 512)).arguments == arguments


def test_a_conversation_as_token_ids_ends_at_a_mebitoken_and_is_refused() -> None:
    with pytest.raises(ApiError, match="context: is not supported; send the conversation to /api/chat"):
        refuse_fields(OllamaGenerateRequest(context=[1] * (1 << 20)))
    with pytest.raises(ValidationError, match="at most 1048576 items"):
        OllamaGenerateRequest(context=[1] * ((1 << 20) + 1))


def test_the_name_in_a_reply_is_the_one_of_the_request() -> None:
    server = cast(Service, SimpleNamespace(name="pico"))
    assert [shown_name(OllamaRequest(model=name), server) for name in ("alias", None)] == ["alias", "pico"]


def test_a_format_is_any_text_json_or_a_schema() -> None:
    assert read_format(OllamaRequest(format="")) is None is read_format(OllamaRequest())
    formats = [read_format(OllamaRequest(format=form)) for form in ("json", {"type": "integer"})]
    assert [None if form is None else (form.type, form.place) for form in formats] == [
        ("json_object", "format"),
        ("json_schema", "format"),
    ]


class Letters:
    """Has the token 97 for "a" and so on."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def begun_rendering(body: OllamaRequest, as_message: bool = True) -> tuple[Prepared, OllamaRendering]:
    reader = cast(Any, SimpleNamespace(index=0))
    prepared = Prepared([(Request((1, 2)), [reader])], [(1, 2)])
    service = cast(Service, SimpleNamespace(name="pico", loaded=SimpleNamespace(tokenizer=Letters())))
    return prepared, OllamaRendering(service, prepared, body, as_message)


def shown(body: OllamaRequest, *pieces: Piece) -> list[dict[str, Any]]:
    """Return the lines of a stream before the last one, without name and time."""
    _, rendered = begun_rendering(body)
    written = [json.loads(line) for piece in pieces for line in rendered.add(piece)]
    return [{name: line[name] for name in line if name not in ("model", "created_at")} for line in written]


def line(content: str = "", **fields: Any) -> dict[str, Any]:
    logprobs = {"logprobs": fields.pop("logprobs")} if "logprobs" in fields else {}
    return {"message": {"role": "assistant", "content": content, **fields}, "done": False, **logprobs}


THOUGHT, NOTHING = Piece(reasoning="Hm."), Piece(tokens=(5,))


@pytest.mark.parametrize("think", [None, True, False, "low"])
def test_reasoning_is_shown_unless_it_is_switched_off(think: Any) -> None:
    body = OllamaRequest(think=think)
    expected = [line("Hi")] if think is False else [line(thinking="Hm."), line("Hi")]
    assert shown(body, THOUGHT, NOTHING, Piece(parts=("Hi",))) == expected
    _, rendered = begun_rendering(body)
    message = rendered.whole([Piece(parts=("Hi",), reasoning="Hm.", end="stop")])["message"]
    assert message == {"role": "assistant", "content": "Hi", **({} if think is False else {"thinking": "Hm."})}


def test_tokens_without_text_have_their_log_probabilities() -> None:
    logprobs = (TokenLogprob(ord("a"), -1.0, ()),)
    written = {"token": "a", "bytes": [ord("a")], "logprob": -1.0, "top_logprobs": []}
    (only,) = shown(OllamaRequest(), Piece(logprobs=logprobs))
    assert only["message"] == line()["message"] and only["logprobs"][0] == {**only["logprobs"][0], **written}
    _, rendered = begun_rendering(OllamaRequest())
    assert json.loads(b"".join(rendered.keep_alive())).keys() == {"model", "created_at", "message", "done"}


def test_a_failure_within_a_stream_is_a_line() -> None:
    _, rendered = begun_rendering(OllamaRequest())
    assert list(rendered.failed(ApiError(500, "The engine failed.", "engine_error"))) == [
        b'{"error":"The engine failed."}\n'
    ]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"at": 1}', {"at": 1}),
        ("", {}),
        ('{"at"', {"INVALID_JSON": '{"at"'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
    ],
)
def test_a_call_is_shown_when_it_is_complete(written: str, arguments: dict[str, Any]) -> None:
    parts = [Piece(parts=(ToolCall("look", written[:3]),)), Piece(parts=(ToolCall("", written[3:]),))]
    ends = [Piece(end="stop"), Piece(parts=("Hi",), end="stop")]
    for end in ends:
        (last,) = shown(OllamaRequest(), *parts, end)
        (call,) = last["message"].pop("tool_calls")
        assert last == line(end.content)
        assert call["function"] == {"index": 0, "name": "look", "arguments": arguments}
        _, rendered = begun_rendering(OllamaRequest())
        whole = Piece(parts=(ToolCall("look", written), *end.parts), end="stop")
        (same,) = rendered.whole([whole])["message"]["tool_calls"]
        assert same["function"] == call["function"]
    assert shown(OllamaRequest(), Piece(parts=("Hi",)), Piece(end="stop")) == [line("Hi")]


def test_times_are_of_the_prompt_and_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(rendering, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    reply = Piece(parts=("Hi",), tokens=(5, 6, 7), end="length")

    def begun() -> tuple[Prepared, OllamaRendering]:
        now[0] = 100 * SECOND
        return begun_rendering(OllamaGenerateRequest(), as_message=False)

    def figures(fields: Any) -> tuple[int, ...]:
        durations = tuple(fields[f"{name}_duration"] / SECOND for name in ("total", "load", "prompt_eval", "eval"))
        return *durations, fields["prompt_eval_count"], fields["eval_count"]

    prepared, whole = begun()
    prepared.figures.ttft, now[0] = 2.0, 110 * SECOND
    fields = whole.whole([reply])
    assert figures(fields) == (10, 0, 2, 8, 2, 3)
    assert (fields["response"], fields["done_reason"], fields["done"], fields["model"]) == (
        "Hi",
        "length",
        True,
        "pico",
    )

    _, streamed = begun()
    now[0] = 103 * SECOND
    (line,) = streamed.add(reply)
    assert json.loads(line)["done"] is False
    now[0] = 110 * SECOND
    assert figures(json.loads(b"".join(streamed.finish()))) == (10, 0, 3, 7, 2, 3)

    _, empty = begun()
    now[0] = 104 * SECOND
    (last,) = empty.finish()
    assert figures(json.loads(last)) == (4, 0, 4, 0, 2, 0) and json.loads(last)["done_reason"] == "stop"
