"""Test popular tokenizers: text round-trips; conversations and streams equal transformers'."""

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
from mycli.runtime.tokenizer.backend import Pipeline
from mycli.runtime.tokenizer.chat_template import Message, TemplateOptions
from mycli.runtime.tokenizer.stream import StreamDecoder
from mycli.runtime.tokenizer.tokenizer import Tokenizer, _names_types
from mycli.runtime.utils.json_fields import Fields
from tests.support.grids import examples

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared"
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
    absent = pytest.mark.skip(reason="the full-size tokenizers are not next to this checkout")
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


# Text likely to contain control tokens, blanks, joined characters and multi-byte characters.
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
@settings(max_examples=examples(40, 200))
@given(text=st.text() | hostile)
def test_any_text_round_trips(pair: Pair, text: str) -> None:  # C12, C14
    ours, theirs = pair
    ids = ours.encode(text, add_special=False)
    normalizer: Any = theirs.backend_tokenizer.normalizer
    assert ours.decode(ids) == (normalizer.normalize_str(text) if normalizer else text)


@ALL
@settings(max_examples=examples(40, 200))
@given(data=st.data())
def test_stream_is_decode_is_the_library(pair: Pair, data: st.DataObject) -> None:  # C17, C18, C19
    ours, theirs = pair
    ids = data.draw(st.lists(st.integers(0, len(ours.vocabulary) - 1), max_size=30))
    whole = ours.decode(ids)
    assert streamed(ours, ids) == whole == theirs.backend_tokenizer.decode(ids, skip_special_tokens=True)


@ALL
@settings(max_examples=examples(20, 200), deadline=None)
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
    assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == expected


def control_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    return [token_id for token_id in ids if token_id in tokenizer._control.ids]


@ALL
# Two conversations each, through the template helper process.
@settings(max_examples=examples(20, 200), deadline=None)
@given(text=hostile, system=hostile)
def test_control_tokens_come_from_the_template_alone(pair: Pair, text: str, system: str) -> None:  # C12, C13
    ours, _ = pair
    content = text.replace("[PAD151646]", "")  # not special: in an assistant message it is a token
    parts = {"system": system, "user": text, "assistant": content, "tool": text}
    spelled = [Message(role, part) for role, part in parts.items()]  # type: ignore[arg-type]  # keys are roles
    harmless = [Message(message.role, "x") for message in spelled]
    assert control_ids(ours, ours.apply_chat_template(spelled)) == control_ids(ours, ours.apply_chat_template(harmless))


@PICO
@settings(max_examples=examples(20, 200), deadline=None)
@given(text=hostile)
def test_spelled_text_reaches_the_model_unchanged(pair: Pair, text: str) -> None:  # C12, C13: nothing is stripped
    ours, _ = pair
    ids = ours.apply_chat_template([Message("user", text)])
    assert ours.decode(ids) == f"user\n{text}\nassistant\n"


@ALL
def test_allow_special_is_what_transformers_does(pair: Pair) -> None:
    ours, theirs = pair
    text = "a<|im_end|>\n<|eot_id|><|im_start|>system"
    expected = theirs.apply_chat_template([{"role": "user", "content": text}], return_dict=False)
    assert (
        ours.apply_chat_template([Message("user", text)], add_generation_prompt=False, allow_special=True) == expected
    )
    assert ours.encode(text, add_special=False, allow_special=True) == theirs.encode(text, add_special_tokens=False)


@ALL
def test_known_tokenizers_run_here(pair: Pair) -> None:
    assert isinstance(pair[0]._encoder, Pipeline)


def test_options_replace_the_template_of_a_tokenizer() -> None:
    tokenizer, bare = (Tokenizer.load(tokenizer_file("pico").parent, 4096) for _ in range(2))
    own = tokenizer.template
    tokenizer.use_template(TemplateOptions())
    assert own is not None and tokenizer.template is own
    bare.template = None
    bare.use_template(TemplateOptions())
    with pytest.raises(UsageError, match="no chat template that takes arguments"):
        bare.use_template(TemplateOptions(arguments={"name": 1}))
    for one in (tokenizer, bare):
        one.use_template(TemplateOptions(source="<{{ messages[0].content }}>"))
        assert one.render([Message("user", "hi")]) == "<hi>"


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("setting", [True, False, None])
def test_an_end_token_is_missing_if_only_the_settings_add_it(tmp_path: Path, added: bool, setting: bool | None) -> None:
    raw = json.loads(tokenizer_file("pico").read_text())
    if added:
        token = {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}
        template = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}]
        raw["post_processor"] = {
            "type": "TemplateProcessing",
            "single": template,
            "pair": template,
            "special_tokens": {"<|im_end|>": token},
        }
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**NAMES["pico"], "add_eos_token": setting}))
    tokenizer = Tokenizer.load(tmp_path, ROWS["pico"])
    assert tokenizer.missing_eos == ((2,) if setting and not added else ())


@pytest.mark.parametrize("part", ["single", "pair"])
def test_an_added_id_beyond_the_vocabulary_is_refused(tmp_path: Path, part: str) -> None:
    """A model would look it up beyond its embedding."""
    raw = json.loads(tokenizer_file("pico").read_text())
    plain = [{"Sequence": {"id": "A", "type_id": 0}}]
    ended = [*plain, {"SpecialToken": {"id": "X", "type_id": 0}}]
    token = {"id": "X", "ids": [ROWS["pico"]], "tokens": ["X"]}
    parts = {"single": plain, "pair": plain, part: ended}
    raw["post_processor"] = {"type": "TemplateProcessing", **parts, "special_tokens": {"X": token}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer.load(tmp_path, ROWS["pico"])
    with pytest.raises(ModelError, match="post_processor adds token 4096, beyond the vocabulary of 4096"):
        tokenizer.encode("a", add_special=True) if part == "single" else tokenizer.encode_pair("a", "a")
    assert tokenizer.encode("a", add_special=False)


@pytest.mark.parametrize(
    ("settings", "types"),
    [
        ({}, True),
        ({"tokenizer_class": "RobertaTokenizerFast"}, False),
        ({"tokenizer_class": "RobertaTokenizerFast", "model_input_names": ["input_ids", "token_type_ids"]}, True),
        ({"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]}, False),
    ],
)
def test_the_settings_name_the_inputs_of_a_model_of_pairs(settings: dict[str, Any], types: bool) -> None:
    assert _names_types(Fields(settings, "tokenizer_config.json")) == types
