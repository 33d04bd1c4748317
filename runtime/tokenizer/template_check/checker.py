"""Runs all checks of a template and measures what it costs."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mycli.runtime.errors import ModelError, UsageError, UserError
from mycli.runtime.tokenizer.chat_template import (
    ALLOWED_ARGUMENTS,
    RENDER_MEMORY,
    RENDER_SECONDS,
    TOKEN_NAMES,
    Message,
)
from mycli.runtime.tokenizer.template_check.finding import Finding
from mycli.runtime.tokenizer.template_check.probe import PLANTED_ANSWERS, PLANTED_QUESTIONS, Probe, assistant, user
from mycli.runtime.tokenizer.template_check.reasoning import check_reasoning
from mycli.runtime.tokenizer.template_check.tokens import check_tokens
from mycli.runtime.tokenizer.template_check.tools import check_tools
from mycli.runtime.tokenizer.template_check.turns import check_contents, check_roles, check_turns
from mycli.runtime.utils.sandbox import WorkerError, WorkerProcess

_CHECKS: Mapping[str, Callable[[Probe], Iterator[Finding]]] = {
    "texts": check_contents,
    "roles": check_roles,
    "turns": check_turns,
    "tools": check_tools,
    "reasoning": check_reasoning,
    "tokens": check_tokens,
}
# Variables that every program sets. `documents`: of retrieval.
_GIVEN = frozenset(("messages", "tools", "documents", "add_generation_prompt", *TOKEN_NAMES))
_FEW, _MANY = 64, 256  # messages
# Linear work takes 4 times as long for 4 times the messages, quadratic 16 times. Short times are not reported.
_GROWTH, _SLOW_SECONDS = 8.0, 0.05


@dataclass(frozen=True)
class Costs:
    """The cost of a template: the time to render 256 messages, and tokens, None without a tokenizer.

    start: before the first question; exchange: around a question and its reply; opening: of a reply; tool: of one tool.
    """

    seconds: float
    start: int | None = None
    exchange: int | None = None
    opening: int | None = None
    tool: int | None = None


@dataclass(frozen=True)
class TemplateReport:
    """The result of a check. arguments: names that the template reads; tool_format: None without tools."""

    characters: int
    findings: Sequence[Finding]
    arguments: Sequence[str] = ()
    tool_format: str | None = None
    continues: bool = False  # whether a client can send the beginning of a reply to be continued
    costs: Costs | None = None

    def fields(self) -> dict[str, Any]:
        return {**asdict(self), "findings": [{"code": f.code, **f.data} for f in self.findings]}


def check_template(probe: Probe) -> TemplateReport:
    """Run every check; a template that cannot render one question is not checked further."""
    source = probe.template.source()
    findings, variables = _check_source(dict.fromkeys((source, probe.template.source(tools=True))))
    arguments = [name for name in variables if name not in _GIVEN]
    custom = [name for name in arguments if name not in ALLOWED_ARGUMENTS]
    if custom:
        findings.append(Finding("own-variable", {"names": ", ".join(custom)}))
    if any(finding.code == "syntax" for finding in findings):
        return TemplateReport(len(source), findings)
    try:
        probe.text([user(0)], more=True)
    except UserError as error:
        findings.append(Finding("fails", {"what": "a question without tools", "cause": error.message}))
        return TemplateReport(len(source), findings, arguments)
    for what, check in _CHECKS.items():
        try:
            findings += check(probe)
        except UsageError as error:
            findings.append(Finding("refuses", {"what": what, "cause": error.message}))
        except ModelError as error:
            findings.append(Finding("fails", {"what": what, "cause": error.message}))
    costs, slow = _measure(probe)
    tool_format = probe.tool_format
    return TemplateReport(
        len(source),
        [*findings, *slow],
        arguments,
        None if tool_format is None or not probe.has_tools else tool_format.name,
        _continues(probe),
        costs,
    )


def _check_source(sources: Iterable[str]) -> tuple[list[Finding], list[str]]:
    worker = WorkerProcess(
        "mycli.runtime.tokenizer.template_check.source_worker", None, RENDER_MEMORY, reply_bytes=1 << 22
    )
    findings, variables = list[Finding](), set[str]()
    for source in sources:
        try:
            answer = worker.call(source, RENDER_SECONDS)
        except WorkerError as error:
            findings.append(Finding("syntax", {"line": 0, "cause": f"{error.kind}: {error.message:.200}"}))
            continue
        findings += [Finding(code, data) for code, data in answer["findings"]]
        variables |= set(answer["variables"])
    return findings, sorted(variables)


def _continues(probe: Probe) -> bool:
    # The server continues a reply by writing its beginning after the generation prompt. The template must write it so
    # too, as the last message or as an earlier one: some add an empty block of reasoning to one of the two.
    try:
        begun = probe.text([user(0)], more=True) + PLANTED_ANSWERS[0]
    except UserError:
        return False
    conversations = ([user(0), assistant(0)], [user(0), assistant(0), user(1)])
    return any(_begins_with(probe, messages, begun) for messages in conversations)


def _begins_with(probe: Probe, messages: Sequence[Message], begun: str) -> bool:
    try:
        return probe.text(messages).startswith(begun)
    except UserError:  # some refuse a conversation that ends with a reply
        return False


def _measure(probe: Probe) -> tuple[Costs | None, list[Finding]]:
    try:
        few, many = _render_seconds(probe, _FEW), _render_seconds(probe, _MANY)
    except UserError as error:
        return None, [Finding("fails", {"what": f"{_MANY} messages", "cause": error.message})]
    slow = []
    if many > _SLOW_SECONDS and many > _GROWTH * few:
        slow.append(Finding("slow", {"messages": _MANY, "milliseconds": round(many * 1e3), "growth": many / few}))
    return _costs(probe, many), slow


def _render_seconds(probe: Probe, count: int) -> float:
    messages = [message for index in range(count // 2) for message in (user(index % 3), assistant(index % 3))]
    times = []
    for _ in range(3):
        began = time.perf_counter()
        probe.text([*messages, user(0)], more=True)
        times.append(time.perf_counter() - began)
    return min(times)


def _costs(probe: Probe, seconds: float) -> Costs:
    tokenizer = probe.tokenizer
    if tokenizer is None:
        return Costs(seconds)

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special=False, allow_special=True))

    def total(messages: Sequence[Message], more: bool = False, tools: bool = False) -> int:
        return tokens(probe.text(messages, more=more, tools=tools))

    question = probe.text([user(0)])
    exchange = total([user(0), assistant(0), user(1)]) - total([user(0)])
    return Costs(
        seconds,
        start=tokens(question[: question.index(PLANTED_QUESTIONS[0])]) if PLANTED_QUESTIONS[0] in question else None,
        exchange=exchange - tokens(PLANTED_ANSWERS[0]) - tokens(PLANTED_QUESTIONS[1]),
        opening=total([user(0)], more=True) - tokens(question),
        tool=total([user(0)], tools=True) - tokens(question) if probe.has_tools else None,
    )
