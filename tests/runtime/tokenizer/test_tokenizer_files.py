"""Test damaged, hostile and unusual tokenizer files: refused, or run in a sandbox."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer import backend as encoding
from mycli.runtime.tokenizer.backend import GuardedPipeline, Pipeline
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.small_tokenizers import ATTACKS, SIMPLE, make


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
        ("C3-gap-in-added", "'<end>' id 7, but the library assigns 5"),
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


def _with_tokens(folder: Path, *tokens: str, eos: str = "<end>", template: str = "", special: bool = True) -> Tokenizer:
    raw = json.loads((ATTACKS / "plain.json").read_text())
    rows = 8
    raw["added_tokens"] += [
        {"id": rows + index, "content": token, "special": special, "normalized": False}
        for index, token in enumerate(tokens)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "chat_template": template}))
    return Tokenizer.load(folder, rows)


def test_special_tokens_after_the_last_row_are_left_out(tmp_path: Path) -> None:
    """As in Gemma 3 1B, whose tokenizer has the token of images; its text must not become an id without a row."""
    tokenizer = _with_tokens(tmp_path, "ab", "bc", template="{{ 'a' }}")
    assert tokenizer.encode("abc", add_special=False, allow_special=True) == [0, 1, 2]
    assert len(tokenizer.vocabulary) == 8


@pytest.mark.parametrize("used", [{"eos": "ab"}, {"template": "{{ 'ab' }}"}, {"special": False}], ids=str)
def test_tokens_after_the_last_row_that_the_model_uses_are_an_error(tmp_path: Path, used: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="'ab' id 8, but the model has 8 embedding rows"):
        _with_tokens(tmp_path, "ab", **used)


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
    monkeypatch.setattr(encoding, "WORKER_MEMORY", 1 << 30)
    tokenizer = attack(tmp_path, name)
    with monkeypatch.context() as patch, pytest.raises(ModelError, match=match):
        if "took" in match:
            patch.setattr(encoding, "ENCODE_SECONDS", 0.2)
        tokenizer.encode(text, add_special=True)
    assert tokenizer.decode([0, 1, 2]) == "abc"  # the rest of the program continues


def test_hostile_tokenizer_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # C5
    monkeypatch.setattr(encoding, "LOAD_SECONDS", 0.2)
    monkeypatch.setattr(encoding, "WORKER_MEMORY", 1 << 30)
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
            for text in ("", "abc<end> XYZ é", "<end>"):
                assert guarded.encode(text, True, plain, inside) == direct.encode(text, True, plain, inside)
    assert unusual.apply_chat_template([Message("user", "<end>")]).count(256) == 1


def test_a_panic_of_the_library_writes_nothing_to_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The merges are shorter than the prefix of a continued word, so the library slices beyond them."""
    values = json.loads((ATTACKS / "plain.json").read_text())
    values["model"]["continuing_subword_prefix"] = "#" * 13
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="tokenizer.json: the tokenizer fails: range end index"):
        Tokenizer.load(tmp_path, 8)
    assert capfd.readouterr() == ("", "")
