"""Test `mycli run --resume`: a killed command continues, and its output file equals that of an uninterrupted run."""

import json
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from mycli.cli.replies.generation import Generator
from mycli.cli.replies.recorded_reply import without_first
from mycli.runtime.errors import UsageError
from tests.support.command_line import COMMAND, Mycli
from tests.support.forked import ForkedProcess

STORY = ("run", "pico", "Tell me a story.", "--device", "cpu", "-t", "0.9", "--seed", "3")


@pytest.fixture
def state(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {**environment, "XDG_STATE_HOME": str(tmp_path / "state")}


def records(state: dict[str, str]) -> list[Path]:
    return sorted((Path(state["XDG_STATE_HOME"]) / "mycli" / "replies").glob("*.jsonl"))


def interrupt(state: dict[str, str], out: Path, number: signal.Signals, *more: str) -> tuple[str, int]:
    command = [*COMMAND, *STORY, *more]
    with out.open("wb") as file:
        child = ForkedProcess(
            command,
            env=state,
            cwd=tempfile.gettempdir(),
            stdout=file,
            stderr=subprocess.PIPE,
        )
        while child.poll() is None and not any(path.read_bytes().count(b"\n") > 5 for path in records(state)):
            time.sleep(0.002)
        child.send_signal(number)
        _, said = child.communicate()
    return said.decode(), child.returncode


def test_a_killed_reply_is_continued_in_its_file(state: dict[str, str], tmp_path: Path, mycli: Mycli) -> None:
    out = tmp_path / "out.txt"
    assert interrupt(state, out, signal.SIGKILL, "--draft", "pico-draft")[1] == -signal.SIGKILL
    (record,) = records(state)
    assert record.stat().st_mode & 0o777 == 0o600
    head, tokens = record.read_bytes().split(b"\n", 1)
    record.write_bytes(json.dumps({**json.loads(head), "fingerprint": "other"}).encode() + b"\n" + tokens)
    changed = mycli("run", "--resume", "last", env=state)
    assert changed.returncode == 3 and "have changed since the reply began" in changed.stderr
    record.write_bytes(head + b"\n" + tokens)
    had = out.read_bytes()
    rest = mycli("run", "--resume", "last", "--after", str(len(had)), "-q", env=state)
    assert rest.returncode == 0, rest.stderr
    whole = mycli(*STORY, "--no-record", env=state).stdout
    assert had.decode() + rest.stdout == whole and len(had) < len(whole.encode())
    assert not records(state)


def test_ctrl_c_names_the_command_that_continues(state: dict[str, str], tmp_path: Path, mycli: Mycli) -> None:
    said, code = interrupt(state, tmp_path / "out.txt", signal.SIGINT)
    (record,) = records(state)
    assert code == 130 and f"mycli run --resume {record.stem} continues" in said and "Traceback" not in said
    answer = json.loads(mycli("run", "--resume", record.stem, "--json", env=state).stdout)
    whole = json.loads(mycli(*STORY, "--json", env=state).stdout)
    timed = ("id", "cached_tokens", "first_token_seconds", "tokens_per_second", "load_seconds")
    assert answer["id"] == record.stem and {**answer, **{name: whole[name] for name in timed}} == whole


def test_a_reply_that_ended_leaves_nothing(state: dict[str, str], mycli: Mycli) -> None:
    assert mycli("run", "pico", "Hello!", "-q", env=state).returncode == 0
    done = mycli("run", "--resume", "last", env=state)
    assert not records(state) and done.returncode == 4 and "no interrupted reply" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["pico", "--resume", "last"], "--resume takes no MODEL"),
        (["--resume", "last", "--batch", "a"], "--resume takes no MODEL"),
        (["pico", "Hello!", "--after", "3"], "--after needs --resume"),
        (["--resume", "chatcmpl-1"], "not a reply of mycli run"),
        (["--resume", "run-../../x"], "no interrupted reply"),
        ([], "missing argument 'MODEL'"),
    ],
)
def test_mistakes(arguments: list[str], cause: str, state: dict[str, str], mycli: Mycli) -> None:
    done = mycli("run", *arguments, env=state)
    assert done.returncode in (2, 4) and cause in done.stderr


def test_the_first_bytes_are_omitted_between_characters() -> None:
    pieces = ["a", "äb", "", "c"]
    assert ["".join(without_first(pieces, count)) for count in (0, 1, 3, 4, 5, 9)] == ["aäbc", "äbc", "bc", "c", "", ""]
    with pytest.raises(UsageError, match="inside a character"):
        list(without_first(pieces, 2))


def test_a_reply_that_could_not_begin_leaves_no_record(state: dict[str, str], mycli: Mycli) -> None:
    """It would be the last interrupted one, and could not begin then either."""
    assert mycli(*STORY, "--stop", "", env=state).returncode == 2
    assert not records(state)


@pytest.mark.parametrize("options", [(), ("--no-record",)], ids=["recorded", "not-recorded"])
def test_a_reply_interrupted_before_its_first_token_cannot_be_continued(
    options: tuple[str, ...], state: dict[str, str], mycli: Mycli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "reply", interrupted)
    done = mycli(*STORY, *options, env=state)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "") and not records(state)
