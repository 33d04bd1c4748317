"""What people met in their first hour with the program, and what it does there now."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mycli.cli.chat.slash_commands import complete_path
from mycli.cli.main import main
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build
from tests.support.command_line import Mycli
from tests.support.paths import PICO

# Chat


def test_a_piped_chat_that_was_refused_something_fails(mycli: Mycli, tmp_path: Path) -> None:
    done = mycli("chat", "pico", "-t", "0", "--device", "cpu", "--ctx", "32", input="word " * 60 + "\nHi\n")
    assert done.returncode == 2 and "room for 32" in done.stderr and done.stdout.strip()
    unwritable = mycli("chat", "pico", "--session", str(tmp_path / "none" / "talk.json"), input="Hi\n")
    assert unwritable.returncode == 2 and "is not a folder" in unwritable.stderr and not unwritable.stdout


def test_the_memory_of_a_chat_is_the_process_s(mycli: Mycli) -> None:
    done = mycli("chat", "pico", "-t", "0", "--device", "cpu", input="Hi\n")
    size, unit = done.stderr.strip().rpartition(" · ")[2].split()
    assert unit == "GiB" or (unit == "MiB" and float(size) > 100), "Python and torch are in it"


def test_dropping_the_oldest_turns_looks_at_few_lengths(
    mycli: Mycli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mycli.cli.chat.session import Chat

    turns = [
        {"role": role, "content": f"{index} word word word word"}
        for index in range(200)
        for role in ("user", "assistant")
    ]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps({"schema_version": 1, "model": "pico", "system": None, "turns": turns}))
    looks = []
    tokens = Chat.tokens
    monkeypatch.setattr(Chat, "tokens", lambda chat: looks.append(chat) or tokens(chat))
    arguments = ("chat", "pico", "--session", str(path), "--overflow", "drop-oldest", "--ctx", "512", "--device", "cpu")
    done = mycli(*arguments, "-t", "0", input="Hello!\n")
    assert done.returncode == 0 and "turns dropped" in done.stderr
    assert len(looks) <= 12, "by halving, not one turn after another"


def test_tab_offers_commands_settings_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "night").mkdir()
    monkeypatch.chdir(tmp_path)
    assert complete_path("n") == ["night/", "notes.txt"]
    assert complete_path(f"{tmp_path}/no") == [f"{tmp_path}/notes.txt"]
    assert complete_path("nowhere/x") == []


# Refused before the work


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quantize", "pico", "--max-kl", "-1"), "--max-kl -1"),
        (("quantize", "pico", "--plot", "nowhere/x.svg"), "there is no folder"),
        (("quantize", "pico", "--bits", "3", "--target-bpw", "4"), "--bits and --target-bpw"),
        (("quantize", "pico", "-o", "mine", "--dry-run"), "was not written by this program"),
        (("quantize", "pico", "-o", "mine", "--overwrite"), "was not written by this program"),
        (("quantize", "pico", "--max-ram", "10"), "has no unit"),
        (("quantize", "pico", "--calib", "/dev/zero"), "not a regular file"),
        (("eval", "pico", "--text", "/dev/zero"), "not a regular file"),
        (("bench", "pico", "--save", "mine/letter.txt"), "something else"),
        (("bench", "pico", "--save", "nowhere/x.json"), "there is no folder"),
        (("bench", "pico", "nope-nope"), "nope-nope: no model of that name"),
        (("bench", "pico", "-p", "-1"), "-p -1: '-1' is not a count"),
        (("bench", "pico", "-n", "1,-2"), "-n 1,-2: '-2' is not a count"),
        (("bench", "pico", "-d", "-1"), "-d -1: '-1' is not a count"),
        (("bench", "pico", "-b", "-1"), "-b -1: '-1' is not a count"),
        (("bench", "draft", "pico", "ngram", "-n", "-1"), "-n / --generate: '-1' is not a count"),
        (("bench", "serve", "pico", "-p", "-1"), "-p -1: '-1' is not a count"),
        (("bench", "serve", "pico", "--clients", "-1"), "--clients -1: '-1' is not a count"),
        (("bench", "serve", "pico", "--shared", "-1"), "--shared: '-1' is not a count"),
        (("estimate", "pico", "--gpu", "24"), "has no unit"),
        (("run", "pico", "Hi", "--top-k", "-1"), "--top-k -1 is out of range\nhint: choose between 0 and 2147483648"),
        (("chat", "pico", "-t", "-1"), "--temperature -1.0 is out of range"),
        (("run", "pico", "Hi", "--logit-bias", "-4=2"), "--logit-bias -4=2.0 is out of range"),
        (("chat", "pico", "--ctx", "8k"), "more than the 2048 tokens"),
        (("serve", "pico", "--api-key-file", "none.txt"), "none.txt: no such file"),
        (("export", "pico", "--to", "gguf", "-o", "."), "GGUF is one file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_end_well_does_not_begin(
    arguments: tuple[str, ...], message: str, mycli: Mycli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("Dear Ada,")
    monkeypatch.chdir(tmp_path)
    done = mycli(*arguments, *(() if arguments[0] == "estimate" else ("--device", "cpu")))
    assert done.returncode in (2, 4) and message in done.stderr and not done.stdout
    assert (tmp_path / "mine" / "letter.txt").read_text() == "Dear Ada,"


def test_a_persons_files_in_a_quantized_folder_stay(mycli: Mycli, tmp_path: Path) -> None:
    call = (
        "quantize",
        "pico-draft",
        "--method",
        "rtn",
        "--group",
        "64",
        "--report",
        "none",
        "-o",
        str(tmp_path / "out"),
    )
    assert mycli(*call).returncode == 0 and mycli(*call, "--overwrite").returncode == 0
    notes = tmp_path / "out" / "notes.md"
    notes.write_text("mine")
    refused = mycli(*call, "--overwrite")
    assert refused.returncode == 2 and "contains notes.md" in refused.stderr and notes.read_text() == "mine"
    recipe = mycli("show", str(tmp_path / "out"), "--recipe").stdout
    assert "None" not in recipe


def test_a_name_with_a_space_is_quoted_where_it_is_to_be_typed(mycli: Mycli, tmp_path: Path) -> None:
    shutil.copytree(PICO.parent / "pico-draft", tmp_path / "my model")
    done = mycli("quantize", str(tmp_path / "my model"), "--method", "rtn", "--group", "64", "--report", "none")
    assert "chat with it: mycli chat 'my model-rtn-int4-g64'" in done.stderr
    (tmp_path / "my model" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "my model" / "chat_template.jinja").unlink(missing_ok=True)
    again = mycli(*done.args, "--overwrite")
    assert "continue a text with it: mycli run 'my model-rtn-int4-g64' PROMPT" in again.stderr


@pytest.mark.parametrize("kept", [True, False], ids=["blocks-are-kept", "nothing-yet"])
def test_ctrl_c_says_how_to_go_on(kept: bool, mycli: Mycli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mycli.quant import pipeline

    def stopped(*_: object, **options: object) -> None:
        if kept:
            (tmp_path / "work").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "quantize", stopped)
    typed = ["quantize", "pico", "--samples", "8", "--work-dir", str(tmp_path / "work"), "-o", str(tmp_path / "a b")]
    monkeypatch.setattr(sys, "argv", ["mycli", *typed])
    done = mycli(*typed)
    assert done.returncode == 130
    words = "to continue" if kept else "to start again"
    assert f"{words}: mycli {shlex.join(typed)}" in done.stderr, "with the command, quoted"


# Completion, and the machine


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("mycli spec ", {"check", "verify"}),
        ("mycli run pico --kv ", {"auto", "bf16", "int8", "int4"}),
        ("mycli quantize pico --method a", {"awq", "awq+gptq"}),
    ],
)
def test_tab_in_the_shell(line: str, offered: set[str], environment: dict[str, str]) -> None:
    completing = {"_MYCLI_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "mycli.cli"], env={**environment, **completing}, capture_output=True, text=True
    )
    assert set(done.stdout.split()) == offered, done.stderr


def test_a_kernel_that_cannot_be_built_is_told(mycli: Mycli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_reason", lambda: "is missing")
    monkeypatch.setattr(
        build, "native", lambda: Declined("compiler-failed", {"compiler": "g++", "error": "a.h:1: error"})
    )
    done = mycli("run", str(PICO), "Hi", "-t", "0", "-n", "1", "--device", "cpu")
    assert done.returncode == 0 and "replies are slower: g++ failed: a.h:1: error" in done.stderr


def test_threads_are_told_to_torch_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    for line in (["list", "--threads", "3"], ["--threads", "3", "list"]):
        os.environ["OMP_NUM_THREADS"] = "9"
        with pytest.raises(SystemExit) as ended:
            main(line)
        assert ended.value.code == 0 and os.environ["OMP_NUM_THREADS"] == "3"


def test_threads_wait_for_work_so_shortly_that_a_neighbour_gets_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the wait is some 10 ns: a tenth of a millisecond at most."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    with pytest.raises(SystemExit):
        main(["list"])
    assert 0 < int(os.environ["GOMP_SPINCOUNT"]) <= 10_000
