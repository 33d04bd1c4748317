"""Test `mycli template check`, and templates and their arguments given to run, chat and serve."""

import json
from pathlib import Path

import pytest

from tests.support.command_line import Mycli
from tests.support.paths import ROOT

GOOD = ROOT / "tests/support/templates/agent.jinja"


def test_a_models_template_is_checked_with_its_tokens(mycli: Mycli) -> None:
    done = mycli("template", "check", "pico")
    assert done.returncode == 0 and "3 before the first question" in done.stdout
    assert "note: renders no tools" in done.stdout and "None" not in done.stdout
    strict = mycli("template", "check", "pico", "--strict")
    assert strict.returncode == 0  # a note is no warning


def test_a_file_with_an_error_exits_with_6(mycli: Mycli, tmp_path: Path) -> None:
    path = tmp_path / "broken.jinja"
    path.write_text(GOOD.read_text().replace("{{ tool | tojson }}", "a tool"))
    done = mycli("template", "check", str(path), "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 6 and [finding["code"] for finding in answer["findings"]] == ["tools-not-rendered"]
    assert answer["findings"][0]["remedy"]
    assert answer["findings"][0]["severity"] == "error" and "1 error" in answer["error"]["message"]


def test_warnings_fail_only_when_asked(mycli: Mycli, tmp_path: Path) -> None:
    path = tmp_path / "counting.jinja"
    path.write_text("{{ messages | length }}" + GOOD.read_text())
    assert mycli("template", "check", str(path)).returncode == 0
    strict = mycli("template", "check", "pico", "--chat-template", str(path), "--strict")
    assert strict.returncode == 6 and "4 warnings" in strict.stderr and "    expected" in strict.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "cause"),
    [
        (["missing.jinja"], 4, "no such file"),
        (["pico", "--chat-template", "tool_use"], 2, "no chat template 'tool_use'"),
        (["pico", "--template-arg", "x"], 2, "not NAME=VALUE"),
        (["pico", "--template-arg", "messages=1"], 2, "'messages' is not possible"),
        (["pico", "--reasoning-effort", "some"], 2, "--reasoning-effort some"),
    ],
)
def test_mistakes(arguments: list[str], code: int, cause: str, mycli: Mycli) -> None:
    done = mycli("template", "check", *arguments)
    assert done.returncode == code and cause in done.stderr, done.stderr


def test_run_and_chat_render_with_the_given_template(mycli: Mycli, tmp_path: Path) -> None:
    path = tmp_path / "word.jinja"
    path.write_text(
        "{{ word }} {{ messages[-1].content }}" + "{% if reasoning_effort %} {{ reasoning_effort }}{% endif %}"
    )
    lengths = []
    for words in ([], ["--template-arg", "word=one two three"], ["--reasoning-effort", "high"]):
        options = ["--chat-template", str(path), *words, "--ctx", "64", "--json"]
        done = mycli("run", "pico", "Hello", "-n", "1", *options)
        chat = mycli("chat", "pico", *options, input="Hello\n")
        prompts = {json.loads(text)["prompt_tokens"] for text in (done.stdout, chat.stdout)}
        assert len(prompts) == 1
        lengths += prompts
    assert lengths[1] > lengths[0] and lengths[2] > lengths[0]
    refused = mycli("run", "pico", "Hello", "--chat-template", str(path), "--receipt", str(tmp_path / "r.json"))
    assert refused.returncode == 2 and "--receipt" in refused.stderr
