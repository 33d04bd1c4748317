"""Renders the conversation of a request with the model's template, and compares prompts with earlier ones."""

import hashlib
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Lock

from mycli.runtime.cache.prefix_index import common_prefix_length
from mycli.runtime.errors import UsageError, UserError
from mycli.runtime.server.http.api_error import ApiError, from_user_error
from mycli.runtime.tokenizer.chat_template import Message, takes_tools
from mycli.runtime.tokenizer.parsing.tool_formats import describe_tools_in_system_message
from mycli.runtime.tokenizer.prompt_difference import AROUND, Difference, PromptParts, causes
from mycli.runtime.tokenizer.tokenizer import Tokenizer

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_CALLS_LOOP = re.compile(r"""\bin\s+[\w.'"\[\]]*tool_calls\b""")
_RECENT_PROMPTS, _RECENT_TOKENS = 32, 1 << 18  # every new prompt is compared with all of these


def template_source(tokenizer: Tokenizer) -> str:
    """Return the source of the template for requests with tools; "" without a template."""
    return "" if tokenizer.template is None else tokenizer.template.source(tools=True)


def render_chat(
    tokenizer: Tokenizer, parts: PromptParts, more: bool = True, place: str = "messages", source: str | None = None
) -> list[int]:
    """Return the token ids of a conversation; `more`: open the assistant's reply. Raises ApiError about `place`.

    source: of the template, if it is known.
    """
    if tokenizer.template is not None:
        try:
            tokenizer.template.check_arguments(parts.arguments)
        except UsageError as error:
            message = f"{error.message}; {error.hint}"
            raise ApiError(400, message, "invalid_value", param="chat_template_kwargs") from None
    messages = list(parts.messages)
    source = template_source(tokenizer) if source is None else source
    if "developer" not in source:
        messages = [
            Message("system", message.content, name=message.name) if message.role == "developer" else message
            for message in messages
        ]
    if "length != 9" in source:  # Mistral's templates raise for ids of calls that do not have nine letters and digits
        messages = [_with_short_ids(message) for message in messages]
    if "<|tool_call_begin|>" in source and ("tool_call['id']" in source or "'functions.' + " in source):
        messages = _with_naming_ids(messages, in_message="loop.index0" in source)
    if "Cannot pass both content and thinking" in source:
        messages = [_with_one_thought(message) for message in messages]
    if "tool_calls[0]" in source and not _CALLS_LOOP.search(source):  # GigaChat and gpt-oss: others would be dropped
        messages = _with_single_calls(messages)

    def render(messages: list[Message]) -> list[int]:
        tools = list(parts.tools)
        if tools and not takes_tools(source):
            messages, tools = describe_tools_in_system_message(messages, tools), []
        return tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=more, **parts.arguments
        )

    try:
        return render(messages)
    except UserError as error:
        # Codex sends instructions twice, Claude Code also after the first question. Templates such as those of Qwen 3.5
        # and Gemma 3 raise for system messages that are not the first message; where they do not, the order is kept.
        # Those of Llama 3 raise for several calls in a message, which the model writes nevertheless.
        merged, split = _with_one_system_message(messages), _with_single_calls(messages)
        for changed in (merged, split, _with_one_system_message(split)):
            if changed != messages:
                with suppress(UserError):
                    return render(changed)
        raise from_user_error(error, place) from None


def _with_one_system_message(messages: Sequence[Message]) -> list[Message]:
    systems = [message for message in messages if message.role == "system"]
    others = [message for message in messages if message.role != "system"]
    content = "\n\n".join(message.content for message in systems if message.content)
    return [*([replace(systems[0], content=content)] if systems else []), *others]


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    # Each call of a message in one of its own, followed by its result.
    converted, at = list[Message](), 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.tool_calls) < 2:
            converted.append(message)
            continue
        end = next((index for index in range(at, len(messages)) if messages[index].role != "tool"), len(messages))
        results, at = list(messages[at:end]), end
        for number, call in enumerate(message.tool_calls):
            shown = message if number == 0 else Message("assistant", "")
            converted.append(replace(shown, tool_calls=(call,)))
            answer = next((result for result in results if result.tool_call_id == call.get("id")), None)
            if answer is not None:
                results.remove(answer)
                converted.append(answer)
        converted += results
    return converted


def _with_short_ids(message: Message) -> Message:
    calls = tuple({**call, "id": _short_id(str(call.get("id", "")))} for call in message.tool_calls)
    result_of = _short_id(message.tool_call_id) if message.role == "tool" else ""
    return replace(message, tool_calls=calls, tool_call_id=result_of)


def _with_naming_ids(messages: Sequence[Message], in_message: bool) -> list[Message]:
    # Templates of Kimi K2 write the id of a call as its name, functions.NAME:NUMBER, and results with their id. Calls
    # are counted over the conversation, by the first template in each message.
    named, converted = dict[str, str](), []
    for message in messages:
        calls = []
        for index, call in enumerate(message.tool_calls):
            call_id = f"functions.{call['function']['name']}:{index if in_message else len(named)}"
            named[str(call.get("id", call_id))] = call_id
            calls.append({**call, "id": call_id})
        result_of = named.get(message.tool_call_id, message.tool_call_id)
        converted.append(replace(message, tool_calls=tuple(calls), tool_call_id=result_of))
    return converted


def _with_one_thought(message: Message) -> Message:
    # gpt-oss: its template writes either the text before a call or the reasoning, as reasoning, and refuses both.
    if not (message.tool_calls and message.content and message.reasoning):
        return message
    return replace(message, content="", reasoning=f"{message.reasoning}\n\n{message.content}")


def _short_id(call_id: str) -> str:
    # A hash: a call and its result keep the same id, and the prompt of the next turn begins with this one.
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def compare_prompts(
    tokenizer: Tokenizer, first: tuple[Sequence[int], PromptParts], second: tuple[Sequence[int], PromptParts]
) -> Difference:
    """Return the first difference of two prompts, given as tokens and parts."""
    shared = common_prefix_length(first[0], second[0])
    if shared == len(first[0]):
        return Difference(shared, len(first[0]), len(second[0]))
    # As many tokens as characters are needed, because nearly every token has a character.
    after = slice(shared, shared + AROUND)
    return Difference(
        shared,
        len(first[0]),
        len(second[0]),
        tokenizer.spelled(second[0][max(shared - AROUND, 0) : shared])[-AROUND:],
        tokenizer.spelled(first[0][after])[:AROUND],
        tokenizer.spelled(second[0][after])[:AROUND],
        causes(first[1], second[1]),
    )


class RecentPrompts:
    """The chat prompts that were served last. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[Sequence[int], PromptParts]] = deque(maxlen=_RECENT_PROMPTS)
        self._lock = Lock()

    def add(self, ids: Sequence[int], parts: PromptParts) -> None:
        """Store a prompt, and drop the oldest ones beyond the limits."""
        with self._lock:
            self._prompts.append((ids, parts))
            while sum(len(recent) for recent, _ in self._prompts) > _RECENT_TOKENS:
                self._prompts.popleft()

    def compare(self, tokenizer: Tokenizer, ids: Sequence[int], parts: PromptParts) -> Difference | None:
        """Return the difference to the earlier prompt with the longest shared prefix; None if there is none."""
        with self._lock:
            earlier = list(self._prompts)
        if not earlier:
            return None
        closest = max(earlier, key=lambda recent: common_prefix_length(recent[0], ids))
        return compare_prompts(tokenizer, closest, (ids, parts))
