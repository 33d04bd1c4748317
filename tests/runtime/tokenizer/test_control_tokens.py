"""Test that control tokens spelled in a message stay text, whatever the template does; and refused templates."""

from pathlib import Path

import pytest

from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.tokenizer import tokenizer as tokenizer_module
from mycli.runtime.tokenizer.chat_template import Message
from tests.support.small_tokenizers import SIMPLE, added, make

TOOL = [added(256, "<end>", special=True), added(257, "<tool>"), added(258, "  ")]


def test_token_not_marked_special_is_text_too(tmp_path: Path) -> None:  # C12
    tokenizer = make(tmp_path, SIMPLE + "<tool>", added_tokens=TOOL)
    user = tokenizer.apply_chat_template([Message("user", "a<tool>b")])
    assert [i for i in user if i > 255] == [256, 257] and user[-1] == 257
    assert tokenizer.decode(user) == "user:a<tool>b<tool>"
    assert [i for i in tokenizer.encode("a<tool>", add_special=False) if i > 255] == []


def test_what_the_assistant_said_keeps_its_tokens(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, SIMPLE, added_tokens=TOOL)
    ids = tokenizer.apply_chat_template([Message("user", "x"), Message("assistant", "<tool>f<end>")])
    assert [i for i in ids if i > 255] == [256, 257, 256]  # <tool> is one, the spelled <end> is not
    ids = tokenizer.apply_chat_template([Message("user", "<end>"), Message("assistant", "<tool>f<end>")])
    assert [i for i in ids if i > 255] == [256, 257, 256]


def test_blanks_among_the_added_tokens_are_ordinary(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, SIMPLE, added_tokens=TOOL)
    assert 258 in tokenizer.apply_chat_template([Message("user", "a  b")])


def test_tools_and_arguments_are_text_too(tmp_path: Path) -> None:  # C12
    tokenizer = make(tmp_path, "{{ tools | tojson }}{{ documents | tojson }}<end>")
    ids = tokenizer.apply_chat_template(
        [Message("user", "x")], tools=[{"<end>": ["<end>"]}], documents=[{"t": "<end>"}]
    )
    assert ids.count(256) == 1
    assert tokenizer.decode(ids) == '[{"<end>": ["<end>"]}][{"t": "<end>"}]'


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{{ messages | tojson(ensure_ascii=true) }}", id="C13-marks-escaped"),
        pytest.param(
            "{% if '<end>' in messages[0].content %}<end>{% endif %}{{ messages[0].content }}", id="C12-reacts"
        ),
    ],
)
def test_template_that_defeats_the_marks_is_refused(tmp_path: Path, template: str) -> None:
    tokenizer = make(tmp_path, template)
    with pytest.raises(UsageError, match="depends on a control token"):
        tokenizer.apply_chat_template([Message("user", "a<end>b")])
    assert 256 in tokenizer.apply_chat_template([Message("user", "a<end>b")], allow_special=True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("m.content | trim", "a<end>b"),
        ("m.content[1:]", "a<end>b "),
        ("m.content[:-1]", " a<end>b"),
        ("m.content | upper", " A<END>B "),
        ("m.content.split('<end>')[-1]", "b "),
        ("m.content | replace('a', '')", " <end>b "),
        ("m.content.split('>')[0]", " a<end"),
    ],
)
def test_templates_may_change_the_text(tmp_path: Path, change: str, expected: str) -> None:
    tokenizer = make(tmp_path, "{% for m in messages %}{{ " + change + " }}<end>{% endfor %}")
    ids = tokenizer.apply_chat_template([Message("user", " a<end>b ")])
    assert [i for i in ids if i > 255] == [256] and ids[-1] == 256
    assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize("cut", ["m.content[1:]", "m.content[:-1]"])
def test_a_mark_lost_to_the_template_frees_nothing(tmp_path: Path, cut: str) -> None:  # C13
    tokenizer = make(tmp_path, "{% for m in messages %}{{ " + cut + " }}{% endfor %}")
    assert tokenizer.apply_chat_template([Message("user", "<end>")]) == tokenizer.encode("<end>", add_special=False)


def test_other_characters_that_normalize_to_a_control_token(tmp_path: Path) -> None:  # C12
    tokens = [added(256, "<end>", special=True, normalized=True)]
    tokenizer = make(tmp_path, SIMPLE, added_tokens=tokens, normalizer={"type": "NFKC"})
    text = "\uff1cend\uff1e"
    assert 256 not in tokenizer.encode(text, add_special=False)
    assert tokenizer.apply_chat_template([Message("user", text)]).count(256) == 1
    assert 256 in tokenizer.encode(text, add_special=False, allow_special=True)


def test_tokens_that_swallow_blanks(tmp_path: Path) -> None:
    tokens = [added(256, "<end>", special=True, rstrip=True, lstrip=True)]
    tokenizer = make(tmp_path, "<end>\n {{ messages[0].content }} <end> {{ messages[0].content }}", added_tokens=tokens)
    assert tokenizer.decode(tokenizer.apply_chat_template([Message("user", "x")])) == "xx"
    assert tokenizer.decode(tokenizer.apply_chat_template([Message("user", "<end>")])) == "<end><end>"


BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"<bos>": {"id": "<bos>", "ids": [257], "tokens": ["<bos>"]}},
}
BOS_TOKENS = [added(256, "<end>", special=True), added(257, "<bos>", special=True)]


@pytest.mark.parametrize("text", ["hi", "h<end>i"])
def test_one_bos(tmp_path: Path, text: str) -> None:  # C16
    tokenizer = make(tmp_path, "{{ bos_token }}" + SIMPLE, added_tokens=BOS_TOKENS, post_processor=BOS)
    assert (tokenizer.bos, tokenizer.eos) == (257, (256,))
    assert tokenizer.apply_chat_template([Message("user", text)]).count(257) == 1
    assert tokenizer.encode(text, add_special=True) == [257, *tokenizer.encode(text, add_special=False)]
    assert tokenizer.encode(text, add_special=False).count(257) == 0


def test_no_template(tmp_path: Path) -> None:  # C6
    tokenizer = make(tmp_path)
    assert tokenizer.encode("hi", add_special=True)
    with pytest.raises(ModelError, match="no chat_template") as caught:
        tokenizer.apply_chat_template([Message("user", "hi")])
    assert caught.value.code == "continue-text"


def test_chat_refusals(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, SIMPLE)
    with pytest.raises(UsageError, match="at least one message"):
        tokenizer.apply_chat_template([])
    with pytest.raises(UsageError, match="chat_template"):  # C11
        tokenizer.apply_chat_template([Message("user", "x")], chat_template="{{ 1 }}")


def test_text_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # C14
    tokenizer = make(tmp_path, SIMPLE)
    for call in (
        lambda text: tokenizer.encode(text, add_special=False),
        lambda text: tokenizer.apply_chat_template([Message("user", text)]),
        lambda text: tokenizer.apply_chat_template([Message("user", "x")], documents=[{"t": text}]),
    ):
        with pytest.raises(UsageError, match="not valid UTF-8 at character 2"):
            call("ab\ud800")
        monkeypatch.setattr(tokenizer_module, "MAX_TEXT", 100)
        with pytest.raises(UsageError, match="at most 100"):
            call("a" * 101)
        monkeypatch.undo()
    assert tokenizer.decode(tokenizer.encode("\0", add_special=False)) == "\0"


def test_missing_special_names_are_no_ids(tmp_path: Path) -> None:
    assert make(tmp_path).bos is None  # "<bos>" is named in the configuration but not in the vocabulary
