"""Tokenizers: text survives, conversations encode as transformers encodes them, spelled control tokens stay text."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.tokenizer import backend as encoding
from mycli.runtime.tokenizer import tokenizer as tokenizer_module
from mycli.runtime.tokenizer.backend import GuardedPipeline, Pipeline
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.tokenizer.stream import StreamDecoder
from mycli.runtime.tokenizer.tokenizer import Tokenizer

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared"
ATTACKS = ROOT / "tests/attacks/tokenizers"
TEMPLATES = {
    "pico": ROOT / "tests/support/templates/chatml.jinja",
    "llama-3": SHARED / "data/chat_templates/meta-llama-Llama-3.1-8B-Instruct.jinja",
    "qwen2": SHARED / "data/chat_templates/Qwen-Qwen2.5-7B-Instruct.jinja",
}
ROWS = {"pico": 4096, "llama-3": 128_256, "qwen2": 151_936}
NAMES = {
    "pico": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    "llama-3": {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot_id|>"}},
    "qwen2": {"eos_token": "<|im_end|>"},
}


def tokenizer_file(name: str) -> Path:
    if name != "pico":
        return SHARED / f"data/tokenizers/{name}.json"
    packaged = ROOT / "runtime/pico/pico/tokenizer.json"
    return packaged if packaged.exists() else SHARED / "demo_model/pico/tokenizer.json"


def existing(*names: str) -> list[Any]:
    absent = pytest.mark.skip(reason="the full-size tokenizers are not beside this checkout")
    return [name if tokenizer_file(name).exists() else pytest.param(name, marks=absent) for name in names]


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    shutil.copy(tokenizer_file(name), folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMES[name]))
    shutil.copy(TEMPLATES[name], folder / "chat_template.jinja")
    ours = Tokenizer.load(folder, ROWS[name])
    plain = {key: value if isinstance(value, str) else value["content"] for key, value in NAMES[name].items()}
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=TEMPLATES[name].read_text(), **plain
    )
    return ours, theirs


ALL = pytest.mark.parametrize("pair", existing("pico", "llama-3", "qwen2"), indirect=True)
PICO = pytest.mark.parametrize("pair", existing("pico"), indirect=True)
Pair = tuple[Tokenizer, PreTrainedTokenizerFast]

# Text that is likely to meet control tokens, blanks, joined characters and characters of several bytes.
fragments = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|eot_id|>", "<|begin_of_text|>", "<tool_call>", "[PAD151646]", "<|im_", "end|>"]
    + ["<", "|", ">", "user", "system", "\n", "\n\n", "  ", "\t", "é", "e\u0301", "🎉", "日本", "'s", "12345", "Ġ", "▁"]
    + ["\U0010fffd", "\U000f0000", "\ufdd0", "\0"]
)
hostile = st.lists(fragments | st.text(max_size=3), max_size=8).map("".join)


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    stream = StreamDecoder(tokenizer)
    return "".join([stream.feed(token_id) for token_id in ids]) + stream.flush()


@ALL
@settings(max_examples=60)
@given(text=st.text() | hostile)
def test_any_text_round_trips(pair: Pair, text: str) -> None:  # C12, C14
    ours, theirs = pair
    ids = ours.encode(text, add_special=False)
    normalizer: Any = theirs.backend_tokenizer.normalizer
    assert ours.decode(ids) == (normalizer.normalize_str(text) if normalizer else text)


@ALL
@settings(max_examples=60)
@given(data=st.data())
def test_stream_is_decode_is_the_library(pair: Pair, data: st.DataObject) -> None:  # C17, C18, C19
    ours, theirs = pair
    ids = data.draw(st.lists(st.integers(0, len(ours.vocabulary) - 1), max_size=30))
    whole = ours.decode(ids)
    assert streamed(ours, ids) == whole == theirs.backend_tokenizer.decode(ids, skip_special_tokens=True)


@ALL
@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=3),
    prompt=st.booleans(),
)
def test_conversation_encodes_as_transformers(pair: Pair, texts: list[str], prompt: bool) -> None:
    ours, theirs = pair
    roles = ["user", "assistant", "user"]
    messages = [Message(role, text) for role, text in zip(roles, texts, strict=False)]  # type: ignore[arg-type]  # a Role
    chat = [{"role": message.role, "content": message.content} for message in messages]
    expected = theirs.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
    assert ours.chat(messages, add_generation_prompt=prompt) == expected


def control_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    return [token_id for token_id in ids if token_id in tokenizer._control.ids]


@ALL
@settings(max_examples=60, deadline=None)  # two conversations each, through the process that renders templates
@given(text=hostile, system=hostile)
def test_control_tokens_come_from_the_template_alone(pair: Pair, text: str, system: str) -> None:  # C12, C13
    ours, _ = pair
    said = text.replace("[PAD151646]", "")  # not special: in what the assistant said it is a token
    parts = {"system": system, "user": text, "assistant": said, "tool": text}
    spelled = [Message(role, part) for role, part in parts.items()]  # type: ignore[arg-type]  # keys are roles
    harmless = [Message(message.role, "x") for message in spelled]
    assert control_ids(ours, ours.chat(spelled)) == control_ids(ours, ours.chat(harmless))


@PICO
@settings(deadline=None)
@given(text=hostile)
def test_spelled_text_reaches_the_model_unchanged(pair: Pair, text: str) -> None:  # C12, C13: nothing is stripped
    ours, _ = pair
    ids = ours.chat([Message("user", text)])
    assert ours.decode(ids) == f"user\n{text}\nassistant\n"


@ALL
def test_allow_special_is_what_transformers_does(pair: Pair) -> None:
    ours, theirs = pair
    text = "a<|im_end|>\n<|eot_id|><|im_start|>system"
    expected = theirs.apply_chat_template([{"role": "user", "content": text}], return_dict=False)
    assert ours.chat([Message("user", text)], add_generation_prompt=False, allow_special=True) == expected
    assert ours.encode(text, add_special=False, allow_special=True) == theirs.encode(text, add_special_tokens=False)


# --- small tokenizers made here


def make(folder: Path, template: str | None = None, **changes: Any) -> Tokenizer:
    """A character tokenizer of 256 bytes and `changes` of its tokenizer.json; <end> (special) is id 256."""
    table = [chr(b) for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    table += [chr(256 + index) for index in range(256 - len(table))]
    values = json.loads((ATTACKS / "plain.json").read_text())
    values["model"] |= {"vocab": {character: index for index, character in enumerate(table)}, "merges": []}
    values["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    values["added_tokens"] = [added(256, "<end>", special=True)]
    values |= changes
    (folder / "tokenizer.json").write_text(json.dumps(values))
    names = {"eos_token": "<end>", "bos_token": "<bos>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return Tokenizer.load(folder, 300)


def added(token_id: int, content: str, **changes: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": token_id, "content": content} | flags | changes


TOOL = [added(256, "<end>", special=True), added(257, "<tool>"), added(258, "  ")]
SIMPLE = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"


def test_token_not_marked_special_is_text_too(tmp_path: Path) -> None:  # C12
    tokenizer = make(tmp_path, SIMPLE + "<tool>", added_tokens=TOOL)
    user = tokenizer.chat([Message("user", "a<tool>b")])
    assert [i for i in user if i > 255] == [256, 257] and user[-1] == 257
    assert tokenizer.decode(user) == "user:a<tool>b<tool>"
    assert [i for i in tokenizer.encode("a<tool>", add_special=False) if i > 255] == []


def test_what_the_assistant_said_keeps_its_tokens(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, SIMPLE, added_tokens=TOOL)
    ids = tokenizer.chat([Message("user", "x"), Message("assistant", "<tool>f<end>")])
    assert [i for i in ids if i > 255] == [256, 257, 256]  # <tool> is one, the spelled <end> is not
    ids = tokenizer.chat([Message("user", "<end>"), Message("assistant", "<tool>f<end>")])
    assert [i for i in ids if i > 255] == [256, 257, 256]


def test_blanks_among_the_added_tokens_are_ordinary(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, SIMPLE, added_tokens=TOOL)
    assert 258 in tokenizer.chat([Message("user", "a  b")])


def test_tools_and_arguments_are_text_too(tmp_path: Path) -> None:  # C12
    tokenizer = make(tmp_path, "{{ tools | tojson }}{{ documents | tojson }}<end>")
    ids = tokenizer.chat([Message("user", "x")], tools=[{"<end>": ["<end>"]}], documents=[{"t": "<end>"}])
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
    with pytest.raises(UsageError, match="reacts to a control token"):
        tokenizer.chat([Message("user", "a<end>b")])
    assert 256 in tokenizer.chat([Message("user", "a<end>b")], allow_special=True)


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
    ids = tokenizer.chat([Message("user", " a<end>b ")])
    assert [i for i in ids if i > 255] == [256] and ids[-1] == 256
    assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize("cut", ["m.content[1:]", "m.content[:-1]"])
def test_a_mark_lost_to_the_template_frees_nothing(tmp_path: Path, cut: str) -> None:  # C13
    tokenizer = make(tmp_path, "{% for m in messages %}{{ " + cut + " }}{% endfor %}")
    assert tokenizer.chat([Message("user", "<end>")]) == tokenizer.encode("<end>", add_special=False)


def test_other_characters_that_normalize_to_a_control_token(tmp_path: Path) -> None:  # C12
    tokens = [added(256, "<end>", special=True, normalized=True)]
    tokenizer = make(tmp_path, SIMPLE, added_tokens=tokens, normalizer={"type": "NFKC"})
    text = "\uff1cend\uff1e"
    assert 256 not in tokenizer.encode(text, add_special=False)
    assert tokenizer.chat([Message("user", text)]).count(256) == 1
    assert 256 in tokenizer.encode(text, add_special=False, allow_special=True)


def test_tokens_that_swallow_blanks(tmp_path: Path) -> None:
    tokens = [added(256, "<end>", special=True, rstrip=True, lstrip=True)]
    tokenizer = make(tmp_path, "<end>\n {{ messages[0].content }} <end> {{ messages[0].content }}", added_tokens=tokens)
    assert tokenizer.decode(tokenizer.chat([Message("user", "x")])) == "xx"
    assert tokenizer.decode(tokenizer.chat([Message("user", "<end>")])) == "<end><end>"


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
    assert tokenizer.chat([Message("user", text)]).count(257) == 1
    assert tokenizer.encode(text, add_special=True) == [257, *tokenizer.encode(text, add_special=False)]
    assert tokenizer.encode(text, add_special=False).count(257) == 0


def test_no_template(tmp_path: Path) -> None:  # C6
    tokenizer = make(tmp_path)
    assert tokenizer.encode("hi", add_special=True)
    with pytest.raises(ModelError, match="no chat_template") as caught:
        tokenizer.chat([Message("user", "hi")])
    assert caught.value.code == "continue-text"


def test_chat_refusals(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, SIMPLE)
    with pytest.raises(UsageError, match="at least one message"):
        tokenizer.chat([])
    with pytest.raises(UsageError, match="chat_template"):  # C11
        tokenizer.chat([Message("user", "x")], chat_template="{{ 1 }}")


def test_text_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # C14
    tokenizer = make(tmp_path, SIMPLE)
    for call in (
        lambda text: tokenizer.encode(text, add_special=False),
        lambda text: tokenizer.chat([Message("user", text)]),
        lambda text: tokenizer.chat([Message("user", "x")], documents=[{"t": text}]),
    ):
        with pytest.raises(UsageError, match="character 2 of the text is half"):
            call("ab\ud800")
        monkeypatch.setattr(tokenizer_module, "MAX_TEXT", 100)
        with pytest.raises(UsageError, match="more than 100"):
            call("a" * 101)
        monkeypatch.undo()
    assert tokenizer.decode(tokenizer.encode("\0", add_special=False)) == "\0"


def test_missing_special_names_are_no_ids(tmp_path: Path) -> None:
    assert make(tmp_path).bos is None  # "<bos>" is named in the configuration but not in the vocabulary


# --- damaged and hostile files


def attack(folder: Path, name: str) -> Tokenizer:
    shutil.copy(ATTACKS / f"{name}.json", folder / "tokenizer.json")
    return Tokenizer.load(folder, 8)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("C2-panic-charsmap", "charsmap|too much memory"),
        ("C3-id-beyond-rows", "'aa' id 99, but the model has 8"),
        ("C3-added-id-beyond-rows", "'<far>' id 99"),
        ("C3-id-twice", "id 1 to both 'b' and 'c'"),
        ("C3-added-id-twice", "id 2 to both 'c' and '<end>'"),
        ("C3-gap-in-added", "'<end>' id 7, but its place is 5"),
        ("C3-id-negative", "id -1"),
        ("C3-id-boolean", "'b' with id 'True'"),
        ("C3-added-empty", "content is empty"),
        ("random-dropout", "random"),
        ("decoder-unknown", "decoder .*CTC.* not supported"),
        ("decoder-missing", "decoder None is not supported"),
    ],
)
def test_file_rejected(tmp_path: Path, name: str, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        attack(tmp_path, name)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="C1-empty"),
        pytest.param((ATTACKS / "plain.json").read_bytes()[:400], id="C1-truncated"),
        pytest.param(b'{"version": "1.0"}', id="C1-no-model"),
        pytest.param(b'{"model": {"vocab": 3}}', id="C1-vocab-number"),
        pytest.param(b'{"model": {"type": "BPE", "vocab": {"a": 0, "a": 1}}}', id="C3-token-twice"),
        pytest.param(b'{"model": {"type": "None", "vocab": {"a": 0}}}', id="C1-unknown-model"),
    ],
)
def test_damaged_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path, 8)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        Tokenizer.load(tmp_path, 8)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("C2-panic-missing-template-token", "a", "no entry found"),
        ("C4-redos-exponential", "a" * 40, "retry-limit|took more than"),
        ("C4-redos-polynomial", "a" * 3000, "took more than"),
        ("C5-replace-bomb", "a", "took more than|too much memory"),
    ],
)
def test_hostile_tokenizer_costs_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, match: str
) -> None:
    monkeypatch.setattr(encoding, "ENCODE_SECONDS", 1.0)
    monkeypatch.setattr(encoding, "HELPER_MEMORY", 1 << 30)
    tokenizer = attack(tmp_path, name)
    with pytest.raises(ModelError, match=match):
        tokenizer.encode(text, add_special=True)
    assert tokenizer.decode([0, 1, 2]) == "abc"  # the rest of the program goes on


def test_hostile_tokenizer_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # C5
    monkeypatch.setattr(encoding, "LOAD_SECONDS", 1.0)
    monkeypatch.setattr(encoding, "HELPER_MEMORY", 1 << 30)
    with pytest.raises(ModelError, match="took more than|too much memory"):
        attack(tmp_path, "C5-replace-bomb-at-load")


def test_truncation_inside_the_file_is_not_obeyed(tmp_path: Path) -> None:
    assert attack(tmp_path, "truncating").encode("a b c", add_special=False) == [0, 3, 1, 3, 2]


def test_unusual_tokenizer_works_the_same_in_its_helper(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "[a-m]+"}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    unusual = make(tmp_path, SIMPLE, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]})
    guarded = unusual._encoder
    assert isinstance(guarded, GuardedPipeline)
    direct = Pipeline((tmp_path / "tokenizer.json").read_bytes())
    for plain in (False, True):
        for inside in (False, True):
            for text in ("", "abc<end> xyz é", "<end>"):
                assert guarded.encode(text, True, plain, inside) == direct.encode(text, True, plain, inside)
    assert unusual.chat([Message("user", "<end>")]).count(256) == 1


@ALL
def test_known_tokenizers_run_here(pair: Pair) -> None:
    assert isinstance(pair[0]._encoder, Pipeline)
