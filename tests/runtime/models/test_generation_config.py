"""Test generation_config.json: every field is read or dropped with a warning; stop ids come from three sources."""

import json
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.errors import ModelError
from mycli.runtime.models.generation_config import GenerationDefaults, read_generation_config, stop_ids


def read(folder: Path, values: dict[str, Any]) -> tuple[GenerationDefaults, tuple[str, ...]]:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return read_generation_config(folder, 100)


def test_all_fields(tmp_path: Path) -> None:
    values = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "do_sample": True,
        "eos_token_id": [2, 1, 2],
        "suppress_tokens": [7, 5, 100, -1, 7],
        "begin_suppress_tokens": None,
        "transformers_version": "5",
    }
    expected = GenerationDefaults(0.7, 0.9, 20, 0.05, 1.1, True, (2, 1), (7, 5))
    assert read(tmp_path, values) == (expected, ())


def test_missing_file(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path, 100) == (GenerationDefaults(), ())


def test_null_means_absent(tmp_path: Path) -> None:
    assert read(tmp_path, {"temperature": None, "eos_token_id": None}) == (GenerationDefaults(), ())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("temperature", -1, id="B16-temperature-negative"),
        pytest.param("temperature", "hot", id="B16-temperature-text"),
        pytest.param("top_p", 7, id="B16-top-p-7"),
        pytest.param("top_p", 0, id="B16-top-p-0"),
        pytest.param("top_k", 1.5, id="B16-top-k-fraction"),
        pytest.param("top_k", True, id="B16-top-k-bool"),
        pytest.param("min_p", 2, id="B16-min-p"),
        pytest.param("repetition_penalty", 0, id="B16-penalty-0"),
        pytest.param("do_sample", 1, id="B16-do-sample-int"),
        pytest.param("eos_token_id", 100, id="B16-eos-beyond"),
        pytest.param("eos_token_id", [1, -1], id="B16-eos-negative"),
        pytest.param("eos_token_id", "2", id="B16-eos-text"),
        pytest.param("eos_token_id", [True], id="B16-eos-bool"),
        pytest.param("eos_token_id", list(range(65)), id="B16-eos-many"),
        pytest.param("suppress_tokens", 7, id="B16-suppress-int"),
        pytest.param("suppress_tokens", [True], id="B16-suppress-bool"),
        pytest.param("suppress_tokens", list(range(257)), id="B16-suppress-many"),
        pytest.param("begin_suppress_tokens", [7], id="begin-suppress"),
    ],
)
def test_bad_field_is_dropped_with_a_warning(tmp_path: Path, key: str, value: Any) -> None:
    defaults, warnings = read(tmp_path, {"top_k" if key != "top_k" else "min_p": 1, key: value})
    assert len(warnings) == 1 and key in warnings[0] and "ignored" in warnings[0]
    assert defaults == (GenerationDefaults(top_k=1) if key != "top_k" else GenerationDefaults(min_p=1))


@pytest.mark.parametrize("text", ['{"temperature": NaN}', "[]", "", '{"top_p": 1, "top_p": 2}', "{"])
def test_bad_json_is_an_error(tmp_path: Path, text: str) -> None:  # B1, B16
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        read_generation_config(tmp_path, 100)


def test_stop_ids_are_the_union() -> None:
    assert stop_ids((7, 2), (2,), (5,), 100) == ((2, 5, 7), ())


def test_stop_ids_outside_the_vocabulary() -> None:
    ids, warnings = stop_ids((), (100,), (3,), 100)
    assert ids == (3,) and "100" in warnings[0]


def test_no_stop_id_at_all() -> None:  # B17
    ids, warnings = stop_ids((), (), (), 100)
    assert ids == () and "token limit" in warnings[0]


def test_the_first_token_may_end_a_reply_and_64_ids_may(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": 0}) == (GenerationDefaults(eos=(0,)), ())
    assert read(tmp_path, {"eos_token_id": list(range(64))}) == (GenerationDefaults(eos=tuple(range(64))), ())
    assert stop_ids((0,), (99,), (), 100) == ((0, 99), ())
    ids, warnings = stop_ids((-1,), (0,), (), 100)
    assert ids == (0,) and len(warnings) == 1 and "-1" in warnings[0]
