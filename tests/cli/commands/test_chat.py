"""Test `mycli chat` in a pseudo-terminal."""

import io
import json
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from tests.support.command_line import Mycli
from tests.support.forked import ForkedTerminal
from tests.support.grids import chosen
from tests.support.paths import ROOT

Terminal = Callable[..., "pexpect.spawn[str]"]
PROMPT = ">>> "


@pytest.fixture
def terminal(environment: dict[str, str]) -> Iterator[Terminal]:
    """Start a chat in its own terminal and wait for its first prompt."""
    children: list[pexpect.spawn[str]] = []
    environment.pop("COLUMNS")  # it would override the terminal's width

    def start(
        *arguments: str, columns: int = 80, script: bool = False, log: io.StringIO | None = None, **extra: str
    ) -> "pexpect.spawn[str]":
        program = [str(ROOT / "tests" / "support" / "scripted_chat.py")] if script else ["-m", "mycli.cli"]
        kind = pexpect.spawn if "LC_ALL" in extra else ForkedTerminal  # the locale is read when Python starts
        child: pexpect.spawn[str] = kind(
            sys.executable,
            [*program, "chat", "pico", "-t", "0", "--device", "cpu", *arguments],
            env={**environment, "TERM": "xterm", **extra},
            dimensions=(24, columns),
            encoding="utf-8",
            codec_errors="replace",
            timeout=240,
        )
        child.logfile_read = log
        child.delaybeforesend = None  # a prompt that is on the screen reads what is typed
        children.append(child)
        child.expect_exact(PROMPT)
        return child

    yield start
    for child in children:
        child.close(force=True)


def say(child: "pexpect.spawn[str]", text: str) -> str:
    """Type a line; return the screen output until the next prompt."""
    child.sendline(text)
    child.expect_exact(PROMPT)
    return str(child.before)


def leave(child: "pexpect.spawn[str]") -> int | None:
    child.expect(pexpect.EOF)
    child.wait()
    return child.exitstatus if child.exitstatus is not None else -(child.signalstatus or 0)


def test_ctrl_c_drops_a_typed_line_and_leaves_at_an_empty_one(terminal: Terminal) -> None:
    chat = terminal()
    for _ in range(2):  # a second dropped line does not end the conversation
        chat.send("My nam")
        chat.expect_exact("My nam")
        chat.sendintr()
        chat.expect_exact(PROMPT)
        assert "Ctrl-C" not in chat.before
    assert "Leo!" in say(chat, "My name is Leo.")
    chat.sendintr()
    chat.expect_exact("(press Ctrl-C again")
    chat.expect_exact(PROMPT)
    chat.sendintr()
    assert leave(chat) == 130


def test_a_typed_line_that_is_not_utf8_does_not_end_the_chat(terminal: Terminal) -> None:
    """Python reads the C locale's input with half surrogate pairs for such bytes, UTF-8 locales' strictly."""
    for settings in ({"LC_ALL": "C"}, {"PYTHONIOENCODING": "utf-8:strict"}):
        chat = terminal("-q", **settings)
        chat.logfile_read = screen = io.StringIO()
        os.write(chat.child_fd, b"Hi \xff\n")
        chat.expect_exact(PROMPT)
        assert "not UTF-8 at byte 3" in screen.getvalue()
        assert "Leo!" in say(chat, "My name is Leo.")


def test_a_conversation(terminal: Terminal, environment: dict[str, str]) -> None:
    chat = terminal(log=(screen := io.StringIO()))
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
    assert "/bye leaves" in say(chat, "quit")
    say(chat, "/undo")
    assert "no such setting" in say(chat, "/set colour 1")
    assert "out of range" in say(chat, "/set temperature 999")
    assert "Paris" in say(chat, "What is the capital of France?"), "the chat goes on after mistakes"
    chat.sendline('"""What is the')
    chat.expect_exact("... ")
    assert "Tokyo" in say(chat, 'capital of Japan?"""'), "several lines are one message"
    chat.sendline("/bye")
    assert leave(chat) == 0 and "\x1b[?2004h" in screen.getvalue(), "pastes are marked"
    history = Path(environment["XDG_STATE_HOME"]) / "mycli" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "What is the capital of France?" in history.read_text()


def test_two_chats_at_once_keep_the_lines_of_both(terminal: Terminal, environment: dict[str, str]) -> None:
    chats = [terminal(), terminal()]
    for number, chat in enumerate(chats):
        say(chat, f"/set seed {number}")
    for chat in chats:
        chat.sendeof()
        assert leave(chat) == 0
    history = Path(environment["XDG_STATE_HOME"]) / "mycli" / "chat_history"
    assert history.read_text().splitlines() == ["/set seed 0", "/set seed 1"]


def test_a_chat_without_a_history_file(terminal: Terminal, environment: dict[str, str]) -> None:
    history = Path(environment["XDG_STATE_HOME"]) / "mycli" / "chat_history"
    history.mkdir(parents=True)
    chat = terminal(log=(screen := io.StringIO()))
    assert "Paris" in say(chat, "What is the capital of France?")
    chat.sendeof()
    assert leave(chat) == 0 and "of this chat is not kept" in " ".join(screen.getvalue().split())


@pytest.mark.slow
def test_the_c_locale_keeps_other_characters(terminal: Terminal, environment: dict[str, str]) -> None:
    chat = terminal(LC_ALL="C")
    chat.send("ü\x7f")  # Backspace removes a character, not a byte of it
    assert "Paris" in say(chat, "What is the capital of France?")
    say(chat, "Zürich 東京")
    chat.sendline("/bye")
    assert leave(chat) == 0
    history = Path(environment["XDG_STATE_HOME"]) / "mycli" / "chat_history"
    assert history.read_text("utf-8").splitlines()[:2] == ["What is the capital of France?", "Zürich 東京"]


def test_the_prompt_comes_back_after_ctrl_z(environment: dict[str, str]) -> None:
    """Suspend and resume restores the prompt and the typed text under job control, before and after a reply."""
    environment.pop("COLUMNS")
    shell = pexpect.spawn(
        "bash",
        ["--norc", "--noprofile", "-i"],
        env={**environment, "TERM": "xterm", "PS1": "shell$ "},
        encoding="utf-8",
        timeout=240,
    )
    try:
        shell.expect_exact("shell$ ")
        shell.sendline(f"{sys.executable} -m mycli.cli chat pico -t 0 --device cpu")
        shell.expect_exact(PROMPT)
        for begun, rest, answer in (("What is 7 ti", "mes 8?", "56"), ("What is the capital of ", "Japan?", "Tokyo")):
            shell.send(begun)
            shell.expect_exact(begun)
            for _ in range(2):
                shell.send("\x1a")
                shell.expect_exact("Stopped")
                shell.expect_exact("shell$ ")
                shell.sendline("fg")
                shell.expect_exact(PROMPT + begun)
            shell.sendline(rest)
            shell.expect_exact(answer)
            shell.expect_exact(PROMPT)
        shell.sendline("/bye")
        shell.expect_exact("shell$ ")
    finally:
        shell.close(force=True)


def test_every_command(terminal: Terminal, tmp_path: Path) -> None:
    notes, saved, session = tmp_path / "notes.txt", tmp_path / "saved.json", tmp_path / "session.json"
    notes.write_text("My name is Zoe.\n")
    chat = terminal("--session", str(session), EDITOR="sed -i s/Japan/France/")
    for command in ("/retry", "/undo", "/edit", "/edit x"):
        assert "there is no message yet" in say(chat, command)
    assert all(f"{name}  " in say(chat, "/?") for name in ("/?", "/read", "/context", "/bye"))
    assert "no reply yet" in say(chat, "/stats")
    assert "0 tokens" in say(chat, "/context")
    assert "Nice to meet you, Leo!" in say(chat, "My name is Leo.")
    retried = say(chat, "/retry")
    assert "Nice to meet you, Leo!" in retried
    prompt, cached = re.search(r"prompt (\d+) \((\d+) cached\)", retried).groups()  # type: ignore[union-attr]  # else it fails
    assert int(cached) == int(prompt) - 1, "only the last token is run again"
    assert "Mia!" in say(chat, "/edit My name is Mia.") and "Mia" in say(chat, "What is my name?")
    assert "removed: What is my name?" in say(chat, "/undo")
    assert "Tokyo" in say(chat, "What is the capital of Japan?")
    assert "Paris" in say(chat, "/edit"), "the editor changed the message"
    assert "was not changed" in say(chat, "/edit")
    meter = say(chat, "/context")
    used, free = (int(re.search(rf"{name} +(\d+)", meter)[1]) for name in ("turns", "free"))  # type: ignore[index]  # as above
    assert used + free == 2048 and "4 messages" in meter
    assert "4 messages saved" in say(chat, f"/save {saved}")
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    kept = json.loads(session.read_text())
    assert [turn["content"] for turn in kept["turns"]][0::2] == ["My name is Mia.", "What is the capital of France?"]
    say(chat, "/clear")
    assert json.loads(session.read_text())["turns"] == [] and "Mia" not in say(chat, "/context")
    assert "4 messages loaded" in say(chat, f"/load {saved}")
    assert "Mia" in say(chat, "What is my name?").replace("What is my name?", "")
    say(chat, "/clear")
    assert "16 characters" in say(chat, f"/read {notes}") and "notes.txt, " in say(chat, "/context")
    say(chat, "Hello!")
    assert json.loads(session.read_text())["turns"][0]["content"] == "notes.txt:\n\nMy name is Zoe.\n\n\nHello!"
    assert "(no system prompt)" in say(chat, "/system")
    say(chat, "/system You are a pirate.")
    assert "You are a pirate." in say(chat, "/system") and "You are a pirate." in say(chat, "/show")
    say(chat, "/system none")
    say(chat, "/set temperature 0.5")
    say(chat, "/set top-p=0.7")  # as the option is spelled
    say(chat, "/set presence_penalty 0.2")
    shown = say(chat, "/show")
    assert re.search(r"top_p +0\.7", shown) and re.search(r"presence_penalty +0\.2", shown)
    assert re.search(r"messages +2", shown), "a message and its reply"
    assert re.search(r"temperature +0\.5", shown) and re.search(r"seed +random", shown)
    assert "None" not in shown and "()" not in shown
    for wrong, message in {
        "/read": "needs a file",
        "/save": "saved to",  # to the session's file
        f"/read {tmp_path}": "a folder",
        f"/read {tmp_path}/none": "no such file",
        f"/load {notes}": "not JSON",
        "/read ~no-such-user/x": "no such file",
        "/save ~no-such-user/x": "is not a folder",
        f"/save {tmp_path}/none/x": "is not a folder",
        f"/save {notes}": "not a conversation",
        "/set": "repetition_penalty",  # without a name it lists the names
        "/set parameter temperature hot": "'hot' is not a number",  # Ollama's spelling
        "/load /dev/zero": "not a regular file",
        "/set seed x": "not a number",
        "/set top_p nan": "not a finite number",
        "/set temperature 1e9": "out of range",
        "/set seed 99999999999999999999": "out of range",
        "/set think on": "cannot turn reasoning on or off",
        "/set think maybe": "is not on or off",
        "/set think": "/set think needs a value",
        "/set temperature": "/set temperature needs a value",
        "/cler": "did you mean /clear?",
    }.items():
        assert message in " ".join(say(chat, wrong).split()), wrong
    assert "--think" not in say(chat, "/set think on"), "an option that was not typed"
    assert "did you mean" not in say(chat, "/"), "every command is as close"
    chat.sendline("/exit")
    assert leave(chat) == 0
    again = terminal("--session", str(session))
    assert "Hello!" in say(again, "/undo") and json.loads(session.read_text())["turns"] == []
    again.kill(signal.SIGTERM)
    assert leave(again) == 143


def test_a_paste_of_many_lines_is_one_message(terminal: Terminal, environment: dict[str, str]) -> None:
    """A paste of 2,000 lines is one message: refused once with its size; no line of it runs or enters history."""
    chat = terminal("--ctx", "512")
    lines = ["What is the capital of Japan?", "/bye", *(f"line {index}" for index in range(1998))]
    chat.send("\x1b[200~" + "\n".join(lines) + "\x1b[201~")
    chat.send("\r")
    chat.expect(r"the conversation has (\d+) tokens, the context has room for 512")
    assert int(chat.match[1]) > 6000
    chat.expect_exact(PROMPT)
    chat.send("\x1b[200~What is the\ncapital of Japan?\x1b[201~")
    chat.send("\r")
    chat.expect_exact("Tokyo")
    chat.expect_exact(PROMPT)
    assert "2\r\n" in say(chat, "/show").split("messages")[1]
    chat.setwinsize(24, 20)
    chat.sendline("/context")  # the prompt is drawn anew for the new width, so `say` would not wait for the answer
    chat.expect(r"(\[[#=.]+\])\r\n")
    assert len(chat.match[1]) <= 20, "the meter follows"
    chat.expect(r"free +\d+")
    chat.expect_exact(PROMPT)
    chat.setwinsize(60, 200)
    chat.sendline("What is the capital of France?")
    chat.expect_exact("Paris")
    chat.expect_exact(PROMPT)
    chat.sendeof()
    assert leave(chat) == 0
    history = (Path(environment["XDG_STATE_HOME"]) / "mycli" / "chat_history").read_text()
    assert "line 7" not in history and "capital of France" in history


THOUGHT = "<think>\nLet me see 🤔\n</think>\n"
SPLIT = "e\u0301 👩\u200d👩\u200d👧 🇯🇵 日本 a\u0308\u0323"


@pytest.mark.parametrize("width", chosen([80, 20], quick=[20]))
def test_what_a_model_may_write(width: int, terminal: Terminal) -> None:
    """C17, C21: characters split over tokens stay whole, reasoning is dim, and escape sequences are shown as text."""
    evil = "\x1b]52;c;aGk=\x07\x1b[2J\x9b1m\r\x08\u202e\x1b]8;;http://x\x1b\\done"
    replies = json.dumps([THOUGHT + SPLIT, evil, " ".join(["word"] * 500), "later"])
    chat = terminal(script=True, columns=width, MYTEST_REPLIES=replies, MYTEST_SECONDS="0.01")
    reply = say(chat, "one")
    assert SPLIT in reply.replace("\r\n", "\n") and "\ufffd" not in reply
    dim = "".join(re.findall(r"\x1b\[2m(.*?)\x1b\[0m", reply.split(SPLIT)[0], re.DOTALL))
    assert dim.replace("\r\n", "\n") == THOUGHT.removesuffix("\n")
    reply = say(chat, "two")
    assert "^[]52;c;aGk=^G^[[2J\\u009b1m^M^H\\u202e^[]8;;http://x^[\\done" in reply
    chat.sendline("three")
    chat.expect_exact("word word")
    chat.sendintr()
    chat.expect_exact("(stopped)")
    chat.expect_exact(PROMPT)
    assert "later" in say(chat, "four")
    assert re.search(r"messages +8", say(chat, "/show")), "the stopped reply is a turn"
    chat.sendeof()
    assert leave(chat) == 0


def test_what_is_typed_during_a_reply_is_the_next_message(terminal: Terminal) -> None:
    replies = json.dumps([" ".join(["word"] * 40), "second", "third"])
    chat = terminal(script=True, MYTEST_REPLIES=replies, MYTEST_SECONDS="0.02")
    chat.sendline("one")
    chat.expect_exact("word word")
    chat.send("two\rthr")
    chat.expect_exact(PROMPT + "two")
    chat.expect_exact("second")
    chat.expect_exact(PROMPT + "thr")
    chat.sendline("ee")
    chat.expect_exact("third")
    chat.expect_exact(PROMPT)
    assert re.search(r"messages +6", say(chat, "/show"))


def test_thoughts_without_colour_and_markdown_on_request(terminal: Terminal) -> None:
    """D19: NO_COLOR."""
    chat = terminal(script=True, NO_COLOR="1", MYTEST_REPLIES=json.dumps([THOUGHT + SPLIT]))
    reply = say(chat, "one")
    assert "\x1b[2m" not in reply and "</think>" in reply and SPLIT in reply
    text = "# Title\n\n- **bold** item\n- [name](http://x) \x1b]52;c;aGk=\x07\n"
    chat = terminal("--markdown", script=True, MYTEST_REPLIES=json.dumps([THOUGHT + text, text]))
    reply = say(chat, "one")
    shown = reply.rpartition("\x1b[2K")[2]  # the last frame: a slow machine also draws one with half of the marks
    assert "Title" in reply and "\x1b[1mbold" in shown and "**" not in shown and "• " in shown
    assert "\x1b]" not in reply, "no hyperlink, no clipboard"
    assert "\x1b[?25h" in reply, "the cursor is back"
    assert "<think>" in reply and "\x1b[2m" in reply


def test_the_oldest_turns_are_dropped_only_when_asked(mycli: Mycli) -> None:
    typed = (
        "My name is Leo.\nWhat is the capital of Japan?\nWhat is the capital of France?\nWhat is my name?\n/context\n"
    )
    arguments = ("chat", "pico", "-t", "0", "--device", "cpu", "--ctx", "64")
    done = mycli(*arguments, "--overflow", "drop-oldest", input=typed)
    assert "Paris" in done.stdout and re.search(r"the oldest (1 turn|2 turns) dropped: \d+ of \d+ tokens", done.stderr)
    assert "Leo" not in done.stdout.split("Paris")[1] and "dropped" in done.stdout
    assert mycli(*arguments, "--overflow", "guess", input="").returncode == 2


def test_ctrl_c_stops_the_reply_and_keeps_the_turn(terminal: Terminal) -> None:
    """D15: a second Ctrl-C at the prompt warns, a third exits with 130."""
    chat = terminal("--system", "You are Pico, a tiny language model.")
    assert "You are Pico" in say(chat, "/system")
    say(chat, "/set repetition_penalty 1.3")
    say(chat, "/set temperature 2")
    chat.sendline("Tell me a story.")
    chat.expect(r"Tell me a story\.\r\n.*\w+ \w+")
    chat.sendintr()
    chat.expect_exact(PROMPT)
    if "(stopped)" in chat.before:
        assert "2" in say(chat, "/show").split("messages")[1]
    chat.sendintr()
    chat.expect_exact("Ctrl-D to leave")
    chat.expect_exact(PROMPT)
    chat.sendintr()
    assert leave(chat) == 130


def test_a_dumb_terminal_gets_no_escape_sequences_and_a_full_context_numbers(terminal: Terminal) -> None:
    """D19: prompts, a refusal, a reply, a list, an interruption; `test_a_conversation` shows that xterm gets them."""
    screen = io.StringIO()
    chat = terminal("--ctx", "24", TERM="dumb", log=screen)
    refused = say(chat, "Tell me a story about a boat and a lantern and a key and a map and a drum.")
    assert re.search(r"has \d+ tokens, the context has room for 24", refused)
    assert "Tokyo" in say(chat, "What is the capital of Japan?")
    say(chat, "/show")
    chat.sendintr()
    chat.expect_exact("Ctrl-D to leave")
    chat.expect_exact(PROMPT)
    chat.sendeof()
    assert leave(chat) == 0 and "\x1b" not in screen.getvalue()
