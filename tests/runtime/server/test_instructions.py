"""Test that messages reach the template as it knows them: roles, instructions, results of tools, ids of calls."""

from typing import Any

import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.requests.chat_prompt import render_chat
from mycli.runtime.tokenizer.chat_template import ChatTemplate, Message, takes_tools
from mycli.runtime.tokenizer.prompt_difference import PromptParts
from tests.runtime.server.conftest import Scripted
from tests.support.paths import PICO, ROOT

MESSAGES = (Message("user", "A"), Message("developer", "D"), Message("system", "S"), Message("user", "B"))
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{{ m.role }}:{{ m.content }}\n"
    "{% endfor %}"
)


def call(name: str, identity: str) -> dict[str, object]:
    return {"type": "function", "id": identity, "function": {"name": name, "arguments": {}}}


def _rendered(source: str, messages: tuple[Message, ...]) -> str:
    tokenizer = open_model_folder(PICO).tokenizer()
    tokenizer.template = ChatTemplate({"default": source}, {})
    return tokenizer.decode(render_chat(tokenizer, PromptParts(messages)))


def test_a_template_for_developers_gets_their_role() -> None:
    source = (ROOT / "tests/support/templates/instructions_anywhere.jinja").read_text("utf-8")
    text = _rendered(source, MESSAGES)
    order = [text.index(part) for part in ("user\nA", "developer\nD", "system\nS", "user\nB")]
    assert order == sorted(order)


def test_another_template_gets_a_system_message() -> None:
    text = _rendered("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", MESSAGES)
    assert text == "user:A;system:D;system:S;user:B;"


def test_a_template_that_takes_system_messages_first_only_gets_one() -> None:
    assert _rendered(FIRST_ONLY, (Message("developer", "D"), Message("user", "B"))) == "system:D\nuser:B\n"
    assert _rendered(FIRST_ONLY, MESSAGES) == "system:D\n\nS\nuser:A\nuser:B\n"
    twice = (Message("system", "S"), Message("developer", "D"), Message("user", "B"))
    assert _rendered(FIRST_ONLY, twice) == "system:S\n\nD\nuser:B\n"
    without = FIRST_ONLY.replace(" and not loop.first", "")
    with pytest.raises(ApiError, match="must be at the beginning"):
        _rendered(without, MESSAGES)


SINGLE_CALLS = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %};{% endfor %}"
)


def test_a_template_for_single_calls_gets_several_one_after_another() -> None:
    """Llama 3 writes several calls in a reply, and its template refuses them in the next turn."""
    calls = tuple({"type": "function", "id": name, "function": {"name": name, "arguments": {}}} for name in ("f", "g"))
    called = (Message("user", "A"), Message("assistant", "Look. ", calls))
    results = tuple(Message("tool", f"of {name}", tool_call_id=name) for name in ("g", "f"))
    after = Message("assistant", "Done")
    expected = "user:A;assistant:Look. f;tool:of f;assistant:g;tool:of g;assistant:Done;"
    assert _rendered(SINGLE_CALLS, (*called, *results, after)) == expected
    late = Message("system", "S")
    first_only = SINGLE_CALLS + FIRST_ONLY.split("{{ m.role")[0] + "{% endfor %}"
    assert _rendered(first_only, (*called, *results, after, late)) == f"system:S;{expected}"
    unnamed = tuple(Message("tool", f"{number}") for number in (1, 2))
    assert _rendered(SINGLE_CALLS, (*called, *unnamed)).endswith("f;assistant:g;tool:1;tool:2;")


@pytest.mark.parametrize(
    "keeping",
    [
        {"preserve_thinking": True},
        {"preserved_thinking": True},
        {"clear_thinking": False},
        {"keep_past_thinking": True},
        {"truncate_history_thinking": False},
    ],
    ids=["qwen3.6", "hy3", "glm", "lfm2", "nemotron3"],
)
def test_a_request_may_keep_the_reasoning_of_earlier_turns(keeping: dict[str, bool]) -> None:
    """Each model's card names its switch; agents set it so that the prompt of a turn begins with the last one."""
    ((name, value),) = keeping.items()
    kept = f"m.reasoning_content if {name} is defined and {name} == {value}"
    source = f"{{% for m in messages %}}{{{{ {kept} }}}}{{% endfor %}}"
    tokenizer = open_model_folder(PICO).tokenizer()
    tokenizer.template = ChatTemplate({"default": source}, {})
    turns = (Message("user", "A"), Message("assistant", "B", reasoning="why"), Message("user", "C"))
    assert tokenizer.decode(render_chat(tokenizer, PromptParts(turns, (), keeping))) == "why"


def test_an_image_in_the_result_of_a_tool_does_not_end_the_conversation(
    scripted: Scripted, reasoning: LoadedModel
) -> None:
    """Agents look at image files, and send what a tool returned again with each later turn."""
    url = "data:image/png;base64,AA"
    function = {"type": "function", "id": "a", "function": {"name": "look", "arguments": "{}"}}
    source = {"type": "base64", "media_type": "image/png", "data": "AA"}
    called = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    text, image = {"type": "text", "text": "Seen."}, {"type": "image", "source": source}
    scan = {"type": "document", "source": {**source, "media_type": "application/pdf"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text, image, scan]}
    item = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    output = [{"type": "input_text", "text": "Seen."}, {"type": "input_image", "image_url": url}]
    question: dict[str, Any] = {"role": "user", "content": "Look"}
    picture = {"type": "image_url", "image_url": {"url": url}}
    bodies: dict[str, tuple[dict[str, Any], str]] = {
        "chat/completions": (
            {
                "messages": [
                    question,
                    {"role": "assistant", "tool_calls": [function]},
                    {"role": "tool", "tool_call_id": "a", "content": [text, picture]},
                ]
            },
            "part image_url",
        ),
        "responses": (
            {"input": [question, item, {"type": "function_call_output", "call_id": "a", "output": output}]},
            "part input_image",
        ),
        "messages": (
            {
                "max_tokens": 9,
                "messages": [
                    question,
                    {"role": "assistant", "content": [called]},
                    {"role": "user", "content": [result]},
                ],
            },
            "block image, block document",
        ),
    }
    with scripted("ok", model=reasoning) as served:
        for route, (body, omitted) in bodies.items():
            answer = served.ask("POST", f"/v1/{route}", body)
            assert answer.status == 200, answer.body
            assert omitted in answer.headers["x-mycli-omitted"]
            prompt = served.service.loaded.tokenizer.spelled(served.service.worker.engine.prompts[-1])
            assert "Seen.\n[" in prompt and "left out, this model reads text only]" in prompt
        shown = {**question, "content": [picture]}  # what a user sends is refused: a reply without it would be wrong
        assert served.ask("POST", "/v1/chat/completions", {"messages": [shown]}).status == 400


# As in the templates of Mistral 7B v0.3 and Mistral Small 3.2.
SHORT_IDS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id is not defined or c.id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ c.function.name }}={{ c.id }};{% endfor %}{% if m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ m.content }}={{ m.tool_call_id }};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("call_id", ["call_0123456789abcdef01234567", "toolu_01A", "", "abcDEF123"])
def test_mistrals_templates_get_ids_of_nine_characters(call_id: str) -> None:
    messages = (
        Message("user", "Go"),
        Message("assistant", "", (call("f", call_id), call("g", "other"))),
        Message("tool", "one", tool_call_id=call_id),
        Message("tool", "two", tool_call_id="other"),
    )
    parts = dict(part.split("=") for part in _rendered(SHORT_IDS, messages).split(";") if part)
    assert parts["f"] == parts["one"] != parts["two"] == parts["g"]
    assert parts["f"].isalnum() and (call_id != "abcDEF123" or parts["f"] == call_id)


# As in the template of Kimi K2 Thinking.
ID_AS_NAME = (
    "{% for m in messages %}{% for tool_call in m.tool_calls or [] %}<|tool_call_begin|>{{ tool_call['id'] }}|"
    "{% endfor %}{% if m.role == 'tool' %}{{ m.tool_call_id }}={{ m.content }}|{% endif %}{% endfor %}"
)


def test_kimis_template_gets_ids_that_name_the_function() -> None:
    messages = (
        Message("user", "Go"),
        Message("assistant", "", (call("f", "call_a"), call("g", "call_b"))),
        Message("tool", "two", tool_call_id="call_b"),
        Message("tool", "one", tool_call_id="call_a"),
        Message("assistant", "", (call("f", "call_c"),)),
        Message("tool", "three", tool_call_id="call_c"),
    )
    assert _rendered(ID_AS_NAME, messages) == (
        "<|tool_call_begin|>functions.f:0|<|tool_call_begin|>functions.g:1|functions.g:1=two|functions.f:0=one|"
        "<|tool_call_begin|>functions.f:2|functions.f:2=three|"
    )


def test_kimis_first_template_counts_calls_in_each_message() -> None:
    """It names calls itself, and results by the id that the client sends."""
    name = "'functions.' + tool_call['function']['name'] + ':' + loop.index0|string"
    source = ID_AS_NAME.replace("tool_call['id']", name)
    messages = (
        Message("user", "Go"),
        Message("assistant", "", (call("f", "call_a"), call("g", "call_b"))),
        Message("tool", "two", tool_call_id="call_b"),
        Message("assistant", "", (call("f", "call_c"),)),
        Message("tool", "three", tool_call_id="call_c"),
    )
    assert _rendered(source, messages) == (
        "<|tool_call_begin|>functions.f:0|<|tool_call_begin|>functions.g:1|functions.g:1=two|"
        "<|tool_call_begin|>functions.f:0|functions.f:0=three|"
    )


# As in the templates of GigaChat and gpt-oss.
FIRST_CALL = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %};{% endfor %}"
)


def test_a_template_that_writes_the_first_call_gets_several_one_after_another() -> None:
    called = (Message("user", "A"), Message("assistant", "Look. ", (call("f", "1"), call("g", "2"))))
    results = tuple(Message("tool", f"of {identity}", tool_call_id=identity) for identity in ("2", "1"))
    expected = "user:A;assistant:Look. f;tool:of 1;assistant:g;tool:of 2;"
    assert _rendered(FIRST_CALL, (*called, *results)) == expected
    every = FIRST_CALL.replace(
        "{% endif %}", "{% for c in m.tool_calls %}+{{ c.function.name }}{% endfor %}{% endif %}"
    )
    assert _rendered(every, called) == "user:A;assistant:Look. f+f+g;"


# As in the template of gpt-oss.
ONE_THOUGHT = (
    "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}{{ m.thinking }}|{{ m.content }};"
    "{% endfor %}"
)


def test_the_template_of_gpt_oss_gets_reasoning_and_text_as_one() -> None:
    calls = ({"type": "function", "function": {"name": "f", "arguments": {}}},)
    messages = (
        Message("assistant", "Look.", calls, reasoning="Why."),
        Message("assistant", "", calls, reasoning="Why."),
        Message("assistant", "Look.", reasoning="Why."),
    )
    assert _rendered(ONE_THOUGHT, messages) == "Why.\n\nLook.|;Why.|;Why.|Look.;"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_templates_find_reasoning_under_their_name(name: str) -> None:
    message = Message("assistant", "A", reasoning="why")
    assert _rendered(f"{{% for m in messages %}}{{{{ m.{name} }}}}{{% endfor %}}", (message,)) == "why"


def test_tools_are_described_to_a_template_that_reads_them_from_a_message() -> None:
    """As that of Phi-4-mini does; no client sends them there."""
    given = "{% if 'tools' in m and m['tools'] %}{{ m['tools'] }}{% endif %}"
    source = f"{{% for m in messages %}}{given}{{{{ m.content }}}};{{% endfor %}}"
    tokenizer = open_model_folder(PICO).tokenizer()
    tokenizer.template = ChatTemplate({"default": source}, {})
    tools = [{"type": "function", "function": {"name": "find_herons", "parameters": {}}}]
    text = tokenizer.decode(render_chat(tokenizer, PromptParts((Message("user", "Go"),), tools)))
    assert '{"name": "find_herons"' in text and text.endswith("Go;")
    assert takes_tools("{% if tools %}") and takes_tools("{{- tools | tojson }}") and not takes_tools(source)
