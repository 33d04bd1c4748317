"""Test vocabulary comparison: equal, padded, and different by one token."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.errors import ExitCode, ModelError
from mycli.runtime.tokenizer.compatibility import check_vocabularies
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.paths import DRAFT, PICO

ROWS = 4096


def changed(tmp_path: Path, change: Callable[[dict[str, Any]], object], rows: int = ROWS) -> Tokenizer:
    folder = tmp_path / "other"
    shutil.copytree(DRAFT, folder)
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    change(raw)
    path.write_text(json.dumps(raw), encoding="utf-8")
    return Tokenizer.load(folder, rows)


def swap(raw: dict[str, Any], first: int, second: int) -> None:
    vocab = raw["model"]["vocab"]
    names = {index: token for token, index in vocab.items()}
    vocab[names[first]], vocab[names[second]] = second, first


def test_the_shipped_pair_agrees() -> None:
    shared = check_vocabularies(Tokenizer.load(PICO, ROWS), Tokenizer.load(DRAFT, ROWS))
    assert (shared.tokens, shared.eos_differs) == (ROWS, False)


@pytest.mark.parametrize("rows", [(ROWS, ROWS + 64), (ROWS + 128, ROWS)])
def test_rows_that_pad_a_head_count_for_nothing(rows: tuple[int, int]) -> None:
    shared = check_vocabularies(Tokenizer.load(PICO, rows[0]), Tokenizer.load(DRAFT, rows[1]))
    assert shared.tokens == ROWS


def test_another_vocabulary_is_refused_with_the_first_ids(tmp_path: Path) -> None:
    """F15."""
    other = changed(tmp_path, lambda raw: swap(raw, 700, 701))
    target = Tokenizer.load(PICO, ROWS)
    with pytest.raises(ModelError, match="2 of 4096 ids differ") as refused:
        check_vocabularies(target, other)
    assert refused.value.exit_code == ExitCode.MODEL
    assert "(700 is " in refused.value.message and "; 701 is " in refused.value.message


def test_a_token_that_is_special_in_one_only_differs(tmp_path: Path) -> None:
    def plain(raw: dict[str, Any]) -> None:
        raw["added_tokens"][-1]["special"] = not raw["added_tokens"][-1]["special"]

    with pytest.raises(ModelError, match="1 of 4096 ids differ .*special"):
        check_vocabularies(Tokenizer.load(PICO, ROWS), changed(tmp_path, plain))


def test_a_token_that_only_one_has_differs(tmp_path: Path) -> None:
    other = changed(tmp_path, lambda raw: raw["added_tokens"].append(extra()), ROWS + 1)
    with pytest.raises(ModelError, match=rf"1 of 4097 ids differ \({ROWS} is no token and special"):
        check_vocabularies(Tokenizer.load(PICO, ROWS + 1), other)


def extra() -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": ROWS, "content": "<|new|>", "special": True, **flags}


def test_what_is_shown_cannot_act_on_a_terminal(tmp_path: Path) -> None:
    def rename(raw: dict[str, Any]) -> None:
        token, vocab = raw["added_tokens"][-1], raw["model"]["vocab"]
        if token["content"] in vocab:
            vocab["\x1b[31m"] = vocab.pop(token["content"])
        token["content"] = "\x1b[31m"

    with pytest.raises(ModelError, match="1 of 4096 ids differ") as refused:
        check_vocabularies(Tokenizer.load(PICO, ROWS), changed(tmp_path, rename))
    assert "\x1b" not in refused.value.message
