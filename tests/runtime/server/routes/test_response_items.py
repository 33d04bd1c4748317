"""Test that log-probabilities of a response are those of its text, however its tokens come."""

import dataclasses
from collections.abc import Sequence

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.sequence import SequenceOutput
from mycli.runtime.server.http.settings import ServerSettings
from tests.support.served import ScriptedEngine, serving

CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
LATER_CALL = CALL.replace('"a"', '"b"')
TOOL = {
    "type": "function",
    "name": "read",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
# Reply -> the texts of its messages.
REPLIES = {
    "reasoning": ("<think>\nHm. Yes.\n</think>\n\nFour.", ["Four."]),
    "call": (CALL, []),
    "text-call": (f"Let me see.\n{CALL}", ["Let me see."]),
    "text-call-text": (f"Let me see.\n{CALL}\nThat is all.", ["Let me see.", "That is all."]),
    "reasoning-text-calls": (f"<think>Hm.</think>Let me see.\n{CALL}\n{LATER_CALL}", ["Let me see."]),
    "not-a-call": ("So <tool_call>\nnone\n</tool_call> it is.", ["So <tool_call>\nnone\n</tool_call> it is."]),
}


class _Hasty(ScriptedEngine):
    """Generates a whole reply in one step, as several accepted tokens of a draft come."""

    def step(self) -> Sequence[SequenceOutput]:
        outputs = []
        while self.has_work:
            outputs += super().step()
        tokens = tuple(token for output in outputs for token in output.tokens)
        logprobs = tuple(logprob for output in outputs for logprob in output.logprobs)
        return [dataclasses.replace(outputs[-1], tokens=tokens, logprobs=logprobs)]


@pytest.mark.parametrize("engine", [ScriptedEngine, _Hasty], ids=["single-tokens", "one-step"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])
@pytest.mark.parametrize("reply", REPLIES)
def test_only_text_has_logprobs(
    reasoning: LoadedModel, reply: str, hidden: bool, stream: bool, engine: type[ScriptedEngine]
) -> None:
    written, texts = REPLIES[reply]
    ids = reasoning.tokenizer.encode(written, add_special=False, allow_special=True)
    body = {"input": "Go", "tools": [TOOL], "top_logprobs": 1, "include_reasoning": not hidden, "stream": stream}
    with serving(reasoning, engine(lambda request: ids), ServerSettings(("pico",))) as served:
        answer = served.ask("POST", "/v1/responses", body)
        assert answer.status == 200, answer.body
        output = (answer.events[-1]["response"] if stream else answer.json)["output"]
        parts = [item["content"][0] for item in output if item["type"] == "message"]
        assert [part["text"].strip() for part in parts] == texts
        for part in parts:
            assert "".join(entry["token"] for entry in part["logprobs"]).strip() == part["text"].strip()
        assert {event.get("content_index", 0) for event in answer.events} <= {0}, "items have a single part"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_other_arguments_of_a_custom_tool_are_its_input(reasoning: LoadedModel, stream: bool) -> None:
    for written, expected in (
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input":""}', ""),
        ("{}", ""),
        ('{"patch":"a"}', '{"patch": "a"}'),
        ('{"path": "x", "input": "a"}', '{"path": "x", "input": "a"}'),
    ):
        call = f'<tool_call>\n{{"name": "patch", "arguments": {written}}}\n</tool_call>'
        ids = reasoning.tokenizer.encode(call, add_special=False, allow_special=True)
        body = {"input": "Go", "tools": [{"type": "custom", "name": "patch"}], "stream": stream}
        with serving(reasoning, ScriptedEngine(lambda request, ids=ids: ids), ServerSettings(("pico",))) as served:
            answer = served.ask("POST", "/v1/responses", body)
        (item,) = (answer.events[-1]["response"] if stream else answer.json)["output"]
        assert (item["type"], item["input"], item["status"]) == ("custom_tool_call", expected, "completed")
        if stream:
            deltas = [event["delta"] for event in answer.events if event["type"].endswith("_input.delta")]
            assert "".join(deltas) == expected
