"""Checks tools: they reach the model, calls can be read back, results are shown."""

import json
import re
from collections.abc import Iterator

from mycli.runtime.errors import UserError
from mycli.runtime.tokenizer.parsing.recipient import RecipientReader
from mycli.runtime.tokenizer.parsing.tool_formats import ToolFormat
from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall, ToolParser, join_calls
from mycli.runtime.tokenizer.template_check.finding import Finding, common_length
from mycli.runtime.tokenizer.template_check.probe import (
    ARGUMENTS,
    FUNCTION,
    PLANTED_ANSWERS,
    RESULT,
    TOOL,
    Probe,
    assistant,
    calling,
    result,
    user,
)

_LONG_ID = "call_0123456789abcdef01234567"  # as OpenAI's and this server's ids
_QUOTED = 200  # characters of a call in a message


def check_tools(probe: Probe) -> Iterator[Finding]:
    """Check definitions, calls and results."""
    if not probe.has_tools:
        yield Finding("no-tools")
        return
    text = probe.text([user(0)], more=True, tools=True)
    if FUNCTION not in text:
        yield Finding("tools-not-rendered")
    else:
        properties = TOOL["function"]["parameters"]["properties"]
        missing = [name for name in properties if not re.search(rf"\b{name}\b", text)]
        if missing:
            yield Finding("parameters-not-rendered", {"names": ", ".join(missing)})
    yield from _check_calls(probe)
    yield from _check_results(probe)


def _check_calls(probe: Probe) -> Iterator[Finding]:
    opening = probe.text([user(0)], more=True, tools=True)
    history = probe.text([user(0)], tools=True)
    try:
        written = probe.text([user(0), calling(1)], tools=True)
    except UserError as error:
        yield Finding("calls-refused", {"cause": error.message})
        return
    reply = _reply(opening, history, written)
    if FUNCTION not in reply:
        yield Finding("call-not-rendered")
        return
    tool_format = probe.tool_format
    if tool_format is None:
        yield Finding("unknown-call-format", {"written": reply[:_QUOTED]})
        return
    if not _reads_back(tool_format, reply, 1):
        yield Finding("call-not-parsed", {"format": tool_format.name, "written": reply[:_QUOTED]})
        return
    try:
        several = probe.text([user(0), calling(2)], tools=True)
    except UserError as error:
        yield Finding("several-calls-refused", {"cause": error.message})
        return
    reply = _reply(opening, history, several)
    if not _reads_back(tool_format, reply, 2):
        if _reads_back(tool_format, reply, 1):
            yield Finding("several-calls-refused", {"cause": "only the first call is rendered"})
        else:
            yield Finding("call-not-parsed", {"format": tool_format.name, "written": reply[:_QUOTED]})


def _reply(prompt: str, history: str, whole: str) -> str:
    # What the model would have written. Where the opening of a reply is not in earlier turns, their turn's beginning is
    # included: the two may begin alike, with half of a mark.
    start = prompt if whole.startswith(prompt) else history
    return whole[common_length(start, whole) :]


def _reads_back(tool_format: ToolFormat, reply: str, count: int) -> bool:
    # The parser sees a reply without its end-of-turn token, which decoding drops.
    for end in (None, *(match.start() for match in re.finditer(r"<[|｜][^<>]*[|｜]>|</s>|<end_of_turn>", reply))):
        parser = ToolParser(tool_format, [TOOL])
        text = RecipientReader(tool_format.recipient).feed(reply[:end], ended=True)
        items = [*parser.feed(text), *parser.flush()]
        calls = join_calls(item for item in items if isinstance(item, ToolCall))
        expected = [{**ARGUMENTS, "count": ARGUMENTS["count"] + number} for number in range(count)]
        if [call.name for call in calls] == [FUNCTION] * count and [_parsed(call) for call in calls] == expected:
            return True
    return False


def _parsed(call: ToolCall) -> object:
    try:
        return json.loads(call.arguments)
    except ValueError:
        return None


def _check_results(probe: Probe) -> Iterator[Finding]:
    loop = [user(0), calling(1), result()]
    try:
        if RESULT not in probe.text(loop, more=True, tools=True):
            yield Finding("result-not-rendered")
    except UserError as error:
        yield Finding("calls-refused", {"cause": error.message})
        return
    try:
        probe.text([user(0), calling(1, call_id=_LONG_ID), result(call_id=_LONG_ID)], tools=True)
    except UserError as error:
        yield Finding("call-ids-refused", {"cause": error.message})
    try:
        ended = probe.text([*loop, assistant(0), user(1)], more=True, tools=True)
        if PLANTED_ANSWERS[0] not in ended or RESULT not in ended:
            yield Finding("result-not-rendered")
    except UserError as error:
        yield Finding("calls-refused", {"cause": error.message})
