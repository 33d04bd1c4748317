"""Test what several interfaces have, each in its own form: silent streams, errors, logprobs, lists of models."""

import json
import threading
import time
from typing import Any

import anthropic
import openai
import pytest

from mycli.runtime.server.http.settings import ServerLimits, ServerSettings
from tests.runtime.server.conftest import Scripted
from tests.support.served import Served


def ask(served: Served, **fields: Any) -> Any:
    return served.ask("POST", "/v1/responses", {"model": "pico", "input": "Go", **fields})


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_silent_stream_sends_events_of_its_interface(scripted: Scripted, route: str) -> None:
    """The events are needed because clients that monitor a stream ignore comments."""
    settings = ServerSettings(("pico",), limits=ServerLimits(ping_seconds=0.05))
    talk = {"messages": [{"role": "user", "content": "Go"}], "prompt": "Go", "input": "Go"}
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(route, "messages")
    body = {"model": "pico", field: talk[field], "stream": True}
    body |= {"max_output_tokens" if route == "/v1/responses" else "max_tokens": 9}
    with scripted("yes", settings=settings) as served:
        engine = served.service.worker.engine
        engine.held.clear()

        def release() -> None:
            while not served.service.worker.underway:
                time.sleep(0.01)
            time.sleep(0.4)
            engine.held.set()

        threading.Thread(target=release).start()
        events = served.ask("POST", route, body).events
        kinds = [
            event.get("type") or event["choices"][0].get("delta", event["choices"][0].get("text")) for event in events
        ]
        silent = {"/v1/messages": "ping", "/v1/responses": "response.in_progress", "/v1/completions": ""}.get(route, {})
        assert kinds.count(silent) >= 3


@pytest.mark.parametrize(("length", "status"), [(512, 200), (513, 400)])
def test_a_prompt_may_fill_the_context(served: Served, length: int, status: int) -> None:
    """The one token of its reply needs no place in the cache."""
    answer = served.ask("POST", "/v1/completions", {"model": "pico", "prompt": [5] * length, "max_tokens": 1})
    assert answer.status == status, answer.body


def test_context_errors_are_in_the_words_that_clients_look_for(served: Served) -> None:
    long = [{"role": "user", "content": "word " * 1000}]
    answer = served.ask("POST", "/v1/chat/completions", {"messages": long})
    assert answer.error["message"].startswith(
        "This model's maximum context length is 512 tokens. However, your messages"
    )
    room = served.ask(
        "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 600}
    )
    assert "However, you requested 6" in room.error["message"] and "600 in the completion" in room.error["message"]
    assert ask(served, input="word " * 1000).error["param"] == "input"
    claude = served.ask("POST", "/v1/messages", {"messages": long, "max_tokens": 5})
    words = claude.error["message"].split()
    assert claude.error["message"].startswith("prompt is too long: ") and words[6] == ">" and words[7] == "512"
    assert claude.json["request_id"] == claude.headers["request-id"] == claude.headers["x-request-id"]


def test_a_reply_of_anthropics_ends_at_the_end_of_the_context(scripted: Scripted) -> None:
    body = {"model": "pico", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100_000}
    with scripted("on " * 60, context=40) as served:
        answer = served.ask("POST", "/v1/messages", body).json
        assert answer["stop_reason"] == "model_context_window_exceeded"
        assert answer["usage"]["output_tokens"] + answer["usage"]["input_tokens"] == 41
        small = served.ask("POST", "/v1/messages", {**body, "max_tokens": 3}).json
        assert small["stop_reason"] == "max_tokens"


def test_chats_have_as_many_alternatives_as_they_ask_for(served: Served) -> None:
    for asked, count in (({}, 0), ({"top_logprobs": 2}, 2)):
        (choice,) = served.chat("Hi", max_tokens=2, logprobs=True, **asked).json["choices"]
        assert {len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]} == {count}


def test_responses_have_logprobs_and_biases(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        response = client.responses.create(
            model="pico",
            input="What is the capital of Japan?",
            temperature=0,
            top_logprobs=2,
            include=["message.output_text.logprobs"],
            max_output_tokens=20,
        )
        (item,) = response.output
        assert item.type == "message" and item.content[0].type == "output_text"
        logprobs = item.content[0].logprobs or []
        assert "".join(entry.token for entry in logprobs) == response.output_text
        assert {len(entry.top_logprobs) for entry in logprobs} == {2} and response.service_tier == "default"
        stream = client.responses.create(
            model="pico", input="What is the capital of Japan?", temperature=0, top_logprobs=2, stream=True
        )
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
        assert "".join(entry.token for delta in deltas for entry in delta.logprobs).startswith(response.output_text[:5])
    (the,) = served.service.loaded.tokenizer.encode("The", add_special=False)
    banned = ask(served, input="What is the capital of Japan?", temperature=0, logit_bias={str(the): -100})
    assert not banned.json["output"][0]["content"][0]["text"].startswith("The")


def test_the_penalty_of_repetition_has_two_names(served: Served) -> None:
    def ask(route: str, **penalties: float) -> Any:
        body = {"prompt": "The cat sat", "temperature": 0, "max_tokens": 24, "n_predict": 24, **penalties}
        if route == "/v1/chat/completions":
            return served.chat(max_tokens=24, **penalties).json["choices"][0]["message"]["content"]
        answer = served.ask("POST", route, body).json
        return answer["content"] if route == "/completion" else answer["choices"][0]["text"]

    for route in ("/v1/chat/completions", "/v1/completions", "/completion"):
        penalized = ask(route, repetition_penalty=10)
        assert ask(route, repeat_penalty=10) == penalized != ask(route, repeat_penalty=1)
        assert ask(route, repeat_penalty=3, repetition_penalty=10) == penalized
    off = {"samplers": ["temperature"], "repeat_penalty": 10}
    assert ask("/completion", **off) == ask("/completion")  # type: ignore[arg-type]  # samplers is a list


def test_functions_in_the_older_form(served: Served) -> None:
    functions = [
        {
            "name": "f",
            "parameters": {"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False},
        }
    ]
    talk = [{"role": "user", "content": "Go"}]
    body = {"messages": talk, "functions": functions, "function_call": {"name": "f"}}
    answer = served.ask("POST", "/v1/chat/completions", body).json["choices"][0]
    events = served.ask("POST", "/v1/chat/completions", {**body, "stream": True}).events
    deltas = [event["choices"][0]["delta"].get("function_call", {}) for event in events]
    for field, value in answer["message"]["function_call"].items():
        assert "".join(delta.get(field, "") for delta in deltas) == value
    assert answer["finish_reason"] == "function_call" and answer["message"]["function_call"]["name"] == "f"
    talk += [{"role": "assistant", "content": None, "function_call": answer["message"]["function_call"]}]
    talk += [{"role": "function", "name": "f", "content": "2"}]
    assert served.ask("POST", "/v1/chat/completions", {"messages": talk, "max_tokens": 3}).status == 200


def test_a_required_call_that_the_limit_cuts_is_not_content(served: Served) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "integer"}}}}}
    talk = [{"role": "user", "content": "Go"}]
    for limit in range(1, 12):
        body = {"messages": talk, "tools": [tool], "tool_choice": "required", "max_tokens": limit}
        choice = served.ask("POST", "/v1/chat/completions", body).json["choices"][0]
        assert not choice["message"]["content"] and choice["finish_reason"] in ("length", "tool_calls"), choice


def test_models_in_both_forms_and_the_version(served: Served) -> None:
    with anthropic.Anthropic(base_url=served.url, api_key="any") as client:
        models = client.models.list().data
        assert [model.id for model in models] == ["pico", "alias/of-it"] and models[0].max_input_tokens == 512
        assert client.models.retrieve("pico").display_name == "pico"
    assert served.ask("GET", "/v1/models").json["data"][0]["object"] == "model"
    assert served.ask("GET", "/version").json["version"]
    missing = served.ask(
        "POST", "/v1/chat/completions", {"model": "gpt-9", "messages": [{"role": "user", "content": "x"}]}
    )
    assert missing.status == 404 and "served: pico, alias/of-it" in missing.error["message"]


def test_a_line_of_the_log_has_counts_and_times(scripted: Scripted) -> None:
    words, settings = "one two three four five six seven eight", ServerSettings(("pico",), log_format="json")
    with scripted(words, settings=settings, pause=0.01) as served:
        served.chat("secret words")
        served.chat("x", max_tokens=1, stop_regex="a")
        served.idle()
        assert served.logged(2)
        good, bad = (json.loads(line) for line in served.log)
        assert good["status"] == 200 and bad["status"] == 400 and good["model"] == "pico"
        assert (
            good["route"] == "/v1/chat/completions" and good["client"] == "127.0.0.1" and "secret" not in served.log[0]
        )
        assert good["prompt_tokens"] > 2 and good["completion_tokens"] > 2 and good["cached_tokens"] == 0
        assert good["tpot"] >= 0.01 and good["time"][:2] == "20" and good["time"][10] == "T"
        assert good["ttft"] + good["tpot"] * (good["completion_tokens"] - 1) < good["seconds"] + 0.01
        assert bad["prompt_tokens"] is None and bad["ttft"] is None
