"""Test receipts: they round-trip, changed ones are refused, and the first different token is located."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.replies.receipts import format_of, loading_of
from mycli.runtime.diagnostics.receipt import Receipt, TokenDifference, different_files, file_hashes, first_difference
from mycli.runtime.errors import ModelError, UserError
from mycli.runtime.sampling.params import SamplingParams

RECEIPT = Receipt(
    model="pico",
    files={"model.safetensors": "ab"},
    template="",
    program={"torch": "2"},
    settings={
        "device": "cpu",
        "dtype": "bf16",
        "kv": "auto",
        "activations": "auto",
        "shadow": False,
        "draft": "none",
        "context": 64,
        "allow_nonfinite": False,
    },
    sampling=SamplingParams(0.8, seed=-5, logit_bias=((3, -1.5),), presence_penalty=-1),
    format={"schema": None, "regex": "a+", "json_mode": False, "extra_properties": False},
    stops=("end",),
    limit=None,
    prompt=(1, 2),
    tokens=(3, 4),
    finish_reason="stop",
)


def test_a_receipt_is_read_as_it_was_written(tmp_path: Path) -> None:
    RECEIPT.write(tmp_path / "r.json")
    assert Receipt.read(tmp_path / "r.json") == RECEIPT
    assert loading_of(RECEIPT).context == 64 and format_of(RECEIPT).regex == "a+"
    for sampling in (SamplingParams(), SamplingParams(seed=(1 << 63) - 1)):
        limited = replace(RECEIPT, limit=7, sampling=sampling)
        limited.write(tmp_path / "r.json")
        assert Receipt.read(tmp_path / "r.json") == limited


@pytest.mark.parametrize("key", ["tokens", "model", "sampling", "sha256"])
def test_a_changed_receipt_is_refused(key: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    RECEIPT.write(path)
    record = json.loads(path.read_text())
    record[key] = {"tokens": [3, 5], "model": "other", "sampling": {}, "sha256": "0" * 64}[key]
    path.write_text(json.dumps(record))
    with pytest.raises(ModelError, match="was changed after it was written"):
        Receipt.read(path)


_HOSTILE: dict[str, Callable[[Receipt], Receipt]] = {
    "draft-of-another-model": lambda receipt: _set(receipt, draft="../../secret"),
    "context-text": lambda receipt: _set(receipt, context="all"),
    "context-bool": lambda receipt: _set(receipt, context=True),
    "no-device": lambda receipt: _set(receipt, device=None),
    "regex-number": lambda receipt: replace(receipt, format={**receipt.format, "regex": 5}),
    "json-mode-text": lambda receipt: replace(receipt, format={**receipt.format, "json_mode": "yes"}),
    "tokens-text": lambda receipt: replace(receipt, tokens=("a",)),  # type: ignore[arg-type]  # wrong on purpose
    "hash-number": lambda receipt: replace(receipt, files={"a": 5}),  # type: ignore[dict-item]  # wrong on purpose
}


def _set(receipt: Receipt, **values: Any) -> Receipt:
    return replace(receipt, settings={**receipt.settings, **values})


@pytest.mark.parametrize("name", _HOSTILE)
def test_values_that_no_run_writes_are_refused_by_name(name: str, tmp_path: Path) -> None:
    _HOSTILE[name](RECEIPT).write(tmp_path / "r.json")  # with a correct sha256
    with pytest.raises(UserError):
        receipt = Receipt.read(tmp_path / "r.json")
        loading_of(receipt)
        format_of(receipt)


@pytest.mark.parametrize("sampling", [{"logit_bias": [[1]]}, {"temperature": "x"}, {"seed": 1.5}, {"top_p": 7.0}])
def test_sampling_that_no_run_writes_is_refused(
    sampling: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    RECEIPT.write(path)
    record = json.loads(path.read_text())
    record["sampling"] |= sampling
    path.write_text(json.dumps(record))
    monkeypatch.setattr(
        "mycli.runtime.diagnostics.receipt._digest", lambda record: json.loads(path.read_text())["sha256"]
    )
    with pytest.raises(UserError):
        Receipt.read(path)


def test_the_first_difference_is_a_token_or_an_end() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == TokenDifference(1, 2, 5)
    assert first_difference([1, 2], [1]) == TokenDifference(1, 2, None)
    assert first_difference([1], [1, 2]) == TokenDifference(1, None, 2)


def test_files_differ_by_one_bit_or_by_name(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"weights")
    second.write_bytes(b"config")
    before = file_hashes([second, first])
    assert list(before) == ["a", "b"] and different_files(before, file_hashes([first, second])) == []
    first.write_bytes(b"weightr")
    assert different_files(before, file_hashes([first, second])) == ["a"]
    assert different_files(before, file_hashes([second])) == ["a"]
