"""Test that a stop string ends a reply, whole and streamed, within text and within tool calls."""

from typing import Any

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from tests.runtime.server.conftest import Scripted
from tests.runtime.server.test_replies import REPLY, TOOL
from tests.support.served import Served, joined


def test_a_stop_string_across_tokens_ends_the_stream(scripted: Scripted) -> None:
    with scripted("one two three four") as served:
        answer = served.chat(stop=["two th"], stream=True)
        assert joined(answer)[0] == "one " and joined(answer)[3] == "stop"
        served.idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_stop_string_after_a_call_leaves_the_call_to_be_run(
    scripted: Scripted, reasoning: LoadedModel, stream: bool
) -> None:
    """Agents written for plain completions send a stop string with each request, and run calls by the finish reason."""
    options = {"tools": [TOOL], "stream": stream}
    with scripted(REPLY + "\nObservation: 3", model=reasoning) as served:
        calls = [("f", '{"a": 1}'), ("f", '{"a": 2}')]
        assert joined(served.chat("Go", stop=["Observation:"], **options))[2:] == (calls, "tool_calls")
        assert joined(served.chat("Go", stop=['{"a": 2'], **options))[2:] == (calls[:1], "tool_calls")
    long = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x STOP"}}\n</tool_call>'
    with scripted(long, model=reasoning) as served:
        assert joined(served.chat("Go", stop=["STOP"], **options))[2:] == ([("f", '{"a": 1, "b": "x ')], "stop")
    body = {
        "model": "pico",
        "max_tokens": 200,
        "stop_sequences": ["Observation:"],
        "messages": [{"role": "user", "content": "Go"}],
    }
    tool = {"name": "f", "input_schema": TOOL["function"]["parameters"]}
    with scripted(REPLY + "\nObservation: 3", model=reasoning) as served:
        whole = served.ask("POST", "/v1/messages", {"tools": [tool], **body}).json
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)


@pytest.mark.parametrize(("fields", "reason"), [({"max_tokens": 2}, "length"), ({"stop": [" "]}, "stop")], ids=str)
def test_a_completion_says_why_it_ended(served: Served, fields: dict[str, Any], reason: str) -> None:
    body = {"prompt": "The capital of Japan", "temperature": 0, **fields}
    whole = served.ask("POST", "/v1/completions", body)
    events = served.ask("POST", "/v1/completions", {**body, "stream": True}).events
    assert whole.json["choices"][0]["finish_reason"] == reason
    reasons = [event["choices"][0]["finish_reason"] for event in events if event["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + [reason]
