"""Test the kinds of tokens, valid calls, and the counts of a model's replies."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mycli.quant.calls import measure
from mycli.quant.calls.measure import (
    StructuredReply,
    _agreement,
    _is_expected,
    count_calls,
    is_valid,
    measure_structure,
    structured_reply,
)
from mycli.quant.calls.prompts import TOOLS, call_prompts
from mycli.quant.calls.record import CallCounts, TokenAgreement
from mycli.quant.layer_streaming import StreamedModel
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.replies.completion import Completion
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.paths import PICO, ROOT

TEMPLATES = ROOT / "tests" / "support" / "templates"
THINKING = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>{% for name, value in call.function.arguments.items() %}
<parameter={{ name }}>
{{ value }}
</parameter>{% endfor %}

</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{# tools #}"""


def with_template(folder: Path, template: str, *, weights: bool = False) -> Path:
    folder.mkdir()
    for path in PICO.iterdir():
        if weights or path.suffix == ".json":
            shutil.copy(path, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return folder


def texts(tokenizer: Tokenizer, reply: StructuredReply, kind: str | None) -> str:
    pairs = zip(reply.tokens, reply.kinds, strict=True)
    return b"".join(tokenizer.token_bytes(token) for token, name in pairs if name == kind).decode()


def test_kinds_of_a_json_call(tmp_path: Path) -> None:
    folder = with_template(tmp_path / "model", (TEMPLATES / "tool_names.jinja").read_text())
    tokenizer = Tokenizer.load(folder, 4096)
    music = next(prompt for prompt in call_prompts() if prompt.question.startswith("Play music by Mozart"))
    reply = structured_reply(tokenizer, music)
    assert tokenizer.decode(reply.prompt).endswith("Play music by Mozart, shuffled.\nassistant\n")
    assert texts(tokenizer, reply, "names") == "play_musicartistshuffle"
    assert texts(tokenizer, reply, None) == "Mozart true"
    assert texts(tokenizer, reply, "markers") == "toolcallnameargumentstoolcall<|im_end|>"
    assert texts(tokenizer, reply, "punctuation") == '<_>\n{"": "", "": {"": "", "":}}\n</_>'
    adding = structured_reply(tokenizer, call_prompts()[4])
    assert texts(tokenizer, adding, "names") == "add_numbersab" and texts(tokenizer, adding, None) == "1230"


def test_reasoning_is_no_structure_and_its_tags_are(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(with_template(tmp_path / "model", THINKING), 4096)
    reply = structured_reply(tokenizer, call_prompts()[0])
    assert texts(tokenizer, reply, None) == "The user needs get_weather.Paris"
    assert texts(tokenizer, reply, "names") == "get_weathercity"
    assert "think" in texts(tokenizer, reply, "markers") and "function" in texts(tokenizer, reply, "markers")


def test_a_call_may_begin_with_the_name_of_its_function(tmp_path: Path) -> None:
    before, _, call = (TEMPLATES / "tool_names.jinja").read_text().partition("<tool_call>")
    name = "{{ call.function.name }}"
    arguments = "{% for name, value in call.function.arguments.items() %}>{{ name }}={{ value }}{% endfor %}"
    template = before + name + arguments + call.partition("</tool_call>")[2]
    tokenizer = Tokenizer.load(with_template(tmp_path / "model", template), 4096)
    reply = structured_reply(tokenizer, call_prompts()[0])
    assert tokenizer.decode(reply.tokens).startswith("get_weather>city=Paris")
    assert texts(tokenizer, reply, "names") == "get_weathercity" and texts(tokenizer, reply, None) == "Paris"


@pytest.mark.parametrize(
    ("name", "arguments", "valid"),
    [
        ("convert_units", '{"value": 1.5, "unit": "km"}', True),
        ("convert_units", '{"value": 1.5, "unit": "m"}', False),
        ("convert_units", '{"value": "1.5", "unit": "km"}', False),
        ("convert_units", '{"value": true, "unit": "km"}', False),
        ("convert_units", '{"value": 1.5}', False),
        ("convert_units", '{"value": 1, "unit": "km", "x": 1}', False),
        ("convert_units", '{"value": 1, "unit": "km"', False),
        ("convert_units", "[]", False),
        ("convert", '{"value": 1, "unit": "km"}', False),
        ("set_timer", '{"minutes": 1.5}', False),
        ("play_music", '{"artist": "a", "shuffle": true}', True),
        ("buy_items", '{"items": ["a"]}', True),
        ("buy_items", '{"items": [1]}', False),
        ("buy_items", '{"items": "a"}', False),
    ],
)
def test_valid_calls(name: str, arguments: str, valid: bool) -> None:
    assert is_valid(((name, arguments),), list(TOOLS.values())) is valid
    right = ("set_timer", '{"minutes": 1}')
    assert is_valid((right, (name, arguments)), list(TOOLS.values())) is valid, "each call counts"


def test_a_reply_without_calls_is_not_valid() -> None:
    assert not is_valid((), list(TOOLS.values()))


def test_the_expected_call_is_one_with_equal_arguments() -> None:
    prompt = call_prompts()[0]
    right = prompt.name, json.dumps(dict(prompt.arguments), indent=2)
    assert _is_expected((right,), prompt)
    for wrong in (("other", right[1]), (prompt.name, "{}"), (prompt.name, right[1][:-1])):
        assert not _is_expected((wrong,), prompt)
    assert not _is_expected((), prompt) and not _is_expected((right, right), prompt)


def test_no_token_of_a_kind_agrees_entirely() -> None:
    kl, same = torch.tensor([0.5, 0.25, 4.0]), torch.tensor([1.0, 0.0, 0.0])
    assert _agreement(kl, same, (True, True, False)) == TokenAgreement(2, 0.375, 0.5)
    assert _agreement(kl, same, (False, False, False)) == TokenAgreement(0, 0.0, 1.0)


def test_replies_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_template(tmp_path / "model", (TEMPLATES / "tool_names.jinja").read_text(), weights=True)
    opened = open_model_folder(folder)
    placement = EngineConfig(device="cpu").place(opened.config)
    monkeypatch.setattr(measure, "_REPLY_TOKENS", 2)
    assert count_calls(opened, placement) == CallCounts(0, 0), "pico itself writes no calls"

    # The expected calls, but: one with another value, two of another tool that only one prompt offers, one cut off.
    tokenizer, prompts = opened.tokenizer(), call_prompts()
    replies = {reply.prompt: list(reply.tokens) for reply in (structured_reply(tokenizer, p) for p in prompts)}
    keys = list(replies)
    replies[keys[0]] = replies[keys[1]]
    replies[keys[3]] = replies[keys[4]] = replies[keys[9]]
    replies[keys[5]] = replies[keys[5]][:-20]

    def scripted(completion: Completion, output: object) -> str:
        completion.tokens = replies[completion.request.prompt][:-1]
        completion.finish_reason = "stop"
        return ""

    monkeypatch.setattr(Completion, "take", scripted)
    assert ["send_message" in str(prompts[index].tools) for index in (3, 4)] == [True, False]
    assert count_calls(opened, placement) == CallCounts(valid=22, expected=20)


def test_structure_is_compared_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = call_prompts()[::8]
    monkeypatch.setattr(measure, "call_prompts", lambda: few)
    folder = with_template(tmp_path / "model", (TEMPLATES / "tool_names.jinja").read_text(), weights=True)
    opened = open_model_folder(folder)
    placement = EngineConfig(device="cpu", dtype="float32").place(opened.config)
    model, other = StreamedModel(opened, placement), StreamedModel(opened, placement)
    structure, kinds = measure_structure(model, other)
    assert structure.kl < 1e-9 and structure.same_top1 == 1.0
    assert set(kinds) == {"markers", "names", "punctuation"}
    assert structure.tokens == sum(kind.tokens for kind in kinds.values())
    other.head.replace(model.head.weight() * torch.where(torch.arange(4096) % 2 == 0, 1.0, 0.9).unsqueeze(1))
    changed, parts = measure_structure(model, other)
    mean = sum(part.kl * part.tokens for part in parts.values()) / changed.tokens
    assert changed.kl > 1e-3 and changed.kl == pytest.approx(mean) and changed.same_top1 < 1.0
