"""Test wrong, hostile and foreign requests: each is refused with an error that names the cause."""

import json
from typing import Any

import pytest

from mycli.runtime.server.application import ROUTES
from mycli.runtime.server.ollama.manage import MANAGING
from mycli.runtime.server.service import Service
from tests.runtime.server.conftest import Scripted
from tests.support.served import Served

CHAT = "/v1/chat/completions"


BODIES: dict[str, bytes] = {
    "empty": b"",
    "blank": b"  ",
    "broken": b'{"model": "pico"',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep-object": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "long-integer": b'{"model": "pico", "n": ' + b"9" * 5000 + b"}",
    "not-utf8": b'{"model": "\xff"}',
    "bom": b'\xef\xbb\xbf{"model": "pico"}',
    "twice": b'{"model": "pico", "model": "pico"}',
    "nan": b'{"model": "pico", "temperature": NaN}',
    "infinity": b'{"model": "pico", "temperature": -Infinity}',
    "huge-float": b'{"model": "pico", "temperature": 1e999}',
    "nan-inside": b'{"model": "pico", "metadata": {"a": NaN}}',
    "list": b"[]",
    "null": b"null",
    "string": b'"x"',
}
PATHS = [path for method, path, _ in ROUTES if method == "POST" and (method, path) not in MANAGING]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BODIES)
def test_g11_g12_what_is_no_json_object_is_refused(served: Served, path: str, name: str) -> None:
    answer = served.ask("POST", path, BODIES[name])
    assert answer.status == 400, answer.body[:300]
    if path.startswith("/v1/messages"):
        assert answer.json["type"] == "error"
    assert len(answer.body) < 1000
    if path.startswith("/api/"):  # Ollama's errors are strings
        assert answer.json["error"]
    else:
        assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_half_a_surrogate_pair_is_sent_back_as_it_came(served: Served, stream: bool) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"title": "\udfff"}}
    body = {"input": "Hi", "max_output_tokens": 1, "metadata": {"a": "\ud800"}, "tools": [tool], "tool_choice": "none"}
    answer = served.ask("POST", "/v1/responses", {**body, "stream": stream})
    assert answer.status == 200, answer.body
    reply = answer.events[-1]["response"] if stream else answer.json
    assert reply["metadata"] == body["metadata"] and reply["tools"][0]["parameters"] == tool["parameters"]


def good(**fields: Any) -> dict[str, Any]:
    return {"model": "pico", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "pico", "prompt": "Hi", "max_tokens": 1, **fields}


SCHEMA_OF = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "bool-as-int": (CHAT, good(n=True), "n"),
    "bool-as-number": (CHAT, good(temperature=True), "temperature"),
    "string-as-number": (CHAT, good(temperature="0.5"), "temperature"),
    "float-as-int": (CHAT, good(max_tokens=1.5), "max_tokens"),
    "n-0": (CHAT, good(n=0), "n"),
    "n-large": (CHAT, good(n=10**9), "n"),
    "top-logprobs": (CHAT, good(logprobs=True, top_logprobs=21), "top_logprobs"),
    "top-logprobs-alone": (CHAT, good(top_logprobs=2), "top_logprobs"),
    "logprobs": ("/v1/completions", text(logprobs=10**6), "logprobs"),
    "best-of": ("/v1/completions", text(best_of=5), "best_of"),
    "suffix": ("/v1/completions", text(suffix="x"), "suffix"),
    "max-tokens-negative": (CHAT, good(max_tokens=-2), "max_tokens"),
    "max-tokens-0": ("/v1/completions", text(max_tokens=0), "max_tokens"),
    "temperature-3": (CHAT, good(temperature=3), "temperature"),
    "top-p-2": (CHAT, good(top_p=2), "top_p"),
    "seed-large": (CHAT, good(seed=1 << 64), "seed"),
    "stop-empty": (CHAT, good(stop=""), "stop"),
    "stop-many": (CHAT, good(stop=["a"] * 65), ""),
    "stop-long": (CHAT, good(stop="a" * 300), "stop"),
    "bias-infinite-key": (CHAT, good(logit_bias={"x": 1}), "logit_bias"),
    "bias-large": (CHAT, good(logit_bias={"1": 1000}), "logit_bias"),
    "bias-unknown": (CHAT, good(logit_bias={"4097": 1}), "logit_bias"),
    "bias-many": (CHAT, good(logit_bias={str(i): 1 for i in range(2000)}), "logit_bias"),
    "no-messages": (CHAT, {"model": "pico"}, "messages"),
    "empty-messages": (CHAT, good(messages=[]), "messages"),
    "nameless-model": (CHAT, good(model=""), "model"),
    "grammar": (CHAT, good(grammar='root ::= ("a"'), "grammar"),
    "long-grammar": (CHAT, good(ebnf="\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(3000))), "ebnf"),
    "guided": ("/v1/completions", text(guided_regex="a("), "guided_regex"),
    "structured": (CHAT, good(structured_outputs={"json": 3}), "structured_outputs"),
    "two-formats": (CHAT, good(regex="a", ebnf='root ::= "a"'), "ebnf"),
    "least-tokens": ("/v1/completions", text(min_tokens=3), "min_tokens"),
    "allowed-none": (CHAT, good(allowed_token_ids=[]), "allowed_token_ids"),
    "allowed-unknown": (CHAT, good(allowed_token_ids=[5, 4096]), "allowed_token_ids"),
    "allowed-format": (CHAT, good(allowed_token_ids=[5], regex="a"), "allowed_token_ids"),
    "allowed-beams": (CHAT, good(allowed_token_ids=[5], use_beam_search=True, n=2), "allowed_token_ids"),
    "bad-word-empty": (CHAT, good(bad_words=["a", ""]), "bad_words.1"),
    "bad-word-blank": (CHAT, good(bad_words=["a", " "]), "bad_words.1"),
    "bad-words-format": (CHAT, good(bad_words=["a"], response_format={"type": "json_object"}), "bad_words"),
    "stop-ids": (CHAT, good(stop_token_ids=[4096]), "stop_token_ids"),
    "no-is-no-0": ("/v1/responses", {"model": "pico", "input": "x", "background": 0}, "background"),
    "one-is-no-true": ("/v1/completions", text(best_of=True), "best_of"),
    "role": (CHAT, good(messages=[{"role": "root", "content": "Hi"}]), "messages.0.role"),
    "surrogate": (CHAT, good(messages=[{"role": "user", "content": "\ud800"}]), "messages.0.content"),
    "image": (CHAT, good(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages.0.content.0.type"),
    "file": (CHAT, good(messages=[{"role": "user", "content": [{"type": "file"}]}]), "messages.0.content.0.type"),
    "template": (CHAT, good(chat_template_kwargs={"chat_template": "x"}), "chat_template_kwargs"),
    "tokenize": (CHAT, good(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs"),
    "choice-without-tools": (CHAT, good(tool_choice="required"), "tool_choice"),
    "choice-without-tools-messages": ("/v1/messages", good(tool_choice={"type": "any"}), "tool_choice"),
    "choice-without-tools-responses": (
        "/v1/responses",
        {"model": "pico", "input": "x", "tool_choice": {"type": "function", "name": "f"}},
        "tool_choice",
    ),
    "options-without-stream": (CHAT, good(stream_options={"include_usage": True}), "stream_options"),
    "functions": (CHAT, good(functions=[{}]), "functions"),
    "no-schema": (CHAT, good(response_format={"type": "json_schema"}), "response_format"),
    "ids": ("/v1/completions", text(prompt=[[4096]]), "prompt"),
    "ids-negative": ("/v1/completions", text(prompt=[-1]), "prompt"),
    "ids-mixed": ("/v1/completions", text(prompt=[1, "a"]), "prompt"),
    "empty-prompt": ("/v1/completions", text(prompt=[]), "prompt"),
    "empty-ids": ("/v1/completions", text(prompt=[[]]), "prompt"),
    "long": (CHAT, good(messages=[{"role": "user", "content": "Hello! " * 2000}]), "messages"),
    "stored": ("/v1/responses", {"model": "pico", "input": "x", "previous_response_id": "r"}, "previous_response_id"),
    "detokenize": ("/detokenize", {"tokens": [10**6]}, "tokens"),
    "both": ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, ""),
    "anthropic-limit": (
        "/v1/messages",
        {"model": "pico", "messages": [{"role": "user", "content": "x"}]},
        "max_tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_g13_g14_g18_what_cannot_be_is_refused_by_name(served: Served, name: str) -> None:
    path, body, param = WRONG[name]
    answer = served.ask("POST", path, json.dumps(body).encode())
    assert answer.status == 400, answer.body[:300]
    assert (answer.error["param"] or "").startswith(param) and len(answer.body) < 1000
    assert "should" not in answer.error["message"], "a sentence of pydantic's"


@pytest.mark.parametrize(
    "fields, message",
    [
        pytest.param({"stop": [1]}, "stop.0: must be a string", id="within-a-list"),
        pytest.param(
            {"messages": [{"role": "user", "content": {}}]},
            "messages.0.content: must be a string or a list",
            id="several-kinds",
        ),
        pytest.param({"tool_choice": {"type": "function"}}, "tool_choice.function: is required", id="missing"),
        pytest.param(
            {"stop_regex": "a"},
            "stop_regex: is not supported",
            id="what-others-take",
        ),
        pytest.param({"audio": {"voice": "a"}}, "audio: is not supported", id="not-done"),
        pytest.param({"messages": []}, "messages: must have 1 or more items", id="too-few"),
        pytest.param({"n": 0}, "n: must be at least 1", id="too-small"),
        pytest.param({"model": ""}, "model: must have 1 or more characters", id="too-short"),
        pytest.param({"echo": True}, "echo: must be false", id="only-false"),
    ],
)
def test_g13_a_mistake_is_named_by_its_way_through_the_body(
    served: Served, fields: dict[str, Any], message: str
) -> None:
    error = served.ask("POST", CHAT, good(**fields)).error
    assert error["message"] == message and error["param"] == message.partition(":")[0]


def test_what_others_take_to_constrain_a_reply_may_say_nothing(served: Served) -> None:
    nothing = {"grammar": None, "min_tokens": 0, "stop_token_ids": [], "bad_words": [], "use_beam_search": False}
    assert served.ask("POST", CHAT, good(**nothing)).status == 200


def test_g13_fields_that_nobody_knows_are_ignored(served: Served) -> None:
    assert served.ask("POST", CHAT, good(some_field={"a": [1]}, user="me", store=False)).status == 200


def test_g15_a_model_that_is_not_served(served: Served) -> None:
    for name in ("gpt-5", "../pico", "pico ", "PICO"):
        assert served.ask("POST", CHAT, good(model=name)).error["code"] == "model_not_found"
    assert served.ask("GET", "/v1/models/other").status == 404
    assert served.ask("GET", "/v1/models/alias/of-it").status == 200


def test_g15_without_a_name_it_is_the_model_that_is_served(served: Served) -> None:
    asked = [(CHAT, good()), ("/v1/completions", text()), ("/v1/messages", good()), ("/v1/responses", {"input": "x"})]
    for path, body in asked:
        answer = served.ask("POST", path, {**body, "model": None, "max_output_tokens": 1})
        assert answer.status == 200 and answer.json["model"] == "pico"


def test_openais_endpoints_are_found_without_their_v1(served: Served) -> None:
    assert served.ask("POST", "/chat/completions", good()).status == 200
    assert served.ask("POST", "/completions", text()).status == 200
    assert served.ask("POST", "/responses", {"input": "x", "max_output_tokens": 1}).status == 200
    assert served.ask("GET", "/models").json == served.ask("GET", "/v1/models").json
    assert served.ask("GET", "/models/alias/of-it").status == 200
    assert served.ask("GET", "/v1/models/").json["object"] == "list"
    assert served.ask("POST", "/v1/completions/", {"prompt": "a", "max_tokens": 1}).status == 200


def test_g16_an_endpoint_that_is_not_there(served: Served) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/chat/completion", 404),
        ("GET", "/..%2f..%2fetc/passwd", 404),
    ):
        answer = served.ask(method, path, b"{}" if method == "POST" else None)
        assert (
            answer.status == status
            and (path.replace("%2f", "/") if status == 404 else "use ") in answer.error["message"]
        )
    for method, path, other in (("POST", "/health", "GET"), ("GET", "/tokenize", "POST")):
        answer = served.ask(method, path, headers={"content-length": "0"})  # for a body that does not state its type
        assert answer.status == 405 and other in answer.headers["allow"]


SCHEMAS: dict[str, Any] = {
    "remote-ref": {"$ref": "http://127.0.0.1:1/schema.json"},
    "file-ref": {"$ref": "file:///etc/passwd"},
    "missing-ref": {"$ref": "#/$defs/none"},
    "type": {"type": "nothing"},
    "unsatisfiable": {"type": "integer", "minimum": 5, "maximum": 1},
    "false": {"not": {}},
    "redos": {"type": "string", "pattern": "(a+)+$(b"},
    "look-around": {"type": "string", "pattern": "(?=a)b"},
    "huge-enum": {"enum": [f"{number:06d}" for number in range(20_000)]},
    "required-huge": {"type": "object", "properties": {"a": {"const": "x" * 70_000}}},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_g17_a_hostile_schema_is_refused_before_anything_runs(served: Served, name: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[name], "strict": True}}
    answer = served.ask("POST", CHAT, good(response_format=form), seconds=30)
    assert answer.status == 400 and answer.error["param"] == "response_format", answer.body[:300]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": SCHEMAS[name]}}}}
    called = served.ask("POST", CHAT, good(tools=[tool], tool_choice="required"), seconds=30)
    assert called.status in (200, 400)
    served.idle()


@pytest.mark.parametrize("depth", [300, 3000])
def test_g17_a_deep_schema_is_refused(served: Served, depth: int) -> None:
    deep = '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth
    body = json.dumps(good(response_format=SCHEMA_OF)).replace('{"type": "object"}', deep)
    answer = served.ask("POST", CHAT, body.encode())
    assert answer.status == 400 and answer.error["code"] in ("invalid_value", "invalid_json")


@pytest.mark.parametrize("name", ["quotes", "long", "unicode", "empty"])
def test_g38_odd_tools_are_answered_or_refused(served: Served, name: str) -> None:
    text = {"quotes": "\"'\\<|im_end|>{{ x }}", "long": "d" * 100_000, "unicode": "日本👩‍👩‍👧\u2028", "empty": ""}[name]
    function = {
        "name": "f",
        "description": text,
        "parameters": {"type": "object", "properties": {text: {"enum": [text]}}},
    }
    answer = served.ask("POST", CHAT, good(tools=[{"type": "function", "function": function}], tool_choice="auto"))
    assert answer.status in (200, 400)
    named = {"type": "function", "function": {"name": text}}
    assert served.ask("POST", CHAT, good(tools=[named])).status == 400
    assert served.ask("GET", "/health").status == 200


def test_a_bug_in_a_route_is_an_error_without_its_cause(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(service: Service, name: str | None) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(Service, "check_model", broken)
    with scripted("Hi") as served:
        for path in (CHAT, "/v1/messages"):
            answer = served.ask("POST", path, good())
            assert answer.status == 500 and answer.error["code"] == "internal_error"
            assert ("type" in answer.json) == path.startswith("/v1/messages") and b"secret" not in answer.body
        assert [line for line in served.log if "secret detail" in line]


def test_g30_g32_neither_the_log_nor_the_metrics_hold_a_prompt(served: Served) -> None:
    secret = "zanzibar-4711"
    served.ask("POST", CHAT, good(messages=[{"role": "user", "content": secret}], user=secret))
    served.ask("POST", CHAT, good(messages=[{"role": "user", "content": secret}], temperature=9))
    served.ask("GET", f"/v1/models/{secret[:4]}%0aforged")
    metrics = served.ask("GET", "/metrics").body.decode()
    assert secret not in metrics and secret not in "\n".join(served.log)
    assert not [line for line in served.log if "\n" in line]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"):
        assert f"mycli:{name}" in metrics
    assert "mycli:time_to_first_token_seconds_bucket" in metrics
    assert 'mycli:request_success_total{finished_reason="length"}' in metrics
    assert 'mycli:prefix_cache_misses_total{reason="' in metrics
    assert "mycli:spec_decode_num_draft_tokens_total 0.0" in metrics
    times = [float(line.split()[1]) for line in metrics.splitlines() if "seconds_sum" in line]
    assert len(times) == 7 and all(time >= 0 for time in times)
