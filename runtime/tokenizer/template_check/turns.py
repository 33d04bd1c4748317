"""Checks turns: the prompt of a turn must be the beginning of the next one, and every text must appear as sent."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mycli.runtime.errors import UserError
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.tokenizer.template_check.finding import Finding, common_length, excerpts
from mycli.runtime.tokenizer.template_check.probe import (
    PLANTED_ANSWERS,
    PLANTED_QUESTIONS,
    SYSTEM,
    Probe,
    assistant,
    calling,
    result,
    user,
)

_TALK = (user(0), assistant(0), user(1), assistant(1), user(2))
_MARKED = "1 < 2 & 'ä' \"{{ 3 }}\" {% x %} 🎉"  # altered by HTML or JSON escapes, or a second pass of Jinja


def check_turns(probe: Probe) -> Iterator[Finding]:
    """Compare the prompts of successive turns: plain, with a system prompt, and with tools."""
    yield from _stable(probe, "plain turns", _TALK)
    yield from _stable(probe, "turns with a system prompt", (Message("system", SYSTEM), *_TALK))
    if "enable_thinking" in probe.template.source():
        silent = replace(probe, arguments={**probe.arguments, "enable_thinking": False})
        yield from _stable(silent, "turns with enable_thinking=false", _TALK)
    if probe.has_tools:
        yield from _stable(probe, "turns with tools", _TALK, tools=True)
        loop = (user(0), calling(1), result(), assistant(0), user(1))
        yield from _stable(probe, "a tool call and its result", loop, tools=True)


def _stable(probe: Probe, scenario: str, messages: Sequence[Message], tools: bool = False) -> Iterator[Finding]:
    # At most one finding: a later turn repeats the fault of an earlier one.
    replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
    try:
        for index, end in zip(replies, [*replies[1:], len(messages)], strict=True):
            history = probe.text(messages[:index], tools=tools)
            prompt = probe.text(messages[:index], more=True, tools=tools)
            following = probe.text(messages[:end], more=True, tools=tools)
            fault = _difference(history, prompt, following, messages[index])
            if fault is not None:
                yield Finding(fault[0], {"scenario": scenario, **excerpts(*fault[1:])})
                return
    except UserError:
        return  # refusals are reported by the checks of roles and tools


def _difference(history: str, prompt: str, following: str, reply: Message) -> tuple[str, str, str] | None:
    # Code, the text that the cache holds and the text of the next prompt; None if the second continues the first.
    if common_length(prompt, following) < len(history.rstrip()):
        return "history-changes", prompt, following
    if not following.startswith(prompt):
        return "reply-opening-changes", prompt, following
    if reply.content and not following.startswith(prompt + reply.content):
        return "reply-altered", prompt + reply.content, following
    return None


def check_contents(probe: Probe) -> Iterator[Finding]:
    """Check that texts are rendered as they were sent, and that the reply has an opening."""
    text = probe.text([Message("user", _MARKED)], more=True)
    if _MARKED not in text:
        yield Finding("content-altered", {"text": _MARKED, "rendered": text[-200:]})
    trimmed = [
        role
        for role, messages in (
            ("user", (Message("user", f"  {PLANTED_QUESTIONS[0]}\n\n"),)),
            ("assistant", (user(0), Message("assistant", f"  {PLANTED_ANSWERS[0]}\n\n"), user(1))),
        )
        if f"  {messages[-1 if role == 'user' else 1].content.strip()}\n\n" not in probe.text(messages)
    ]
    if trimmed:
        yield Finding("content-trimmed", {"roles": " and ".join(trimmed)})
    prompt, history = probe.text([user(0)], more=True), probe.text([user(0)])
    whole = probe.text([user(0), assistant(0)])
    if prompt == history and whole.startswith(history) and not whole.startswith(history + PLANTED_ANSWERS[0]):
        opening = whole[len(history) : whole.find(PLANTED_ANSWERS[0])]
        if opening.strip():  # Mistral's templates open no reply: the end of a question does
            yield Finding("no-generation-prompt", {"opening": opening})


def check_roles(probe: Probe) -> Iterator[Finding]:
    """Check the system prompt at the start and later, and two questions in a row."""
    system = Message("system", SYSTEM)
    try:
        text = probe.text([system, *_TALK], more=True)
        if SYSTEM not in text:
            yield Finding("system-dropped")
        elif text.index(SYSTEM) > text.index(PLANTED_QUESTIONS[0]):
            yield Finding("system-not-first")
    except UserError as error:
        yield Finding("system-refused", {"cause": error.message})
    else:
        try:
            if SYSTEM not in probe.text([user(0), assistant(0), system, user(1)], more=True):
                yield Finding("later-system-dropped")
        except UserError as error:
            yield Finding("later-system-refused", {"cause": error.message})
    try:
        probe.text([user(0), user(1)], more=True)
    except UserError as error:
        yield Finding("turns-must-alternate", {"cause": error.message})
