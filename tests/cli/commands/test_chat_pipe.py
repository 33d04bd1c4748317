"""Test `mycli chat` with input from a pipe: a line is a message."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.command_line import COMMAND, Mycli
from tests.support.forked import ForkedProcess
from tests.support.paths import PICO


def test_a_pipe_is_a_conversation_of_lines(mycli: Mycli) -> None:
    done = mycli("chat", "pico", "-t", "0", "-q", "--device", "cpu", input="My name is Leo.\n\nWhat is my name?\n")
    assert done.stdout == "Nice to meet you, Leo!\nYour name is Leo.\n"
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_session_in_the_home_folder_is_continued(mycli: Mycli, environment: dict[str, str], tmp_path: Path) -> None:
    """The shell does not expand this ~; the file would be replaced by the new turns alone."""
    environment["HOME"] = str(tmp_path)
    arguments = ("chat", "pico", "-t", "0", "-q", "--device", "cpu", "--session=~/talk.json")
    assert mycli(*arguments, input="My name is Leo.\n").returncode == 0
    assert mycli(*arguments, input="What is my name?\n").stdout == "Your name is Leo.\n"
    assert len(json.loads((tmp_path / "talk.json").read_text())["turns"]) == 4


@pytest.mark.parametrize(("limit", "cut"), [("4", True), ("200", False)])
def test_a_reply_that_its_limit_ends_is_named(limit: str, cut: bool, mycli: Mycli) -> None:
    done = mycli("chat", "pico", "-t", "0", "-n", limit, "--device", "cpu", input="My name is Leo.\n")
    assert done.returncode == 0 and ("(stopped after 4 tokens)" in done.stderr) is cut
    assert ("stopped after" in done.stderr) is cut


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(subprocess.Popen, {"LC_ALL": "C"}), (ForkedProcess, {"PYTHONIOENCODING": "utf-8:strict"})],
    ids=["C", "UTF-8"],
)
def test_a_piped_line_that_is_not_utf8_is_named_after_the_lines_before_it(
    kind: type["subprocess.Popen[bytes]"], settings: dict[str, str], environment: dict[str, str]
) -> None:
    command = [*COMMAND, "chat", "pico", "-t", "0", "-q", "--device", "cpu"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    chat = kind(command, env={**environment, **settings}, **pipes)
    replies, errors = chat.communicate(b"My name is Leo.\r\nHi \xff\nHello!\n", timeout=240)
    assert (replies, chat.returncode) == (b"Nice to meet you, Leo!\n", 2)
    assert b"a line of standard input: not UTF-8 at byte 3" in errors


def test_a_model_without_a_template_is_refused_with_what_to_do(mycli: Mycli, tmp_path: Path) -> None:
    """C6."""
    folder = tmp_path / "plain"
    shutil.copytree(PICO, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    done = mycli("chat", str(folder), input="Hi\n")
    assert done.returncode == 2 and "no chat template" in done.stderr and "mycli run" in done.stderr
    assert "add --chat-template FILE" in done.stderr
    assert mycli("run", str(folder), "Once upon a time", "-n", "4", "-q", "--device", "cpu").returncode == 0


def test_json_is_an_object_for_each_reply(mycli: Mycli) -> None:
    done = mycli(
        "chat", "pico", "--json", "--device", "cpu", input="My name is Leo.\n/show\n/nonsense\nWhat is my name?\n"
    )
    first, error, second = map(json.loads, done.stdout.splitlines())
    assert "Leo" in first["text"] and "Leo" in second["text"] and second["cached_tokens"] > 0
    assert error["error"]["exit_code"] == 2 and "Settings" in done.stderr
