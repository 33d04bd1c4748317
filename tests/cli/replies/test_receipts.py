"""Test the options that a receipt describes: read as written, and refused with other values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.flags.records import LoadFlags
from mycli.cli.replies.receipts import ReplyFormat, check_receipt, format_of, loading_of, with_seed
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.sampling.params import SamplingParams
from tests.runtime.diagnostics.test_receipt import RECEIPT


def test_options_are_those_of_the_receipt() -> None:
    flags = loading_of(replace(RECEIPT, settings={**RECEIPT.settings, "shadow": True, "draft": "ngram"}))
    assert (flags.dtype, flags.context, flags.shadow, flags.draft, flags.device) == ("bf16", 64, True, "ngram", "cpu")
    reply = {"schema": "{}", "regex": None, "json_mode": False, "extra_properties": True}
    assert format_of(replace(RECEIPT, format=reply)) == ReplyFormat("{}", None, False, True)


def test_portable_bits_are_kept_and_off_in_older_receipts() -> None:
    assert loading_of(replace(RECEIPT, settings={**RECEIPT.settings, "portable_bits": True})).resolve().portable
    older = {name: value for name, value in RECEIPT.settings.items() if name != "portable_bits"}
    assert not loading_of(replace(RECEIPT, settings=older)).portable_bits


@pytest.mark.parametrize(
    ("name", "value"), [("schema", 1), ("regex", False), ("json_mode", None), ("extra_properties", "yes")]
)
def test_a_format_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"format: {name}"):
        format_of(replace(RECEIPT, format={**RECEIPT.format, name: value}))


@pytest.mark.parametrize(("name", "value"), [("context", "64"), ("shadow", 0), ("draft", "pico-draft"), ("kv", None)])
def test_settings_that_are_never_written_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"settings: {name}"):
        loading_of(replace(RECEIPT, settings={**RECEIPT.settings, name: value}))


@pytest.mark.parametrize(
    ("loading", "single", "template", "deadline", "problem"),
    [
        ({}, False, False, False, "one reply"),
        ({"adapter": "folder"}, True, False, False, "one model"),
        ({"draft": "pico-draft"}, True, False, False, "one model"),
        ({}, True, True, False, "chat template"),
        ({}, True, False, True, "--deadline"),
    ],
)
def test_what_a_receipt_cannot_describe_is_refused(
    loading: dict[str, Any], single: bool, template: bool, deadline: bool, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=problem):
        check_receipt(
            tmp_path / "r.json", LoadFlags(**loading), print, single=single, template=template, deadline=deadline
        )
    check_receipt(tmp_path / "r.json", LoadFlags(draft="mtp"), print, single=True, template=False, deadline=False)


def test_only_sampling_needs_a_seed() -> None:
    greedy, sampled, fixed = SamplingParams(), SamplingParams(0.8), SamplingParams(0.8, seed=3)
    assert with_seed(greedy) == greedy and with_seed(fixed) == fixed
    assert with_seed(sampled).seed is not None


def test_only_a_receipt_is_replaced_and_not_in_silence(tmp_path: Path) -> None:
    notes: list[str] = []
    path = tmp_path / "r.json"

    def check() -> None:
        check_receipt(path, LoadFlags(), notes.append, single=True, template=False, deadline=False)

    path.write_text("my notes")
    with pytest.raises(UsageError, match="not a valid receipt and was not replaced"):
        check()
    RECEIPT.write(path)
    check()
    assert notes == [f"(the receipt in {path} is replaced)"]
