"""`mycli chat` in a real pseudo-terminal, and fed from a pipe."""

import json
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from tests.conftest import PICO, Mycli

Terminal = Callable[..., "pexpect.spawn[str]"]
PROMPT = ">>> "


@pytest.fixture
def terminal(environment: dict[str, str]) -> Iterator[Terminal]:
    """Start a chat in a terminal of its own, past its first prompt."""
    children: list[pexpect.spawn[str]] = []

    def start(*arguments: str, columns: int = 80, **extra: str) -> "pexpect.spawn[str]":
        child: pexpect.spawn[str] = pexpect.spawn(
            sys.executable,
            ["-m", "mycli.cli", "chat", "pico", "-t", "0", "--device", "cpu", *arguments],
            env={**environment, "TERM": "xterm", **extra},
            dimensions=(24, columns),
            encoding="utf-8",
            timeout=60,
        )
        children.append(child)
        child.expect_exact(PROMPT)
        return child

    yield start
    for child in children:
        child.close(force=True)


def say(child: "pexpect.spawn[str]", text: str) -> str:
    """Type a line; what the screen shows until the next prompt."""
    child.sendline(text)
    child.expect_exact(PROMPT)
    return str(child.before)


def leave(child: "pexpect.spawn[str]") -> int | None:
    child.expect(pexpect.EOF)
    child.wait()
    return child.exitstatus if child.exitstatus is not None else -(child.signalstatus or 0)


def test_a_conversation(terminal: Terminal, environment: dict[str, str]) -> None:
    chat = terminal()
    assert "Nice to meet you, Leo!" in say(chat, "My name is Leo.")
    second = say(chat, "What is my name?")
    assert "Your name is Leo." in second
    cached = re.search(r"prompt (\d+) \((\d+) cached\)", second)
    assert cached and 0 < int(cached[2]) < int(cached[1]), "the first turn is not prefilled again"
    assert "tok/s" in say(chat, "/stats")
    assert "temperature" in say(chat, "/show")
    assert "/clear" in say(chat, "/?")
    say(chat, "/clear")
    assert "Leo" not in say(chat, "What is my name?").replace("What is my name?", "")
    assert "no such command" in say(chat, "/nope")
    assert "no such setting" in say(chat, "/set colour 1")
    assert "out of range" in say(chat, "/set temperature 99")
    assert "Paris" in say(chat, "What is the capital of France?"), "the chat goes on after mistakes"
    chat.sendline("/bye")
    assert leave(chat) == 0
    history = Path(environment["XDG_STATE_HOME"]) / "mycli" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "What is the capital of France?" in history.read_text()


def test_several_lines_are_one_message(terminal: Terminal) -> None:
    chat = terminal()
    chat.sendline('"""What is the')
    chat.expect_exact("... ")
    chat.sendline('capital of Japan?"""')
    chat.expect_exact(PROMPT)
    assert "Tokyo" in chat.before


def test_ctrl_c_stops_the_reply_and_keeps_the_turn(terminal: Terminal) -> None:
    """D15: a second one at the prompt warns, a third leaves with 130."""
    chat = terminal("--system", "You are Pico, a tiny language model.")
    say(chat, "/set repetition_penalty 1.3")
    say(chat, "/set temperature 2")
    chat.sendline("Tell me a story.")
    chat.expect(r"Tell me a story\.\r\n.*\w+ \w+")
    chat.sendintr()
    chat.expect_exact(PROMPT)
    if "(stopped)" in chat.before:
        assert "2" in say(chat, "/show").split("turns")[1]
    chat.sendintr()
    chat.expect_exact("Ctrl-D leaves")
    chat.expect_exact(PROMPT)
    chat.sendintr()
    assert leave(chat) == 130


def test_ctrl_d_leaves(terminal: Terminal) -> None:
    chat = terminal()
    chat.sendeof()
    assert leave(chat) == 0


def test_a_full_context_is_refused_with_numbers_and_the_chat_goes_on(terminal: Terminal) -> None:
    chat = terminal("--ctx", "24")
    refused = say(chat, "Tell me a story about a boat and a lantern and a key and a map and a drum.")
    assert re.search(r"has \d+ tokens, the context room for 24", refused)
    assert "Tokyo" in say(chat, "What is the capital of Japan?")


@pytest.mark.parametrize("setting", ["NO_COLOR", "dumb", "narrow"])
def test_plain_terminals(setting: str, terminal: Terminal) -> None:
    """D19: no colour where none is wanted, and nothing breaks at 20 columns."""
    extra = {"NO_COLOR": {"NO_COLOR": "1"}, "dumb": {"TERM": "dumb"}, "narrow": {}}[setting]
    chat = terminal(columns=20 if setting == "narrow" else 80, **extra)
    reply = say(chat, "What is the capital of Japan?")
    assert "Tokyo" in reply.replace("\r\n", "")
    assert ("\x1b[2m" in reply) is (setting == "narrow")


def test_a_pipe_is_a_conversation_of_lines(mycli: Mycli) -> None:
    done = mycli("chat", "pico", "-t", "0", "-q", "--device", "cpu", input="My name is Leo.\n\nWhat is my name?\n")
    assert done.stdout == "Nice to meet you, Leo!\nYour name is Leo.\n"
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_model_without_a_template_is_refused_with_what_to_do(mycli: Mycli, tmp_path: Path) -> None:
    """C6."""
    folder = tmp_path / "plain"
    shutil.copytree(PICO, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    done = mycli("chat", str(folder), input="Hi\n")
    assert done.returncode == 2 and "no chat template" in done.stderr and "mycli run" in done.stderr
    assert mycli("run", str(folder), "Once upon a time", "-n", "4", "-q", "--device", "cpu").returncode == 0


def test_json_is_an_object_for_each_reply(mycli: Mycli) -> None:
    done = mycli(
        "chat", "pico", "--json", "--device", "cpu", input="My name is Leo.\n/show\n/nonsense\nWhat is my name?\n"
    )
    first, error, second = map(json.loads, done.stdout.splitlines())
    assert "Leo" in first["text"] and "Leo" in second["text"] and second["cached_tokens"] > 0
    assert error["error"]["exit_code"] == 2 and "Settings" in done.stderr
