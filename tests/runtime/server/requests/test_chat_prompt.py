"""Test how conversations are fitted to the rules of templates, and how a prompt is compared with earlier ones."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from mycli.runtime.errors import UsageError
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.requests.chat_prompt import RecentPrompts, compare_prompts, render_chat
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.tokenizer.prompt_difference import AROUND, PromptParts
from mycli.runtime.tokenizer.tokenizer import Tokenizer

NO_PARTS = PromptParts([], [], {})
KIMI = "<|tool_call_begin|> tool_call['id'] tools"


class Template:
    """Records the messages that it renders; `refuses` are numbers of attempts that it raises for."""

    template = None

    def __init__(self, refuses: Sequence[int] = ()) -> None:
        self._refuses, self.attempts = refuses, list[list[Message]]()
        self.arguments = dict[str, Any]()

    def apply_chat_template(self, messages: Sequence[Message], **arguments: Any) -> list[int]:
        self.attempts.append(list(messages))
        self.arguments = arguments
        if len(self.attempts) in self._refuses:
            raise UsageError("roles must alternate", "send another conversation")
        return [len(self.attempts)]

    def spelled(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def call(call_id: str, name: str = "look") -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": {}}}


def called(*ids: str, content: str = "", reasoning: str = "") -> Message:
    return Message("assistant", content, tuple(map(call, ids)), reasoning)


def result(call_id: str, content: str = "A dog.") -> Message:
    return Message("tool", content, tool_call_id=call_id)


def rendered(messages: Sequence[Message], source: str = "tools", **arguments: Any) -> list[Message]:
    template = Template()
    parts = PromptParts(messages, [], arguments)
    assert render_chat(cast(Tokenizer, template), parts, source=source) == [1]
    assert template.arguments == {"tools": None, "add_generation_prompt": True, **arguments}
    return template.attempts[0]


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_tools_are_described_in_the_system_message_where_a_template_has_none() -> None:
    for source, native in (("tools", True), ("", False)):
        template, ask = Template(), Message("user", "Hi")
        render_chat(cast(Tokenizer, template), PromptParts([ask], [TOOL], {}), more=False, source=source)
        assert template.arguments == {"tools": [TOOL] if native else None, "add_generation_prompt": False}
        *before, last = template.attempts[0]
        assert last == ask and [message.role for message in before] == ([] if native else ["system"])
        assert all('"look"' in message.content for message in before)


class Source(Template):
    """Has a template, whose source mentions developers."""

    def __init__(self) -> None:
        super().__init__()
        self.template = cast(Any, self)

    def source(self, tools: bool) -> str:
        return "tools developer" if tools else ""

    def check_arguments(self, arguments: Any) -> None:
        if "wrong" in arguments:
            raise UsageError("wrong: is set by the server", "leave it out")


def test_the_rules_are_those_of_the_template_of_the_tokenizer() -> None:
    messages = [Message("developer", "Be brief.")]
    for template, role in ((Template(), "system"), (Source(), "developer")):
        render_chat(cast(Tokenizer, template), PromptParts(messages, [], {}))
        assert template.attempts[0][0].role == role
    with pytest.raises(ApiError, match="wrong: is set by the server; leave it out") as error:
        render_chat(cast(Tokenizer, Source()), PromptParts(messages, [], {"wrong": 1}))
    assert error.value.param == "chat_template_kwargs"


def test_a_developer_is_the_system_where_templates_have_none() -> None:
    messages = [Message("developer", "Be brief.", name="it"), Message("user", "Hi")]
    assert rendered(messages) == [Message("system", "Be brief.", name="it"), messages[1]]
    assert rendered(messages, "tools developer") == messages


def test_ids_of_calls_have_nine_characters_where_a_template_requires_them() -> None:
    calls, first, second = rendered(
        [called("call_1", "abcDEF123"), result("call_1"), result("abcDEF123")], "tools length != 9"
    )
    ids = [entry["id"] for entry in calls.tool_calls]
    assert len(ids[0]) == 9 and ids[0].isalnum() and ids[1] == "abcDEF123"
    assert [first.tool_call_id, second.tool_call_id] == ids and calls.tool_call_id == ""


@pytest.mark.parametrize(
    ("source", "ids"),
    [
        (KIMI, ["functions.look:0", "functions.look:1", "functions.look:2"]),
        (f"{KIMI} loop.index0", ["functions.look:0", "functions.look:1", "functions.look:0"]),
        ("<|tool_call_begin|> 'functions.' + name tools", ["functions.look:0", "functions.look:1", "functions.look:2"]),
        ("tool_call['id'] tools", ["a", "b", "c"]),
        ("<|tool_call_begin|> tools", ["a", "b", "c"]),
    ],
)
def test_ids_name_their_function_where_templates_write_them(source: str, ids: list[str]) -> None:
    messages = [called("a", "b"), result("b"), result("a"), called("c"), result("c"), result("d")]
    written = rendered(messages, source)
    assert [entry["id"] for message in written for entry in message.tool_calls] == ids
    answered = [message.tool_call_id for message in written if message.role == "tool"]
    assert answered == [ids[1], ids[0], ids[2], "d"]


def test_text_before_a_call_is_reasoning_where_a_template_refuses_both() -> None:
    source = "tools Cannot pass both content and thinking"
    both = called("a", content="I look.", reasoning="Hm.")
    (written,) = rendered([both], source)
    assert (written.content, written.reasoning) == ("", "Hm.\n\nI look.")
    for message in (called("a", content="I look."), called("a", reasoning="Hm."), Message("assistant", "x", (), "Hm.")):
        assert rendered([message], source) == [message]
    assert rendered([both]) == [both]


def test_calls_are_split_where_a_template_writes_the_first_alone() -> None:
    calls = called("a", "b", content="I look.", reasoning="Hm.")
    messages = [calls, result("b", "B"), result("x", "X"), result("a", "A"), Message("user", "Well?"), called("c")]
    written = rendered(messages, "tools tool_calls[0]")
    assert written == [
        called("a", content="I look.", reasoning="Hm."),
        result("a", "A"),
        called("b"),
        result("b", "B"),
        result("x", "X"),
        *messages[4:],
    ]
    assert rendered([calls], "tools tool_calls[0]") == written[:1] + written[2:3]  # without results
    assert rendered(messages, "tools tool_calls[0] {% for c in m.tool_calls %}") == messages


SYSTEMS = [Message("system", "One."), Message("user", "Hi"), Message("system", ""), Message("system", "Two.")]


@pytest.mark.parametrize(
    ("refuses", "tried"),
    [
        ((), 1),
        ((1,), 2),  # with a single system message
        ((1, 2), 3),  # with single calls
        ((1, 2, 3), 4),  # with both
    ],
)
def test_a_conversation_that_a_template_refuses_is_tried_in_other_forms(refuses: Sequence[int], tried: int) -> None:
    template, messages = Template(refuses), [*SYSTEMS, called("a", "b")]
    assert render_chat(cast(Tokenizer, template), PromptParts(messages, [], {}), source="tools") == [tried]
    system, single = Message("system", "One.\n\nTwo."), [called("a"), called("b")]
    forms = [
        messages,
        [system, SYSTEMS[1], messages[-1]],
        [*SYSTEMS, *single],
        [system, SYSTEMS[1], *single],
    ]
    assert template.attempts == forms[:tried]


def test_a_late_system_message_comes_first_where_a_template_requires_it() -> None:
    template, messages = Template((1,)), [Message("user", "Hi"), Message("system", "One.", name="it")]
    assert render_chat(cast(Tokenizer, template), PromptParts(messages, [], {}), source="tools") == [2]
    assert template.attempts[1] == messages[::-1]


def test_a_conversation_without_another_form_is_refused_by_the_first_error() -> None:
    template = Template(range(1, 9))
    with pytest.raises(ApiError, match="roles must alternate") as error:
        render_chat(cast(Tokenizer, template), PromptParts([Message("user", "Hi")], [], {}), place="input", source="")
    assert error.value.param == "input" and len(template.attempts) == 1


def recent(*prompts: Sequence[int]) -> RecentPrompts:
    stored = RecentPrompts()
    for ids in prompts:
        stored.add(ids, NO_PARTS)
    return stored


def shared_with(stored: RecentPrompts, ids: Sequence[int]) -> int | None:
    difference = stored.compare(cast(Tokenizer, Template()), ids, NO_PARTS)
    return None if difference is None else difference.tokens


def test_a_prompt_is_compared_with_the_one_that_shares_the_most() -> None:
    stored = recent([1, 2, 3, 9], [1, 2, 8], [7])
    assert shared_with(stored, [1, 2, 3, 4]) == 3 and shared_with(stored, [1, 2, 8]) == 3
    assert shared_with(recent(), [1]) is None


def test_the_oldest_prompts_are_dropped_beyond_32_or_262144_tokens() -> None:
    numbers = [[number] for number in range(32)]
    assert shared_with(recent(*numbers), [0, 99]) == 1 and shared_with(recent(*numbers, [50]), [0, 99]) == 0
    large = [[number] * 131_072 for number in (1, 2)]
    assert shared_with(recent(*large), large[0]) == 131_072
    assert shared_with(recent(*large, [3]), large[0]) == 0 and shared_with(recent(*large, [3]), large[1]) == 131_072


def test_a_difference_has_the_text_around_it() -> None:
    assert AROUND < 200
    first, second = ([*(ord("a") for _ in range(200)), *map(ord, tail * 200)] for tail in "xy")
    tokenizer = cast(Tokenizer, Template())
    difference = compare_prompts(tokenizer, (first, NO_PARTS), (second, NO_PARTS))
    assert (difference.tokens, difference.first, difference.second, difference.continues) == (200, 400, 400, False)
    assert (difference.before, difference.earlier, difference.later) == ("a" * AROUND, "x" * AROUND, "y" * AROUND)
    short = compare_prompts(tokenizer, ([1, ord("x")], NO_PARTS), ([1, ord("y")], NO_PARTS))
    assert (short.before, short.earlier, short.later) == ("\x01", "x", "y")
    early = compare_prompts(tokenizer, (first[199:], NO_PARTS), (second[199:], NO_PARTS))
    assert (early.tokens, early.before, early.later) == (1, "a", "y" * AROUND)
    longer = compare_prompts(tokenizer, (second[:300], NO_PARTS), (second, NO_PARTS))
    assert longer.continues and (longer.tokens, longer.second, longer.before) == (300, 400, "")
