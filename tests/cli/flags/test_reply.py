"""Test options of one reply: where its prompt is from, its format, and beam search."""

from pathlib import Path
from typing import Any

import pytest

from mycli.cli.flags.records import SamplingFlags
from mycli.cli.flags.reply import BeamFlags, GrammarFlags, PromptFlags
from mycli.runtime.engine.sequence import BeamOptions
from mycli.runtime.errors import UsageError


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"prompt": "Hi", "out": Path("x")}, "--out needs --batch"),
        ({"prompt": "Hi", "batch": "-"}, "--batch reads the prompts from the file"),
        ({"file": Path("x"), "batch": "-"}, "--batch reads the prompts from the file"),
        ({"prompt": "Hi", "encoding_errors": "ignore"}, "--encoding-errors ignore is not supported"),
    ],
)
def test_places_of_prompts_exclude_each_other(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        PromptFlags(**flags).resolve(print)


def test_a_batch_has_no_prompt_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").touch()
    assert PromptFlags(batch=str(tmp_path / "in.jsonl"), out=tmp_path / "out").resolve(print) == ""


def test_a_reply_has_one_format(tmp_path: Path) -> None:
    assert not GrammarFlags(extra_properties=True).used and GrammarFlags().text() is None
    for flags in (GrammarFlags(schema="{}"), GrammarFlags(regex="a"), GrammarFlags(json_mode=True)):
        assert flags.used and flags.text() == flags.schema
    for several in (
        GrammarFlags(schema="{}", regex="a"),
        GrammarFlags(schema="{}", json_mode=True),
        GrammarFlags(regex="a", json_mode=True),
    ):
        with pytest.raises(UsageError, match="exclude each other"):
            several.text()
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    assert GrammarFlags(schema=str(tmp_path / "schema.json")).text() == '{"type": "object"}'
    assert GrammarFlags(schema=' {"a": 1}').text() == ' {"a": 1}'


PLAIN = (SamplingFlags(), GrammarFlags(), "none", None)


@pytest.mark.parametrize(("typed", "early"), [("off", False), ("on", True), ("never", "never")])
def test_options_of_a_search(typed: str, early: bool | str) -> None:
    search = BeamFlags(4, 0.5, typed).resolve(4, *PLAIN)
    assert search == BeamOptions(4, 0.5, early)  # type: ignore[arg-type]  # one of the three
    assert BeamFlags().resolve(1, *PLAIN) is None


@pytest.mark.parametrize(
    ("samples", "others", "problem"),
    [
        (5, PLAIN, "--samples 5 of 4 beams"),
        (1, (SamplingFlags(seed=0), *PLAIN[1:]), "--beams and --seed exclude"),
        (1, (PLAIN[0], GrammarFlags(regex="a"), *PLAIN[2:]), "--beams and --regex exclude"),
        (1, (*PLAIN[:2], "ngram", None), "--beams and --draft exclude"),
        (1, (*PLAIN[:3], 0), "--beams and --logprobs exclude"),
    ],
)
def test_a_search_excludes_what_samples(samples: int, others: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        BeamFlags(4).resolve(samples, *others)
    assert BeamFlags(4).resolve(1, PLAIN[0], GrammarFlags(extra_properties=True), *PLAIN[2:]) is not None


@pytest.mark.parametrize("flags", [BeamFlags(length_penalty=0.5), BeamFlags(early_stopping="on")])
def test_options_of_a_search_need_one(flags: BeamFlags) -> None:
    with pytest.raises(UsageError, match="need --beams"):
        flags.resolve(1, *PLAIN)
