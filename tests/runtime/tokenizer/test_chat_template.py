"""Test chat templates against transformers; a hostile one is stopped after two seconds."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from mycli.runtime.errors import ExitCode, ModelError, UsageError
from mycli.runtime.tokenizer import chat_template as template_module
from mycli.runtime.tokenizer.chat_template import (
    ChatTemplate,
    Message,
    TemplateOptions,
    effort_arguments,
    special_tokens_map,
)
from mycli.runtime.utils.json_fields import Fields

HERE = Path(__file__).parents[3] / "tests"
OWN = sorted((HERE / "support/templates").glob("*.jinja"))
SHARED = sorted((HERE.parents[1] / "shared/data/chat_templates").glob("*.jinja"))
HOSTILE = HERE / "attacks/templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wéather",
            "description": "Tells <the> weather & 'time'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CONVERSATIONS = {
    "one": [("user", "Hi there")],
    "system": [("system", "  Be brief. "), ("user", "Wer bist du?\n")],
    "turns": [("user", "1 + 1?"), ("assistant", "<think>easy</think>\n\n2 "), ("user", " and <b>'3'</b>? 🎉\n")],
    "system-turns": [("system", "Sys"), ("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D\n")],
    "empty": [("user", "")],
}


def objects(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def render(template: ChatTemplate, turns: list[tuple[str, str]], prompt: bool = True, **arguments: Any) -> str:
    tools = arguments.pop("tools", None)
    return template.render([objects(turns)], [tools] if tools else None, [arguments], prompt)[0]


def reference(source: str, turns: list[tuple[str, str]], prompt: bool, **arguments: Any) -> str | None:
    try:
        rendered, _ = render_jinja_template(
            [objects(turns)], chat_template=source, add_generation_prompt=prompt, **TOKENS, **arguments
        )
    except Exception:
        return None
    return str(rendered[0])


@pytest.fixture(scope="module")
def shared_child() -> ChatTemplate:
    return ChatTemplate({"default": ""}, TOKENS)


def with_source(child: ChatTemplate, source: str) -> ChatTemplate:
    child._sources["default"] = source  # the helper process is reused: only the text changes
    return child


@pytest.mark.parametrize("path", OWN + SHARED, ids=lambda path: path.stem)
def test_renders_as_transformers(path: Path, shared_child: ChatTemplate) -> None:
    source = path.read_text("utf-8")
    template = with_source(shared_child, source)
    rendered = 0
    for name, turns in CONVERSATIONS.items():
        for prompt in (True, False):
            for arguments in ({}, {"tools": TOOLS}, {"enable_thinking": False}, {"date_string": "1 May 2026"}):
                expected = reference(source, turns, prompt, **arguments)
                if expected is None:
                    with pytest.raises((UsageError, ModelError)):
                        render(template, turns, prompt, **arguments)
                    continue
                text = render(template, turns, prompt, **arguments)
                again = reference(source, turns, prompt, **arguments)  # the date may change between the two
                assert text in (expected, again), name
                rendered += 1
    assert rendered >= 10


INSTRUCTIONS = {
    "developer-first": [("developer", "Be brief."), ("user", "Hi")],
    "system-last": [("user", "Hi"), ("assistant", "Hello"), ("system", "Answer in French."), ("user", "Who?")],
    "both": [("system", "S"), ("developer", " D "), ("user", "A"), ("developer", "E"), ("system", "T"), ("user", "B")],
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_instructions_at_any_place(name: str, shared_child: ChatTemplate) -> None:
    """A template may have a role for developers and take system messages after the first message (Qwen 3.8)."""
    source = (HERE / "support/templates/instructions_anywhere.jinja").read_text("utf-8")
    turns = INSTRUCTIONS[name]
    for prompt in (True, False):
        for arguments in ({}, {"tools": TOOLS}, {"enable_thinking": False}):
            text = render(with_source(shared_child, source), turns, prompt, **arguments)
            assert text == reference(source, turns, prompt, **arguments)
            positions = [text.index(f"<|im_start|>{role}\n{content.strip()}<") for role, content in turns]
            assert positions == sorted(positions)


@pytest.mark.parametrize("statement", ["set _ =", "do"])
def test_a_template_may_keep_a_queue_in_a_list(statement: str, shared_child: ChatTemplate) -> None:
    """As that of Kimi K2 in GGUF files: the ids of tool calls are taken by the results that follow them."""
    source = (
        "{% set queue = namespace(ids=[]) %}{% for message in messages %}{% if message.role == 'assistant' %}"
        "{% STATEMENT queue.ids.append(message.content) %}{% elif queue.ids %}{{ queue.ids.pop(0) }}:{% endif %}"
        "{% endfor %}{{ queue.ids | length }}"
    ).replace("STATEMENT", statement)
    turns = [("assistant", "a"), ("assistant", "b"), ("user", "x"), ("assistant", "c"), ("user", "y")]
    for _ in range(2):  # a list of an earlier rendering is not found again
        assert render(with_source(shared_child, source), turns, False) == "a:b:1"


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        pytest.param("ssti-class", ("SecurityError",), id="C9-class"),
        pytest.param("ssti-lipsum-globals", ("SecurityError", "UndefinedError"), id="C9-lipsum-globals"),
        pytest.param("ssti-format", ("SecurityError",), id="C9-format"),
        pytest.param("ssti-namespace", ("SecurityError",), id="C9-namespace"),
        pytest.param("ssti-mutate", ("SecurityError",), id="C9-mutate"),
        pytest.param("ssti-include", ("TypeError",), id="C9-include"),
        pytest.param("bomb-nested-range", ("Deadline",), id="C10-nested-range"),
        pytest.param("bomb-multiply", ("MemoryError",), id="C10-multiply"),
        pytest.param("bomb-format-width", ("MemoryError",), id="C10-format-width"),
        pytest.param("bomb-lipsum", ("Deadline", "MemoryError"), id="C10-lipsum"),
        pytest.param("bomb-recursion", ("RecursionError", "Death"), id="C10-recursion"),
        pytest.param("bomb-output", ("OutputTooLong",), id="C10-output"),
        pytest.param("bomb-power", ("Deadline", "MemoryError"), id="C10-power"),
        pytest.param("error-syntax", ("TemplateSyntaxError",), id="C8-syntax"),
        pytest.param("error-undefined", ("UndefinedError",), id="C8-undefined"),
    ],
)
def test_hostile_template(name: str, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate({"default": (HOSTILE / f"{name}.jinja").read_text()}, TOKENS)
    with monkeypatch.context() as patch, pytest.raises(ModelError, match=f"chat template: ({'|'.join(kinds)}): "):
        if "Deadline" in kinds:
            patch.setattr(template_module, "RENDER_SECONDS", 0.2)
        render(template, CONVERSATIONS["one"])
    # The next template is rendered, by a new helper if the old one was killed.
    assert render(with_source(template, "{{ messages[0].content }}"), CONVERSATIONS["one"]) == "Hi there"


def test_refusal_carries_the_templates_own_words() -> None:  # C8
    template = ChatTemplate({"default": (HOSTILE / "error-raise.jinja").read_text()}, TOKENS)
    with pytest.raises(UsageError, match="refuses: only .*red") as caught:
        render(template, CONVERSATIONS["one"])
    assert caught.value.exit_code == ExitCode.USAGE


def test_helper_sees_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    template = ChatTemplate({"default": "x"}, TOKENS)
    render(template, CONVERSATIONS["one"])
    process = template._worker._process
    assert process is not None
    environ = Path(f"/proc/{process.pid}/environ")
    if not environ.exists():
        pytest.skip("no /proc")
    assert b"hf_secret" not in environ.read_bytes()
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libtorch" not in maps


def write(folder: Path, config: dict[str, Any], file: str | None = None) -> Fields:
    if file is not None:
        (folder / "chat_template.jinja").write_text(file)
    return Fields(config, "tokenizer_config.json")


def test_file_wins_over_config(tmp_path: Path) -> None:  # C7
    template = ChatTemplate.load(tmp_path, write(tmp_path, {"chat_template": "config"}, "file"))
    assert template is not None and template.source() == "file"


@pytest.mark.parametrize(
    "value",
    [
        [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}],
        {"default": "plain", "tool_use": "with tools"},
    ],
    ids=["C7-list", "C7-object"],
)
def test_named_templates(tmp_path: Path, value: Any) -> None:
    template = ChatTemplate.load(tmp_path, write(tmp_path, {"chat_template": value}))
    assert template is not None
    assert (template.source(), template.source(tools=True)) == ("plain", "with tools")
    assert render(template, CONVERSATIONS["one"], tools=TOOLS) == "with tools"


def test_named_template_files(tmp_path: Path) -> None:
    """As in Command A's folder; transformers reads them so."""
    config = write(tmp_path, {"chat_template": "config"}, "file")
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("tool_use.jinja", "rag.jinja", "notes.txt", ".hidden.jinja"):
        (tmp_path / "additional_chat_templates" / name).write_text(name)
    template = ChatTemplate.load(tmp_path, config)
    assert template is not None
    assert (template.source(), template.source(tools=True)) == ("file", "tool_use.jinja")
    assert template.with_options(TemplateOptions(name="rag")).source() == "rag.jinja"
    with pytest.raises(UsageError, match="it has: default, rag, tool_use|no chat template"):
        template.with_options(TemplateOptions(name="notes"))


def test_the_file_of_older_multimodal_models(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text('{"chat_template": "legacy"}')
    template = ChatTemplate.load(tmp_path, write(tmp_path, {}))
    assert template is not None and template.source() == "legacy"
    template = ChatTemplate.load(tmp_path, write(tmp_path, {"chat_template": "config"}))
    assert template is not None and template.source() == "config"


# As in the templates of LLaVA and SmolVLM; the second also takes texts.
PARTS = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }};{% endif %}"
    "{% endfor %}{% endfor %}"
)
REFUSING = "{% if messages[0].content is string %}{{ raise_exception('not a list') }}{% endif %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}.{% else %}" + PARTS + "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source, expected",
    [
        (PARTS, "Hello;Hi;"),
        (EITHER, "Hello.Hi."),
        ("{# type: text #}{% for m in messages %}{{ m.content }}{% endfor %}", "HelloHi"),
        ("{# type: text #}never", "never"),
        (REFUSING + PARTS, "Hello;Hi;"),
    ],
)
def test_contents_are_parts_only_for_templates_that_lose_a_text(source: str, expected: str) -> None:
    template = ChatTemplate({"default": source}, TOKENS)
    assert render(template, [("user", "Hello"), ("assistant", "Hi")]) == expected


def test_named_without_default(tmp_path: Path) -> None:  # C7
    template = ChatTemplate.load(tmp_path, write(tmp_path, {"chat_template": [{"name": "rag", "template": "x"}]}))
    assert template is not None
    with pytest.raises(ModelError, match="rag but no default"):
        template.source()


@pytest.mark.parametrize("value", [3, [{"name": "default"}], {"default": None}, [{"template": "x"}]])
def test_malformed_template_field(tmp_path: Path, value: Any) -> None:  # C7
    with pytest.raises(ModelError, match="chat_template"):
        ChatTemplate.load(tmp_path, write(tmp_path, {"chat_template": value}))


def test_no_template(tmp_path: Path) -> None:  # C6
    assert ChatTemplate.load(tmp_path, write(tmp_path, {})) is None


def test_template_file_rejected(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="not UTF-8"):
        ChatTemplate.load(tmp_path, write(tmp_path, {}))
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (template_module.MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(ModelError, match="at most"):
        ChatTemplate.load(tmp_path, write(tmp_path, {}))


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "messages", "bos_token", "add_generation_prompt", "allow_special", "self", "_hidden"],
)
def test_arguments_that_no_request_may_set(name: str) -> None:  # C11
    template = ChatTemplate({"default": "{{ " + name + " }}{{ own }}"}, {})
    with pytest.raises(UsageError, match=name):
        template.check_arguments({"own": 1, name: True})


def test_a_request_may_set_what_the_template_reads(tmp_path: Path) -> None:
    source = (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}{{ system }}"
        "{% if not date is defined %}{% set date = strftime_now('%Y') %}{% endif %}{{ date }}{{ ns.own }}"
    )
    template = ChatTemplate({"default": source, "tool_use": "{{ other }}"}, {})
    template.check_arguments(["date", "ns", "other", "enable_thinking"])
    for name in ("system", "strftime_now", "raise_exception", "own", "nosuch"):
        with pytest.raises(UsageError, match=name) as error:
            template.check_arguments([name])
        assert "date, date_string" in str(error.value.hint)
    with pytest.raises(UsageError, match="date"):  # a template that cannot be parsed has no arguments
        ChatTemplate({"default": "{% if %}{{ date }}"}, {}).check_arguments(["date"])


def test_the_switch_of_reasoning_has_two_names() -> None:
    template = ChatTemplate({"default": "{{ enable_thinking }} {{ thinking }}"}, {})
    assert render(template, [("user", "x")], enable_thinking=False) == "False False"
    assert render(template, [("user", "x")], enable_thinking=False, thinking=True) == "False True"
    assert render(template, [("user", "x")], thinking=True) == " True"


def test_arguments_reach_the_template() -> None:
    template = ChatTemplate({"default": "{{ enable_thinking }} {{ documents | tojson }}"}, {})
    assert render(template, [("user", "x")], enable_thinking=False, documents=[{"t": "é"}]) == 'False [{"t": "é"}]'


def test_options_replace_the_template_and_set_arguments() -> None:
    template = ChatTemplate({"default": "{{ a }}{{ enable_thinking }}", "other": "other {{ a }}"}, TOKENS)
    assert (
        render(template.with_options(TemplateOptions(name="other", arguments={"a": 1})), [("user", "x")]) == "other 1"
    )
    given = template.with_options(TemplateOptions(arguments={"a": 1, "enable_thinking": True}))
    assert render(given, [("user", "x")]) == "1True"
    assert render(given, [("user", "x")], enable_thinking=False) == "1False"  # a request has precedence
    assert render(template.with_options(TemplateOptions("{{ bos_token }}")), [("user", "x")]) == "<s>"
    with pytest.raises(UsageError, match="no chat template 'third'"):
        template.with_options(TemplateOptions(name="third"))
    for name in ("messages", "bos_token", "__class__", "a b"):
        with pytest.raises(UsageError, match="not possible"):
            TemplateOptions(arguments={name: 1})


def test_role_is_an_enumeration() -> None:  # C12
    with pytest.raises(UsageError, match="role"):
        Message("system<|im_end|>", "x")  # type: ignore[arg-type]  # a wrong type on purpose


def test_token_texts() -> None:
    raw = Fields(json.loads('{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": null}'), "x.json")
    assert special_tokens_map(raw) == {"bos_token": "<s>", "eos_token": "</s>"}
    with pytest.raises(ModelError, match="eos_token"):
        special_tokens_map(Fields({"eos_token": ["</s>"]}, "x.json"))


def test_efforts_that_hy3_does_not_know() -> None:
    source = (
        "{% if reasoning_effort is defined and reasoning_effort not in ['high', 'low', 'no_think'] %}"
        "{{ raise_exception('reasoning_effort error : ' + reasoning_effort) }}{% endif %}"
        "{{ reasoning_effort if reasoning_effort is defined else 'unset' }}"
    )
    template = ChatTemplate({"default": source}, {})
    expected = {
        "none": "no_think",
        "minimal": "no_think",
        "low": "low",
        "medium": "high",
        "high": "high",
        "max": "high",
    }
    for effort, known in expected.items():
        assert render(template, [("user", "x")], **effort_arguments(effort)) == known
    assert render(template, [("user", "x")], enable_thinking=True) == "high"
    assert render(template, [("user", "x")], enable_thinking=False, reasoning_effort="high") == "no_think"
    assert render(template, [("user", "x")]) == "unset"
    started = template.with_options(TemplateOptions(arguments=effort_arguments("medium")))
    assert render(started, [("user", "x")]) == "high"
    other = ChatTemplate({"default": "{{ reasoning_effort }}"}, {})
    assert render(other, [("user", "x")], reasoning_effort="medium") == "medium"
