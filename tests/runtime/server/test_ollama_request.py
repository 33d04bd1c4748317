"""Test the options, durations and times of Ollama's interface against their values, without a server."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.engine.sequence import Request
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.ollama import rendering
from mycli.runtime.server.ollama.keep_alive import keep_alive_seconds
from mycli.runtime.server.ollama.rendering import OllamaRendering
from mycli.runtime.server.ollama.request import OllamaGenerateRequest, OllamaRequest, read_format, read_options
from mycli.runtime.server.service import Prepared, Service

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


def test_a_format_is_any_text_json_or_a_schema() -> None:
    assert read_format(OllamaRequest(format="")) is None is read_format(OllamaRequest())
    formats = [read_format(OllamaRequest(format=form)) for form in ("json", {"type": "integer"})]
    assert [None if form is None else (form.type, form.place) for form in formats] == [
        ("json_object", "format"),
        ("json_schema", "format"),
    ]


def test_times_are_of_the_prompt_and_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(rendering, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    service = cast(Service, SimpleNamespace(name="pico", loaded=SimpleNamespace(tokenizer=None)))
    reply = Piece(parts=("Hi",), tokens=(5, 6, 7), end="length")

    def begun() -> tuple[Prepared, OllamaRendering]:
        now[0] = 100 * SECOND
        reader = cast(Any, SimpleNamespace(index=0))
        prepared = Prepared([(Request((1, 2)), [reader])], [(1, 2)])
        return prepared, OllamaRendering(service, prepared, OllamaGenerateRequest(), as_message=False)

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
