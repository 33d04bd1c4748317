"""The program as a whole: command table, exit codes, signals, pipes, and imports per command."""

import importlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mycli.cli.main import COMMANDS, GROUPS, option_keys, replace_old_bench
from tests.support.command_line import Mycli
from tests.support.forked import ForkedProcess
from tests.support.paths import PICO


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_exists_with_help_and_examples(name: str, mycli: Mycli) -> None:
    module = importlib.import_module(f"mycli.cli.commands.{COMMANDS[name][0]}")
    file, summary = COMMANDS[name]
    assert module.EXAMPLES and module.__doc__
    assert (getattr(module, file).__doc__ or "").splitlines()[0] == summary, "the list of commands and --help agree"
    assert {"json", "quiet", "verbose", "debug", "offline", "device"} <= option_keys(name).keys()
    page = mycli(*name.split(), "--help")
    assert page.returncode == 0 and "Examples:" in page.stdout and page.stderr == ""
    values = re.findall(r"^  -.*? (<.*?>)", page.stdout, re.MULTILINE)
    assert not values, "what an option takes has a name that is no programmer's"
    assert all(len(line) <= 80 for line in page.stdout.partition("Examples:")[0].splitlines())


def test_every_file_of_commands_is_in_the_table() -> None:
    folder = Path(importlib.import_module("mycli.cli.commands").__file__ or "").parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert files == {file for file, _ in COMMANDS.values()}


def test_help_lists_every_command_with_its_line(mycli: Mycli) -> None:
    pages = {group: mycli(*group.split(), "--help").stdout for group in ("", *GROUPS, "bench")}
    for name, (_, line) in COMMANDS.items():
        group, _, word = name.rpartition(" ")
        summary = name if group == "bench" else " ".join(line.split()[:3])
        assert word in pages[group] and summary in " ".join(pages[group].split())
    assert all(group in pages[""] for group in GROUPS)


@pytest.mark.parametrize("name", ["", "pull", "cache", "bench serve"])
def test_help_of_a_command_is_its_help_page(mycli: Mycli, name: str) -> None:
    page = mycli("help", *name.split())
    assert page.returncode == 0 and page.stdout == mycli(*name.split(), "--help").stdout


def test_help_of_no_command_is_2(mycli: Mycli) -> None:
    done = mycli("help", "nope")
    assert done.returncode == 2 and "no such command 'nope'" in done.stderr


@pytest.mark.parametrize("words", [("run", "pico", "Hi"), ("quantize", "pico", "--dry-run")], ids=" ".join)
def test_a_deleted_current_folder_is_named(words: tuple[str, ...], environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    call = [sys.executable, "-m", "mycli.cli", *words]
    script = 'rmdir "$PWD" && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *call], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 3 and done.stderr.startswith("error: the current folder was deleted\n")


def test_a_device_that_is_not_there_is_5_and_never_falls_back(mycli: Mycli) -> None:
    done = mycli("run", "pico", "Hi", "--device", "cuda:99")
    assert done.returncode == 5 and "cuda:99" in done.stderr


def test_a_bad_model_is_3_with_file_and_field(mycli: Mycli, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((PICO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": -1}))
    done = mycli("run", str(folder), "Hi")
    assert done.returncode == 3 and "config.json: hidden_size" in done.stderr
    answer = mycli("run", str(folder), "Hi", "--json")
    assert json.loads(answer.stdout)["error"]["exit_code"] == 3 and answer.returncode == 3


def test_a_reader_that_leaves_is_141_without_a_word(environment: dict[str, str]) -> None:
    """D18: `mycli ... | head`; a shell reports a process that SIGPIPE ended as 141 too."""
    command, pipe = [sys.executable, "-m", "mycli.cli", "run", "pico", "Tell me a story.", "-q"], subprocess.PIPE
    with ForkedProcess(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, bufsize=0
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.read(5)
        child.stdout.close()
        errors = child.stderr.read()
    assert child.returncode in (141, -signal.SIGPIPE) and errors == b""


def test_a_reply_is_terminated(environment: dict[str, str]) -> None:
    """D17: with torch and a helper process; test_resume interrupts a reply, and test_command covers every signal."""
    child = ForkedProcess(
        [sys.executable, "-m", "mycli.cli", "run", "pico", "--raw", "Once", "-n", "2000", "--device", "cpu"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.read(1)
    child.terminate()
    _, errors = child.communicate(timeout=240)
    assert child.returncode == 143 and b"Traceback" not in errors


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bench pico --serve -p 8", "bench serve pico -p 8"),
        ("bench --serve http://x --draft ngram", "bench serve http://x --draft ngram"),
        ("bench pico --draft pico-draft -n 8", "bench draft pico -n 8 pico-draft"),
        ("bench --draft=ngram pico", "bench draft pico ngram"),
        ("bench pico --draft none", "bench pico"),
        ("bench pico --draft", "bench pico --draft"),
        ("bench serve pico --draft ngram", "bench serve pico --draft ngram"),
        ("run pico --draft ngram", "run pico --draft ngram"),
    ],
)
def test_old_spellings_of_bench_still_work(old: str, new: str) -> None:
    assert replace_old_bench(old.split()) == new.split()
