"""Test with Anthropic's own client, unmodified."""

from collections.abc import Iterator

import anthropic
import pytest

from tests.support.served import Served

GREEDY = {"temperature": 0}  # the client dropped the field
JAPAN = [{"role": "user", "content": "What is the capital of Japan?"}]
TOOL = {
    "name": "weather",
    "description": "Says it.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Tokyo", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as found:
        yield found


def test_a_message_whole_and_streamed(client: anthropic.Anthropic, served: Served) -> None:
    whole = client.messages.create(model="pico", messages=JAPAN, max_tokens=40, extra_body=GREEDY)
    chat = served.chat(max_tokens=40).json
    (block,) = whole.content
    assert block.type == "text" and block.text == chat["choices"][0]["message"]["content"]
    assert whole.stop_reason == "end_turn" and whole.usage.output_tokens == chat["usage"]["completion_tokens"]
    with client.messages.stream(model="pico", messages=JAPAN, max_tokens=40, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == block.text
        last = stream.get_final_message()
    assert last.stop_reason == "end_turn" and last.usage.output_tokens == whole.usage.output_tokens


def test_a_system_prompt_and_blocks_are_read(client: anthropic.Anthropic, served: Served) -> None:
    blocks = [{"role": "user", "content": [{"type": "text", "text": JAPAN[0]["content"]}]}]
    told = client.messages.create(
        model="pico", system=[{"type": "text", "text": "Be brief."}], messages=blocks, max_tokens=20, extra_body=GREEDY
    )
    chat = {"messages": [{"role": "system", "content": "Be brief."}, *JAPAN], "max_tokens": 20}
    assert told.content[0].type == "text"
    body = {"model": "pico", "temperature": 0, **chat}
    same = served.ask("POST", "/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    assert told.content[0].text == same


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    found = client.messages.create(
        model="pico", messages=JAPAN, max_tokens=20, extra_body=GREEDY, stop_sequences=["zz", " Japan"]
    )
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", " Japan")
    cut = client.messages.create(model="pico", messages=JAPAN, max_tokens=2, extra_body=GREEDY)
    assert cut.stop_reason == "max_tokens"


def test_a_tool_is_called_and_its_answer_read(client: anthropic.Anthropic) -> None:
    arguments = {"model": "pico", "tools": [TOOL], "max_tokens": 120, "extra_body": GREEDY}
    one = {"type": "any", "disable_parallel_tool_use": True}
    called = client.messages.create(**arguments, messages=JAPAN, tool_choice=one)
    (use,) = called.content
    assert use.type == "tool_use" and use.input["city"] in ("Tokyo", "Oslo") and called.stop_reason == "tool_use"
    with client.messages.stream(**arguments, messages=JAPAN, tool_choice=one) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use" and (streamed.name, streamed.input) == (use.name, use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    conversation = [*JAPAN, {"role": "assistant", "content": [use.model_dump()]}, {"role": "user", "content": [result]}]
    follow = client.messages.create(**arguments, messages=conversation, tool_choice={"type": "none"})
    assert follow.stop_reason in ("end_turn", "max_tokens")


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="pico", messages=JAPAN)
    answered = client.messages.create(model="pico", messages=JAPAN, max_tokens=1)
    usage = answered.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert client.messages.count_tokens(model="pico", messages=JAPAN, tools=[TOOL]).input_tokens > counted.input_tokens


def test_errors_have_its_form(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="claude", messages=JAPAN, max_tokens=1)
    assert unknown.value.body["type"] == "error" and unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]  # an object
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="not supported"):
        client.messages.create(model="pico", messages=[{"role": "user", "content": [image]}], max_tokens=1)  # type: ignore[list-item,misc]  # an image


def test_old_tool_results_are_cleared_and_the_reply_says_so(client: anthropic.Anthropic) -> None:
    talk = list(JAPAN)
    for index in range(3):
        use = {"type": "tool_use", "id": f"toolu_{index}", "name": "weather", "input": {"city": "Oslo"}}
        talk.append({"role": "assistant", "content": [use]})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "It rains. " * 20}
        talk.append({"role": "user", "content": [result]})
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 50}}
    edits = {"edits": [{**edit, "keep": {"type": "tool_uses", "value": 1}}]}
    fields = {"model": "pico", "messages": talk, "context_management": edits}
    plain = client.beta.messages.count_tokens(model="pico", messages=talk).input_tokens
    counted = client.beta.messages.count_tokens(**fields)
    assert counted.context_management is not None and counted.context_management.original_input_tokens == plain
    assert counted.input_tokens < plain
    whole = client.beta.messages.create(**fields, max_tokens=1)
    with client.beta.messages.stream(**fields, max_tokens=1) as stream:
        streamed = stream.get_final_message()
    for reply in (whole, streamed):
        assert reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) == counted.input_tokens
        assert reply.context_management is not None
        (applied,) = reply.context_management.applied_edits
        assert applied.type == "clear_tool_uses_20250919" and applied.cleared_tool_uses == 2
        assert applied.cleared_input_tokens == plain - counted.input_tokens
    thinking = {"type": "clear_thinking_20251015", "keep": "all"}
    idle = client.beta.messages.create(**{**fields, "context_management": {"edits": [thinking]}}, max_tokens=1)
    assert idle.context_management is not None and idle.context_management.applied_edits == []
    assert client.beta.messages.create(model="pico", messages=talk, max_tokens=1).context_management is None


def test_cleared_reasoning_is_named_with_its_turns(client: anthropic.Anthropic) -> None:
    thinks = {"type": "thinking", "thinking": "Which one?", "signature": ""}
    said = {"role": "assistant", "content": [thinks, {"type": "text", "text": "Tokyo."}]}
    edits = {"edits": [{"type": "clear_thinking_20251015"}]}
    talk = [*JAPAN, said, *JAPAN, said, *JAPAN]
    reply = client.beta.messages.create(model="pico", messages=talk, max_tokens=1, context_management=edits)
    assert reply.context_management is not None
    (applied,) = reply.context_management.applied_edits
    assert applied.type == "clear_thinking_20251015" and applied.cleared_thinking_turns == 1
