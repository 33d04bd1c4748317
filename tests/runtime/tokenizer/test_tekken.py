"""Test tekken.json: ids are mistral-common's, by a slow byte-pair encoder; damaged files are refused."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.quant.export._gguf_tokenizer import tokenizer_metadata
from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.chat_template import Message, TemplateOptions
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from mycli.runtime.tokenizer.tokenizer_files import read_tokenizer, read_tokenizer_settings
from tests.support.small_tokenizers import tekken

ROWS = 320
SPECIAL = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
    *("<SPECIAL_20>", "<SPECIAL_21>", "<SPECIAL_22>", "<SPECIAL_23>"),
]
fragments = st.sampled_from(
    ["the", " the", "aaaa", "a", "ing", "THE", "é", "\r\n", "qq", "zz", "12", "<s>", "日", "\u0301"]
)


def load(folder: Path, values: dict[str, Any]) -> Tokenizer:
    (folder / "tekken.json").write_text(json.dumps(values))
    return Tokenizer.load(folder, ROWS)


def expected_ids(values: dict[str, Any], text: str) -> list[int]:
    # tiktoken's rule: in each piece, join the leftmost pair whose joined token has the lowest rank.
    config = values["config"]
    offset = config["default_num_special_tokens"]
    used = values["vocab"][: config["default_vocab_size"] - offset]
    ranks = {base64.b64decode(item["token_bytes"]): item["rank"] for item in used}
    ids = []
    for piece in regex.findall(config["pattern"], text):
        parts = [bytes([value]) for value in piece.encode()]
        while pairs := [
            (ranks[joined], at) for at in range(len(parts) - 1) if (joined := parts[at] + parts[at + 1]) in ranks
        ]:
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [offset + ranks[part] for part in parts]
    return ids


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("tekken"), tekken())


@settings(max_examples=100, deadline=None)
@given(
    text=st.lists(fragments | st.text(st.characters(exclude_categories=["Cs"]), max_size=3), max_size=8).map("".join)
)
def test_ids_are_those_of_the_ranks(legacy: Tokenizer, text: str) -> None:
    ids = legacy.encode(text, add_special=False)
    assert ids == expected_ids(tekken(), text)
    assert legacy.encode(text, add_special=True) == [1, *ids]
    assert legacy.decode(ids) == text


def test_special_tokens_come_first(legacy: Tokenizer) -> None:
    assert legacy.vocabulary[:24] == SPECIAL
    assert (legacy.bos, legacy.eos) == (1, (2,))
    assert legacy.control_ids == set(range(24))
    assert legacy.encode("[INST]the[/INST]", add_special=False, allow_special=True) == [3, 24 + 258, 4]
    assert 3 not in legacy.encode("[INST]", add_special=False)
    assert legacy.decode([1, 3, 24 + 258, 23]) == "the"
    assert legacy.vocabulary[290] is not None and legacy.vocabulary[291:] == [None] * (ROWS - 291)


def test_a_list_of_special_tokens_replaces_the_legacy_one(tmp_path: Path) -> None:
    values = tekken()
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[THINK]"]
    values["special_tokens"] = [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in reversed(list(enumerate(names)))
    ]
    values["config"]["version"] = "v13"
    tokenizer = load(tmp_path, values)
    assert tokenizer.vocabulary[:24] == [*names, *(f"<SPECIAL_{index}>" for index in range(6, 24))]


def test_special_tokens_may_have_every_id_below_the_text(tmp_path: Path) -> None:
    entries = [{"rank": rank, "token_str": token} for rank, token in enumerate(SPECIAL)]
    assert load(tmp_path, tekken(special_tokens=entries)).vocabulary[:24] == SPECIAL


def test_a_tokenizer_json_is_preferred(tmp_path: Path, legacy: Tokenizer) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken()))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"^tokenizer\.json"):
        Tokenizer.load(tmp_path, ROWS)
    assert not read_tokenizer_settings(tmp_path).values


def test_settings_name_the_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken()))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[/INST]"}')
    assert Tokenizer.load(tmp_path, ROWS).eos == (4,)
    assert read_tokenizer_settings(tmp_path).values["bos_token"] == "<s>"


def test_gguf_holds_it_as_tekken(tmp_path: Path) -> None:
    load(tmp_path, tekken())
    metadata = tokenizer_metadata(read_tokenizer(tmp_path)[0], read_tokenizer_settings(tmp_path), ROWS)
    assert metadata["tokenizer.ggml.pre"] == "tekken" and metadata["tokenizer.ggml.add_bos_token"]
    assert metadata["tokenizer.ggml.eos_token_id"] == 2
    assert metadata["tokenizer.ggml.tokens"][:24] == SPECIAL


def test_a_conversation_needs_a_template(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tekken())
    messages = [Message("user", "the")]
    with pytest.raises(ModelError, match=r"no chat_template\.jinja") as caught:
        tokenizer.apply_chat_template(messages)
    assert caught.value.code == "continue-text"
    source = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
    tokenizer.use_template(TemplateOptions(source=source))
    assert tokenizer.apply_chat_template(messages) == [1, 3, 24 + 258, 4]
    (tmp_path / "chat_template.jinja").write_text(source)
    assert Tokenizer.load(tmp_path, ROWS).apply_chat_template(messages) == [1, 3, 24 + 258, 4]


def changed(section: str, index: int, key: str, value: object) -> dict[str, Any]:
    values = tekken()
    (values["config"] if section == "config" else values[section][index])[key] = value
    return values


SPECIALS = [{"rank": 0, "token_str": "<s>"}, {"rank": 0, "token_str": "</s>"}]


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (changed("config", 0, "version", "v13"), "special_tokens is missing"),
        (changed("config", 0, "pattern", "(a+)+b"), "pattern is not supported"),
        (changed("config", 0, "default_vocab_size", 400), "must hold 376 different"),
        (changed("config", 0, "default_vocab_size", 30), "default_vocab_size must be between 280"),
        (changed("config", 0, "default_num_special_tokens", 8), "below default_num_special_tokens 8"),
        (changed("vocab", 260, "rank", 261), "rank = 261 at place 260"),
        (changed("vocab", 260, "token_bytes", "!"), "token_bytes of rank 260 is not base64"),
        (changed("vocab", 260, "token_bytes", "dGg="), "different tokens"),
        (changed("vocab", 260, "token_bytes", "PHM+"), "holds the special token '<s>'"),
        (changed("vocab", 65, "token_bytes", "Qg=="), "different tokens"),
        (changed("vocab", 65, "token_bytes", "cXE="), "start with the 256 bytes"),
        (tekken(special_tokens=SPECIALS), "without gaps"),
        (tekken(special_tokens=[SPECIALS[0], {"rank": 1, "token_str": "<s>"}]), "one token twice"),
        (tekken(special_tokens=[{"rank": 1, "token_str": "<s>"}]), "without gaps"),
        (tekken(vocab=None), "vocab must hold"),
    ],
)
def test_damaged_file(tmp_path: Path, values: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=rf"^tekken\.json: .*{match}"):
        load(tmp_path, values)


def test_tokens_have_4_million_bytes_at_most(tmp_path: Path) -> None:
    """Each is a place to split a token, so more would take long."""
    values = tekken()
    first, count = len(values["vocab"]), (1 << 22) // 750 + 1
    values["config"]["default_vocab_size"] = 24 + first + count
    for index in range(count):
        token = index.to_bytes(2, "big") + bytes(748)
        values["vocab"].append({"rank": first + index, "token_bytes": base64.b64encode(token).decode()})
    with pytest.raises(ModelError, match="holds tokens of more than 4194304 bytes"):
        load(tmp_path, values)


def test_sentencepiece_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(ModelError, match=r"only tokenizer\.model \(SentencePiece\)") as caught:
        read_tokenizer(tmp_path)
    assert "from_pretrained(FOLDER).save_pretrained" in caught.value.hint and not caught.value.code
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError) as caught:
        read_tokenizer(tmp_path)
    assert "from_pretrained(FOLDER, trust_remote_code=True)" in caught.value.hint
    assert "runs the model's code" in caught.value.hint
