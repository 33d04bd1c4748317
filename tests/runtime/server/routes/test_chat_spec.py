"""Test which limits and prompts a conversation gets, and which wishes about it cannot be combined."""

from collections.abc import Iterator
from typing import Any

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.server.http.api_error import ApiError, ContextError
from mycli.runtime.server.requests.formats import ResponseFormat
from mycli.runtime.server.requests.schemas import PromptTruncation, Sampling
from mycli.runtime.server.routes.chat_spec import ChatSpec, chat_ids, prepare_chat
from mycli.runtime.server.service import Service
from mycli.runtime.tokenizer.chat_template import Message
from tests.support.served import unserved

CONTEXT = 256
ASK = Message("user", "Hi")
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]


@pytest.fixture(scope="module")
def service(reasoning: LoadedModel) -> Iterator[Service]:
    service = unserved(reasoning, context=CONTEXT)
    yield service
    service.close()


def spec(*messages: Message, **fields: Any) -> ChatSpec:
    return ChatSpec(messages or (ASK,), Sampling(), **fields)


def test_a_limit_is_shortened_to_the_room_where_the_interface_does_so(service: Service) -> None:
    room = CONTEXT + 1 - len(chat_ids(service, spec()))
    for limit, shortened in ((room, room), (room + 1, room), (room - 1, room - 1), (None, None)):
        prepared = prepare_chat(service, spec(limit=limit, clipped=True))
        ((request, readers),) = prepared.requests
        assert (request.limit, prepared.clipped) == (shortened, shortened != limit) and len(readers) == 1
    assert prepare_chat(service, spec(limit=room)).requests[0][0].limit == room
    with pytest.raises(ContextError):
        prepare_chat(service, spec(limit=room + 1))
    with pytest.raises(ContextError):  # also where the limit would be shortened
        prepare_chat(service, spec(Message("user", "word " * CONTEXT), limit=5, clipped=True))


def test_a_prompt_that_is_cut_leaves_room_for_the_limit_or_a_token(service: Service) -> None:
    long = Message("user", "word " * CONTEXT)
    cut = PromptTruncation(truncate_prompt_tokens=-1)
    for limit, length in ((10, CONTEXT + 1 - 10), (1, CONTEXT), (None, CONTEXT)):
        (prompt,) = prepare_chat(service, spec(long, limit=limit, truncation=cut)).prompts
        assert len(prompt) == length and prompt == chat_ids(service, spec(long))[-length:]


BEGUN = Message("assistant", "Well,")
CALL: Any = {"type": "function", "id": "a", "function": {"name": "f", "arguments": {}}}
FORM = ResponseFormat(type="json_object")


@pytest.mark.parametrize(
    ("messages", "fields", "words"),
    [
        ([ASK], {}, "must be text of the assistant"),
        ([ASK, Message("assistant", "x", (CALL,))], {}, "must be text of the assistant"),
        ([BEGUN], {}, "a message must precede it"),
        ([ASK, BEGUN], {"format": FORM}, "a format or a required call"),
        ([ASK, BEGUN], {"tools": TOOLS, "choice": "required"}, "a format or a required call"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(
    service: Service, messages: list[Message], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ApiError, match=words) as error:
        prepare_chat(service, spec(*messages, continued=True, **fields))
    assert error.value.param == "messages"


def test_a_message_is_continued_within_its_turn(service: Service) -> None:
    tokenizer = service.loaded.tokenizer
    opened = tokenizer.spelled(chat_ids(service, spec()))
    assert tokenizer.spelled(chat_ids(service, spec(ASK, BEGUN, continued=True))) == f"{opened}Well,"
    thought = Message("assistant", "Well,", reasoning="Hm.")
    continued = tokenizer.spelled(chat_ids(service, spec(ASK, thought, continued=True)))
    assert continued == f"{opened}<think>\nHm.\n</think>\n\nWell,"
    form = ResponseFormat(type="text")
    assert prepare_chat(service, spec(ASK, BEGUN, continued=True, format=form)).requests[0][0].grammar is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": TOOLS, "named": "h", "choice": "required"}, "no tool 'h'"),
        ({"tools": TOOLS, "allowed": ["f", "h"]}, "no tool 'h'"),
        ({"choice": "required"}, "the request has no tools"),
        ({"choice": "required", "omitted_tools": ["web"]}, "tools of type web cannot be called here"),
    ],
)
def test_a_choice_is_among_the_tools(service: Service, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words) as error:
        prepare_chat(service, spec(**fields))
    assert error.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("fields", "names"),
    [({}, ["f", "g"]), ({"allowed": ["g"]}, ["g"]), ({"choice": "none"}, []), ({"named": "f"}, ["f", "g"])],
)
def test_tools_are_offered_as_the_choice_allows(fields: dict[str, Any], names: list[str]) -> None:
    assert [tool["function"]["name"] for tool in spec(tools=TOOLS, **fields).offered_tools] == names


@pytest.mark.parametrize(
    ("fields", "constrained", "omitted"),
    [
        ({}, False, []),
        ({"tools": TOOLS}, False, []),
        ({"tools": TOOLS, "strict": ["f"]}, True, []),
        ({"tools": TOOLS, "strict": ["f"], "choice": "none"}, False, []),
        ({"tools": TOOLS, "choice": "required"}, True, []),
        ({"tools": TOOLS, "format": FORM}, True, []),
        ({"format": FORM}, True, []),
        ({"thinking_budget": 0}, True, []),
        ({"omitted_tools": ["web", "web"], "omitted": ["a", "b", "a"]}, False, ["tool web", "a", "b"]),
    ],
)
def test_a_reply_has_a_grammar_where_something_constrains_it(
    service: Service, fields: dict[str, Any], constrained: bool, omitted: list[str]
) -> None:
    prepared = prepare_chat(service, spec(**fields))
    assert (prepared.requests[0][0].grammar is not None) == constrained and prepared.omitted == omitted


def test_strict_tools_of_a_reply_that_is_continued_are_named_as_left_out(service: Service) -> None:
    request = spec(ASK, BEGUN, continued=True, tools=TOOLS[:1], strict=["f"])
    prepared = prepare_chat(service, request)
    assert prepared.omitted == ["strict of tool f"] and prepared.requests[0][0].grammar is None
