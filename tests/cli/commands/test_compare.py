"""Test `mycli compare`: table, card, plot and exit code."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mycli.cli.commands.compare import _COLUMNS, _check, _difference, _range, _read_prompts, comparison_verdict
from mycli.quant.comparison import Comparison, Interval, PromptComparison
from mycli.runtime.errors import ExitCode, GateError, ResourceError, UsageError
from tests.support.command_line import Mycli
from tests.support.families import make
from tests.support.paths import PICO

CPU = ("--device", "cpu")


def test_a_draft_is_another_model_and_a_copy_is_the_same(mycli: Mycli, tmp_path: Path) -> None:
    lines = [
        {"id": "q", "prompt": "What is the capital of Japan?"},
        {"messages": [{"role": "user", "content": "Tell me a story about a boat."}]},
        {"prompt": "Add 1 and 2.", "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]},
    ]
    prompts = tmp_path / "chat.jsonl"
    prompts.write_text("\n\n".join(map(json.dumps, lines)))
    compare = ("compare", "pico", "pico-draft", "--prompts", str(prompts), "-n", "12", *CPU)
    done = mycli(*compare, "--json", "--plot", str(tmp_path / "plot.svg"))
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and [row["name"] for row in answer["prompts"]] == ["q", "3", "5"]
    assert answer["prompts"][0]["divergence"] is None and answer["prompts"][1]["divergence"] is not None
    assert answer["kl"]["low"] <= answer["kl"]["value"] <= answer["kl"]["high"] and answer["verdict"].startswith("diff")
    assert (tmp_path / "plot.svg").read_text().count("<g>") == 3
    shown = mycli(*compare, "--max-changed", "0")
    assert shown.returncode == 6 and "of the answers or calls changed, more than --max-changed 0" in shown.stderr
    for part in ("first difference", " none |", "of 3 differ", "times as fast", "verdict  ", "weights and cache"):
        assert part in shown.stdout, part
    assert mycli(*compare, "-n", "2", "--max-kl", "1e-6").returncode == 6
    full = ResourceError("cannot write plot.svg: No space left on device")
    with mock.patch("mycli.cli.commands.compare.write_charts", side_effect=full):
        done = mycli(*compare, "-n", "2", "--plot", str(tmp_path / "full.svg"))
    assert done.returncode == 5 and "times as fast" in done.stdout, "the result is printed before the plot is written"
    again = ("compare", "pico", "pico", *compare[3:5], "-n", "4", "--json", "--max-kl", "1e-6", *CPU)
    same = json.loads(mycli(*again).stdout)
    assert (same["changed_replies"], same["verdict"]) == (0, "no difference that matters")


def test_a_pipe_without_a_reader_ends_the_replies(mycli: Mycli, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}')
    compare = ("compare", "pico", "pico", "--prompts", str(tmp_path / "p.jsonl"), "-n", "2", *CPU)
    with (
        mock.patch("mycli.cli.output.Output.require_reader", side_effect=BrokenPipeError),
        mock.patch("mycli.quant.comparison.measure_divergence") as later,
    ):
        done = mycli(*compare)
    assert (done.returncode, done.stdout, later.called) == (ExitCode.PIPE, "", False) and "error" not in done.stderr


def test_a_speed_measured_on_a_busy_machine_is_marked(mycli: Mycli, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}')
    compare = ("compare", "pico", "pico", "--prompts", str(tmp_path / "p.jsonl"), "-n", "2", *CPU)
    for sentence in ("busy machine: other programs", ""):
        with mock.patch("mycli.cli.commands.compare.CpuContention.note", return_value=sentence):
            done = mycli(*compare)
        assert ("(busy machine: other programs; the speed may be wrong" in done.stderr) == bool(sentence)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompts"),
        ("{}", "needs either prompt or messages"),
        ('{"prompt": "Hi", "tools": [1]}', "tools"),
        ('{"prompt": "Hi", "tools": [{}]}', "must be functions"),
        ('{"prompt": "Hi", "extra": 1}', "'extra' is not a field"),
        ("Hi", "not JSON"),
    ],
    ids=["empty", "no-prompt", "tool-number", "tool-without-function", "unknown-field", "text"],
)
def test_a_bad_file_is_refused_before_a_model_is_loaded(text: str, message: str, mycli: Mycli, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    done = mycli("compare", "pico", "pico-draft", "--prompts", str(tmp_path / "p.jsonl"), *CPU)
    assert done.returncode in (2, 3) and message in done.stderr and not done.stdout


def test_another_vocabulary_is_refused_before_a_model_is_loaded(mycli: Mycli, tmp_path: Path) -> None:
    """Sizes of a family may share a tokenizer and pad their vocabularies differently."""
    make(tmp_path / "padded", "llama", {"vocab_size": 4160})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / file, tmp_path / "padded" / file)
    with mock.patch("mycli.cli.commands.compare._replies", side_effect=AssertionError):
        done = mycli("compare", "pico", str(tmp_path / "padded"), *CPU)
    assert done.returncode == 2 and "vocabularies of 4096 and 4160 tokens" in done.stderr


def test_names_and_limits_are_checked_first(mycli: Mycli) -> None:
    assert "nosuch: no model of that name" in mycli("compare", "pico", "nosuch", *CPU).stderr
    for wrong in (("--max-kl", "0"), ("-n", "0"), ("--plot", "x.png")):
        assert mycli("compare", "pico", "pico", *wrong, *CPU).returncode == 2


def _compared(kl: float = 0.0, changed: int = 0, calls: int = 0) -> Any:
    rows = [PromptComparison(f"p{index}", 9, None, kl, 1.0, index >= changed, "none") for index in range(4)]
    rows = [replace(row, calls="lost") if index < calls else row for index, row in enumerate(rows)]
    return Comparison(tuple(rows), Interval(kl, 0.0, kl), 1.0, Interval(1.0, 1.0, 1.0), 2, 1)


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (_compared(0.9e-3), "no difference that matters"),
        (_compared(0.9e-3, changed=1), "close"),
        (_compared(1e-3), "close"),
        (_compared(0.9e-3, calls=1), "different"),
        (_compared(0.049, changed=4), "close"),
        (_compared(0.05), "different"),
        (_compared(0.049, calls=1), "different"),
    ],
    ids=[
        "same",
        "another-answer",
        "at-the-first-limit",
        "a-lost-call-of-the-same-numbers",
        "answers-only",
        "at-the-second-limit",
        "a-lost-call",
    ],
)
def test_the_verdict_is_that_of_the_worse_of_numbers_and_replies(result: Comparison, verdict: str) -> None:
    assert comparison_verdict(result).startswith(verdict)


def test_without_an_interval_the_mean_decides() -> None:
    single = replace(_compared(0.01), kl=Interval(0.01, None, None))
    assert comparison_verdict(single).startswith("close")
    assert comparison_verdict(replace(single, kl=Interval(0.05, None, None))).startswith("different")
    assert [_range(interval, ".2f") for interval in (single.kl, Interval(1, 0.5, 1.5))] == [
        "0.01",
        "1.00 (95%: 0.50 to 1.50)",
    ]


@pytest.mark.parametrize(("calls", "text"), [("none", ""), ("lost", "lost")])
def test_a_table_names_changed_calls_alone(calls: str, text: str) -> None:
    (column,) = (column for column in _COLUMNS if column.heading == "calls")
    assert column.text({"calls": calls}) == text


def test_a_result_at_its_limit_passes() -> None:
    result = _compared(0.05, changed=1)
    _check(result, 0.05, 0.25)
    for limits in ((0.0499, None), (None, 0.24)):
        with pytest.raises(GateError, match="above --max-kl|more than --max-changed"):
            _check(result, *limits)
    _check(_compared(changed=1, calls=1), None, 0.25)  # of one prompt
    with pytest.raises(GateError, match="25% of the answers or calls changed"):
        _check(_compared(calls=1), None, 0)
    assert [_difference(index) for index in (None, 0, 11)] == ["none", "token 1", "token 12"]


def test_no_more_prompts_are_read_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[_read_prompts.__module__], "_MAX_PROMPTS", 2)
    monkeypatch.setattr(sys.modules[_read_prompts.__module__], "MAX_LINE", 40)
    path = tmp_path / "p.jsonl"
    whole = json.dumps({"prompt": "x" * 25}) + "\n"
    assert len(whole) == 40
    path.write_text(whole * 2)
    assert len(_read_prompts(path)) == 2
    for text in (whole * 3, json.dumps({"prompt": "x" * 26}) + "\n"):
        path.write_text(text)
        with pytest.raises(UsageError, match="too long, or one of too many"):
            _read_prompts(path)
