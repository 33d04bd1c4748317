"""Test that each planted fault of a chat template is found, and none in a good one; real templates have known ones."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mycli.cli.template_messages import TEMPLATE_MESSAGES, template_message
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.tokenizer.chat_template import ChatTemplate
from mycli.runtime.tokenizer.template_check import checker
from mycli.runtime.tokenizer.template_check.checker import check_template
from mycli.runtime.tokenizer.template_check.finding import SEVERITIES, Finding, excerpts
from mycli.runtime.tokenizer.template_check.probe import Probe
from mycli.runtime.tokenizer.template_check.reasoning import check_reasoning
from mycli.runtime.tokenizer.template_check.source_worker import handler
from mycli.runtime.tokenizer.template_check.tokens import check_tokens
from mycli.runtime.tokenizer.template_check.tools import check_tools
from mycli.runtime.tokenizer.template_check.turns import check_contents, check_roles, check_turns
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.paths import PICO, ROOT
from tests.support.small_tokenizers import added, make

TEMPLATES = ROOT / "tests/support/templates"
REAL = ROOT.parent / "shared/data/chat_templates"
REAL = REAL if REAL.is_dir() else ROOT.parents[1] / "shared/data/chat_templates"
GOOD = (TEMPLATES / "agent.jinja").read_text()
LOOP = "{%- for message in messages %}\n"
OPENING = "{%- if add_generation_prompt %}<|im_start|>assistant\n"
THOUGHT = "{% if {condition} %}<think>{{ message.reasoning_content }}</think>{% endif %}"
CALL = '"arguments": {{ call.function.arguments | tojson }}'
CONTENT = "<|im_start|>{{ message.role }}\n{{ message.content }}"


def refusing(condition: str) -> tuple[str, str]:
    return LOOP, f"{LOOP}{{% if {condition} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"


def thinking(condition: str) -> tuple[str, str]:
    shown = THOUGHT.replace("{condition}", f"message.reasoning_content and ({condition})")
    return CONTENT, CONTENT.replace("\n{{", f"\n{shown}{{{{")


# code -> a change of the good template that plants it
FAULTS: dict[str, tuple[str, str]] = {
    "content-altered": (CONTENT, CONTENT.replace("content }}", "content | e }}")),
    "content-trimmed": (CONTENT, CONTENT.replace("content }}", "content | trim }}")),
    "history-changes": ("{%- if tools %}", "{{ messages | length }}{%- if tools %}"),
    "reply-opening-changes": (OPENING, OPENING + "<think>"),
    "reply-altered": (CONTENT, CONTENT.replace("\n{{", "\n{{ ' ' if message.role == 'assistant' }}{{")),
    "no-generation-prompt": ("{%- if add_generation_prompt %}", "{%- if false %}"),
    "turns-must-alternate": refusing("message.role == 'user' and not loop.last and loop.nextitem.role == 'user'"),
    "system-refused": refusing("message.role == 'system'"),
    "system-dropped": ("{% elif messages[0].role == 'system' %}", "{% elif false %}"),
    "system-not-first": (
        "{% elif messages[0].role == 'system' %}",
        "{% elif messages[0].role == 'system' %}{{ messages[1].content }}",
    ),
    "later-system-refused": refusing("message.role == 'system' and not loop.first"),
    "later-system-dropped": ("!= 'system' or not loop.first", "!= 'system'"),
    "tools-not-rendered": ("{{ tool | tojson }}", "a tool"),
    "parameters-not-rendered": ("{{ tool | tojson }}", "{{ tool.function.name }}"),
    "call-not-rendered": ("message.tool_calls or []", "[]"),
    "call-not-parsed": (CALL, CALL.replace(" | tojson", "")),
    "calls-refused": refusing("message.tool_calls"),
    "several-calls-refused": refusing("message.tool_calls and message.tool_calls | length > 1"),
    "call-ids-refused": refusing("message.tool_call_id and message.tool_call_id | length != 9"),
    "result-not-rendered": ("<tool_response>\n{{ message.content }}", "<tool_response>"),
    "unknown-call-format": ("<tool_call>", "<a_call>"),
    "reasoning-dropped": ("{%- if tools %}", "{# <think> #}{%- if tools %}"),
    "reasoning-dropped-later": thinking("loop.last or message.tool_calls"),
    "reasoning-dropped-in-loop": thinking("not message.tool_calls"),
    "bos-twice": ("{%- if tools %}", "<|endoftext|><|endoftext|>{%- if tools %}"),
    "turn-not-ended": ("{% endfor %}<|im_end|>", "{% endfor %}<|im_start|>"),
    "call-not-ended": ("{% endfor %}<|im_end|>", "{% endfor %}{{ '' if message.tool_calls else '<|im_end|>' }}"),
    "marker-not-a-token": (CONTENT, CONTENT.replace("<|im_start|>", "<|im_start|><|role|>")),
    "spelled-token-refused": refusing("'<|im_end|>' in message.content"),
}  # fmt: skip  # one line a fault, as long as it is
SOURCES = {
    "syntax": "{% for x in %}",
    "private-attribute": "{{ x.__class__ }}",
    "other-file": "{% include 'a' %}",
    "random": "{{ [1, 2] | random }}",
    "time-of-day": "{{ strftime_now('%H:%M') }}",
    "date": "{{ strftime_now('%d %b %Y') }}",
}
CHECKS = (check_contents, check_roles, check_turns, check_tools, check_reasoning, check_tokens)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_model_folder(PICO).tokenizer()


@pytest.fixture(scope="module")
def child() -> ChatTemplate:
    return ChatTemplate({"default": ""}, {"bos_token": "<s>", "eos_token": "</s>"})


def probe_of(child: ChatTemplate, source: str, tokenizer: Tokenizer | None = None) -> Probe:
    child._sources["default"] = source  # the worker process is reused: only the text changes
    if tokenizer is None:
        return Probe(child)
    tokenizer.template = child
    return Probe(child, {}, tokenizer, frozenset(tokenizer.eos))


def found(probe: Probe) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(probe)]


def test_a_good_template_has_no_fault(child: ChatTemplate, tokenizer: Tokenizer) -> None:
    assert found(probe_of(child, GOOD, tokenizer)) == []


def test_reasoning_that_is_kept_is_no_fault(child: ChatTemplate, tokenizer: Tokenizer) -> None:
    old, new = thinking("true")
    assert not list(check_reasoning(probe_of(child, GOOD.replace(old, new), tokenizer)))


@pytest.mark.parametrize("code", FAULTS)
def test_a_planted_fault_is_found(code: str, child: ChatTemplate, tokenizer: Tokenizer) -> None:
    old, new = FAULTS[code]
    assert old in GOOD
    probe = probe_of(child, GOOD.replace(old, new), tokenizer)
    # A refusal ends the check that meets it, so the checks run one by one.
    codes: dict[str, Finding] = {}
    for check in CHECKS:
        try:
            codes |= {finding.code: finding for finding in check(probe)}
        except Exception as error:
            assert "no" in str(error)
    assert code in codes, sorted(codes)
    assert template_message(codes[code])


def test_a_template_without_tools_is_noted(child: ChatTemplate) -> None:
    probe = probe_of(child, (TEMPLATES / "chatml.jinja").read_text())
    assert [finding.code for finding in found(probe)] == ["no-tools"]


def test_the_turn_at_fault_is_shown(child: ChatTemplate) -> None:
    old, new = FAULTS["reply-altered"]
    (finding, *_) = check_turns(probe_of(child, GOOD.replace(old, new)))
    assert finding.data["scenario"] == "plain turns" and str(finding.data["before"]).endswith("assistant\n")
    assert str(finding.data["expected"]).startswith("By") and str(finding.data["actual"]).startswith(" By")
    assert excerpts("abc", "abd") == {"before": "ab", "expected": "c", "actual": "d"}


@pytest.mark.parametrize(
    ("code", "calls"), [("unknown-call-format", 1), ("call-not-parsed", 1), ("call-not-parsed", 2)]
)
def test_a_finding_holds_the_first_200_characters_of_a_call(code: str, calls: int, child: ChatTemplate) -> None:
    long = f"{{{{ 'x' * 300 if message.tool_calls | length == {calls} else call.function.arguments | tojson }}}}"
    tag = "tool_call" if code == "call-not-parsed" else "a_call"
    source = GOOD.replace(CALL, f'"arguments": {long}').replace("<tool_call>", f"<{tag}>")
    (finding,) = check_tools(probe_of(child, source))
    beginning = f'<{tag}>\n{{"name": "find_herons", "arguments": '
    assert finding.code == code and finding.data["written"] == beginning.ljust(200, "x")


def test_a_call_is_read_after_a_turn_without_the_opening_of_a_reply(child: ChatTemplate) -> None:
    """The templates of QwQ and Gemma 4 open reasoning, and earlier turns do not: both begin like the call's mark."""
    for opening in ("<think>", "<tool_calm>", "<think>" * 20):
        assert not list(check_tools(probe_of(child, GOOD.replace(OPENING, OPENING + opening))))


def test_a_template_that_renders_the_first_call_only_refuses_several(child: ChatTemplate) -> None:
    (finding,) = check_tools(
        probe_of(child, GOOD.replace("in message.tool_calls", "in (message.tool_calls or [])[:1]"))
    )
    assert finding.code == "several-calls-refused" and "only the first" in template_message(finding)


def test_calls_between_control_tokens_are_all_read(child: ChatTemplate) -> None:
    """Gemma 4, Kimi K2 and Solar Open: a reply that is cut at such a token has one call less."""
    begin = "<|tool_call_begin|>functions.{{ call.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
    source = GOOD.replace('<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{', f"{begin}{{{{")
    source = source.replace("tojson }}}\n</tool_call>", "tojson }}<|tool_call_end|>")
    assert source.count("<|tool_call") == 3
    assert not list(check_tools(probe_of(child, source)))


def test_turns_without_control_tokens_can_be_forged(child: ChatTemplate, tokenizer: Tokenizer) -> None:
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    assert not list(check_tokens(probe_of(child, turns, tokenizer)))
    codes = [finding.code for finding in check_tokens(probe_of(child, turns.replace("<|im_end|>", "\n"), tokenizer))]
    assert codes == ["turn-not-ended", "turns-can-be-forged"]


def test_thinking_turned_off_is_tried(child: ChatTemplate) -> None:
    silent = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    (finding,) = check_turns(probe_of(child, GOOD.replace(OPENING, OPENING + silent)))
    assert (finding.code, finding.data["scenario"]) == ("reply-opening-changes", "turns with enable_thinking=false")


@pytest.mark.parametrize("code", SOURCES)
def test_a_fault_of_the_source_is_found(code: str) -> None:
    (finding,) = handler(None)(SOURCES[code])["findings"]
    assert finding[0] == code and finding[1]["line"] == 1
    assert template_message(Finding(*finding))


def test_arguments_are_variables_that_a_caller_can_set() -> None:
    source = (
        "{% if a is not defined %}{% set a = 1 %}{% endif %}{% if b %}{% set c = 1 %}{% endif %}{{ c }}{{ messages }}"
    )
    assert handler(None)(source)["variables"] == ["a", "b", "messages"]


def test_a_missing_start_token_is_found(child: ChatTemplate, tmp_path: Path) -> None:
    start = {"id": "<bos>", "ids": [257], "tokens": ["<bos>"]}
    parts = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": {"<bos>": start}}
    tokens = [added(256, "<end>", special=True), added(257, "<bos>", special=True)]
    tokenizer = make(tmp_path, added_tokens=tokens, post_processor=processor)
    turns = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    codes = {finding.code for finding in check_tokens(probe_of(child, turns, tokenizer))}
    assert "bos-missing" in codes
    codes = {finding.code for finding in check_tokens(probe_of(child, "<bos>" + turns, tokenizer))}
    assert not codes & {"bos-missing", "bos-twice"}


def test_time_beyond_the_growth_of_the_conversation_is_slow(
    child: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = probe_of(child, GOOD)
    times = {64: 0.01, 256: 0.16}
    monkeypatch.setattr(checker, "_render_seconds", lambda probe, count: times[count])
    assert [finding.code for finding in checker._measure(probe)[1]] == ["slow"]
    times[256] = 0.05
    assert not checker._measure(probe)[1]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checker, "_render_seconds", lambda probe, count: 0.0)
    yield


def test_the_report_of_a_model(child: ChatTemplate, tokenizer: Tokenizer, quick: None) -> None:
    report = check_template(probe_of(child, GOOD, tokenizer))
    assert report.tool_format == "hermes" and report.continues and not report.findings
    costs = report.costs
    assert costs is not None and costs.start == 3 and costs.opening == 3 and costs.exchange == 10
    assert costs.tool == 212


def test_the_costs_of_an_exchange_are_those_of_its_marks(child: ChatTemplate, tmp_path: Path, quick: None) -> None:
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"
    source = "{% if tools %}Tools!{% endif %}" + turns + "{% if add_generation_prompt %}assistant: {% endif %}"
    costs = check_template(probe_of(child, source, make(tmp_path))).costs  # a token for each byte
    assert costs is not None and costs.exchange == len("assistant: user: ") + 2 and costs.start == len("user: ")
    assert costs.tool == len("Tools!") and costs.opening == len("assistant: ")
    costs = check_template(probe_of(child, turns, make(tmp_path))).costs
    assert costs is not None and costs.tool is None, "the template has none"


def test_what_cannot_be_rendered_ends_the_report(child: ChatTemplate, quick: None) -> None:
    report = check_template(probe_of(child, "{{ messages.x.y }}"))
    assert [finding.code for finding in report.findings] == ["fails"]
    refusing_all = replace(Probe(ChatTemplate({"default": "{% for m in %}"}, {})))
    assert [finding.code for finding in check_template(refusing_all).findings] == ["syntax"]


def test_every_code_has_a_severity_and_a_message() -> None:
    assert SEVERITIES.keys() == TEMPLATE_MESSAGES.keys()
    tested = {*FAULTS, *SOURCES, "no-tools", "slow", "fails", "bos-missing", "own-variable", "refuses"}
    tested.add("turns-can-be-forged")
    assert tested == SEVERITIES.keys()


KNOWN = {
    "HuggingFaceTB-SmolLM3-3B": {"no-tools", "later-system-dropped", "reasoning-dropped"},
    "Qwen-Qwen2.5-7B-Instruct": set(),
    "Qwen-Qwen3-0.6B": {"reasoning-dropped-later", "reply-opening-changes"},
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": {"no-tools", "reasoning-dropped", "reply-opening-changes"},
    "google-gemma-2-2b-it": {"no-tools", "content-trimmed", "system-refused", "turns-must-alternate"},
    "ibm-granite-granite-3.3-2B-Instruct": {"reasoning-dropped"},
    "meta-llama-Llama-3.1-8B-Instruct": {"content-trimmed", "several-calls-refused"},
    "meta-llama-Llama-3.2-3B-Instruct": {"content-trimmed", "several-calls-refused"},
    "microsoft-Phi-3.5-mini-instruct": {"no-tools"},
    "mistralai-Mistral-Nemo-Instruct-2407": {
        "system-not-first", "later-system-refused", "turns-must-alternate", "history-changes", "call-ids-refused",
    },
}  # fmt: skip  # one line a template


@pytest.mark.skipif(not REAL.is_dir(), reason="no templates of real models here")
@pytest.mark.parametrize("name", KNOWN)
def test_real_templates(name: str, child: ChatTemplate) -> None:
    probe = probe_of(child, (REAL / f"{name}.jinja").read_text("utf-8"))
    assert {finding.code for finding in found(probe)} == KNOWN[name]


@pytest.mark.parametrize(
    ("source", "findings"),
    [
        ("{{ strftime_now() }}{{ strftime_now(format) }}", [("date", "", 1)]),
        ("\n{{ strftime_now('%-H h') }}", [("time-of-day", "%-H h", 2)]),
        ("{{ strftime_now('%d 100%%H') }}", [("date", "%d 100%%H", 1)]),
        ("{{ now('%H') }}{{ a.strftime_now('%H') }}", []),
        ("{{ a.b }}{{ a['b'] }}{{ a[b] }}{{ a['_b'] }}{{ a[0] }}", []),
        ("{{ a._b }}\n{{ a['__c'] }}", [("private-attribute", "_b", 1), ("private-attribute", "__c", 2)]),
        ("{{ a | random }}\n{{ b | random }}{{ c | first }}", [("random", "random", 1)]),
    ],
)
def test_each_use_is_found_once_with_its_line(source: str, findings: list[tuple[str, str, int]]) -> None:
    found = handler(None)(source)["findings"]
    assert [(code, data["value"], data["line"]) for code, data in found] == findings


@pytest.mark.parametrize(("condition", "continues"), [("loop.last", True), ("true", False)], ids=["last", "every"])
def test_replies_that_a_template_refuses_are_not_continued(
    condition: str, continues: bool, child: ChatTemplate, quick: None
) -> None:
    """A template that refuses a reply as the last message shows by an earlier reply how replies open."""
    old, new = refusing(f"message.role == 'assistant' and {condition}")
    assert check_template(probe_of(child, GOOD.replace(old, new))).continues == continues


def test_replies_are_not_continued_where_a_prompt_for_one_is_refused(child: ChatTemplate, quick: None) -> None:
    assert not check_template(probe_of(child, GOOD.replace(*refusing("add_generation_prompt")))).continues


def test_a_template_that_no_worker_can_check_has_no_line(child: ChatTemplate, quick: None) -> None:
    (finding,) = check_template(probe_of(child, "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}")).findings
    assert finding.code == "syntax" and finding.data["line"] == 0
    assert str(finding.data["cause"]).startswith("RecursionError: ")
