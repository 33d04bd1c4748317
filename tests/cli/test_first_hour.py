"""What people met in their first hour with the program, and what it does there now."""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mycli.cli.chat.slash_commands import complete_path
from mycli.cli.flags.presets import apply_preset
from mycli.cli.main import main
from mycli.cli.output import Output
from mycli.cli.text.layout import WordWrap, fitting, width
from mycli.cli.text.progress import reading
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.names import candidates, plain_name
from mycli.runtime.kernels.cpu.library import build
from tests.support.command_line import Mycli
from tests.support.hub_server import HubServer, hub_server
from tests.support.paths import PICO


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


# A reply on the screen


def test_values_of_a_card_are_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal; a pipe has them whole. A path longer than the line stays whole too."""
    monkeypatch.setenv("COLUMNS", "40")
    value, path = "temperature, top_k, top_p, min_p, repetition_penalty, seed", "/tmp/" + "x" * 60
    shown, piped = Terminal(), io.StringIO()
    for stream in (shown, piped):
        Output(stdout=stream, stderr=stream).card("Commands", [("/set", value), ("folder", path)])
    lines = shown.getvalue().splitlines()
    assert all(len(line) <= 40 for line in lines[:-1]) and lines[-1] == f"  folder  {path}"
    assert " ".join(line.strip() for line in lines[1:-1]) == f"/set    {value}"
    assert f"  /set    {value}\n" in piped.getvalue()


@pytest.mark.parametrize("columns", [80, 40, 30])
def test_what_is_said_is_broken_between_words_and_never_in_a_command(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of errors, hints, warnings, notes and the line below a reply; a pipe has each as one line."""
    monkeypatch.setenv("COLUMNS", str(columns))
    typed = "mycli quantize 'my model, the first; and only' --bits 4 --group 64"
    error = ModelError(
        "config.json of a model that nobody has quantized before: hidden_size is missing in it",
        f"quantize it: {typed}; mycli list shows the models on this machine, or ask for another one",
    )
    notes = ("it continues where it was: " + typed, "\nanother program writes to the folder for the time being")
    shown, piped = Terminal(), io.StringIO()
    for stream in (shown, piped):
        out = Output(stdout=stream, stderr=stream, environment={"NO_COLOR": "1"})
        out.error(error), out.warn(error.message), out.footer(" · ".join(["38 tok"] * 9))
        for note in notes:
            out.note(note)
    lines = shown.getvalue().splitlines()
    assert sum(typed in line for line in lines) == 2, "whole: where the terminal breaks it, a copy has no line's end"
    assert all(len(line) <= columns for line in lines if typed not in line)
    assert any("mycli list" in line for line in lines)
    assert shown.getvalue().split() == piped.getvalue().split(), "words are not broken"
    assert len(piped.getvalue().splitlines()) == 7 and "\n\nanother" in shown.getvalue()


def test_a_notice_waits_for_the_end_of_the_reply() -> None:
    shown = Terminal()
    out = Output(stdout=shown, stderr=shown, environment={"TERM": "dumb"})
    with out.reply():
        out.stream("The capital")
        out.note("speculation is off")
        out.stream(" is Tokyo.")
    assert shown.getvalue() == "The capital is Tokyo.\nspeculation is off\n"


def test_a_refused_reply_leaves_no_line() -> None:
    stdout = io.StringIO()
    out = Output(stdout=stdout, stderr=io.StringIO())
    with pytest.raises(UsageError), out.reply():
        raise UsageError("too long")
    assert stdout.getvalue() == ""


@pytest.mark.parametrize("pieces", [1, 3, 1000], ids=lambda size: f"pieces-of-{size}")
def test_words_are_not_broken_at_the_edge(pieces: int) -> None:
    text = "It was a dark and stormy night, and the rain fell in torrents.\n\n" * 2 + "日本語の文章は空白なしで続く"
    wrap = WordWrap(lambda: 20)
    shown = "".join(wrap.feed(text[i : i + pieces]) for i in range(0, len(text), pieces)) + wrap.flush()
    assert all(width(line) <= 20 for line in shown.splitlines())
    assert shown.replace("\n", "").replace(" ", "") == text.replace("\n", "").replace(" ", "")
    assert "torrents.\n\n" in shown


@pytest.mark.parametrize(
    "line", ["    indented = code(that, must, keep, its, line)", "| a | table | of | many | cells |"]
)
def test_lines_that_mean_something_as_they_are_stay(line: str) -> None:
    wrap = WordWrap(lambda: 20)
    assert wrap.feed(line + "\n") + wrap.flush() == line + "\n"
    fenced = f"```\n{line.strip()}\n```\n"
    assert wrap.feed(fenced) + wrap.flush() == fenced


def test_a_long_prompt_shows_how_far_it_is_and_a_short_one_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mycli.cli.text.progress.READING_SECONDS", 0.01)
    stream, counts = io.StringIO(), iter(range(0, 10_000, 10))

    def slow() -> Iterator[str]:
        while "of 512 tokens" not in stream.getvalue():  # ends only where the line is shown
            pass
        yield "a"
        yield "b"

    assert list(reading(stream, slow(), 512, lambda: next(counts))) == ["a", "b"]
    assert stream.getvalue().endswith("\r\x1b[K")
    monkeypatch.setattr("mycli.cli.text.progress.READING_SECONDS", 60)
    silent = io.StringIO()
    assert list(reading(silent, iter(["a"]), 5, lambda: 5)) == ["a"] and silent.getvalue() == ""


def test_a_narrow_terminal_shows_the_columns_that_matter() -> None:
    rows = [["model", "size", "t/s"], ["a-long-name", "12.00 GiB", "12.3 ± 0.1"]]
    assert fitting(rows, (0, 2, 1), 32) == [0, 2] and fitting(rows, (0, 2, 1), 80) == [0, 1, 2]
    assert fitting(rows, (0, 2, 1), 5) == []


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
    assert done.returncode == 0 and "turns are dropped" in done.stderr
    assert len(looks) <= 12, "by halving, not one turn after another"


def test_tab_offers_commands_settings_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "night").mkdir()
    monkeypatch.chdir(tmp_path)
    assert complete_path("n") == ["night/", "notes.txt"]
    assert complete_path(f"{tmp_path}/no") == [f"{tmp_path}/notes.txt"]
    assert complete_path("nowhere/x") == []


# Names


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "Qwen/Qwen3-0.6B@main"),
        ("huggingface.co/org/name/blob/v2/config.json?x=1", "org/name@v2"),
        ("hf.co/org/name", "org/name"),
        ("hf://org/name", "org/name"),
        ("https://huggingface.co/datasets/org/name", "https://huggingface.co/datasets/org/name"),
        ("https://example.org/org/name", "https://example.org/org/name"),
        ("org/name@main", "org/name@main"),
        ("./folder", "./folder"),
    ],
)
def test_an_address_of_the_hub_is_a_name(typed: str, plain: str) -> None:
    assert plain_name(typed) == plain


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("llama3", "meta-llama/Llama-3"),
        ("qwen2.5:7b", "Qwen/Qwen2.5-7B"),
        ("Phi4", "microsoft/phi-4"),
        ("zzz", None),
        ("a b", None),
    ],
)
def test_names_of_other_programs_get_candidates(name: str, first: str | None) -> None:
    found = candidates(name)
    assert found[0].startswith(first) if first else not found
    assert len(found) <= 4


def test_a_preset_is_a_model_with_settings(mycli: Mycli, environment: dict[str, str]) -> None:
    path = Path(environment["XDG_CONFIG_HOME"]) / "mycli" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text('[preset.leo]\nmodel = "pico"\nmax_tokens = 3\ntemperature = 0\nsystem = "x"\n')
    preset = json.loads(mycli("run", "leo", "leo", "--json", "--device", "cpu").stdout)
    typed = json.loads(mycli("run", "pico", "leo", "-n", "3", "-t", "0", "--system", "x", "--json").stdout)
    assert preset["text"] == typed["text"] and preset["completion_tokens"] == 3
    assert (
        json.loads(mycli("run", "leo", "hi", "-n", "2", "--json", "--device", "cpu").stdout)["completion_tokens"] == 2
    )
    assert json.loads(mycli("show", "leo", "--json").stdout)["model"] == "pico"
    path.write_text('[preset.leo]\nmodel = "pico"\ncolour = 1\n')
    refused = mycli("run", "leo", "hi")
    assert refused.returncode == 2 and "colour is not an option" in refused.stderr


def test_a_prompt_spelled_like_a_preset_is_a_prompt() -> None:
    def model_of(line: list[str]) -> str | None:
        return line[1] if len(line) > 1 else None

    presets = {"leo": {"model": "pico", "ctx": "1k"}}
    assert apply_preset(["run", "pico", "leo"], presets, model_of) == (["run", "pico", "leo"], {})
    assert apply_preset(["run", "leo", "leo"], presets, model_of) == (["run", "pico", "leo"], {"ctx": "1k"})


# The hub


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[HubServer]:
    for name in [name for name in environment if name.lower().endswith("_proxy")]:
        del environment[name]
    with hub_server() as running:
        files = {path.name: path.read_bytes() for path in PICO.iterdir()}
        running.add("org/odd", {**files, "config.json": b'{"model_type": "gpt2"}'})
        running.add("org/pico", files)
        environment |= {"HF_ENDPOINT": running.address(), "HF_HUB_OFFLINE": "0"}
        yield running


def test_what_cannot_run_is_not_fetched(server: HubServer, mycli: Mycli) -> None:
    refused = mycli("pull", "org/odd")
    assert refused.returncode == 3 and "'gpt2' is not supported" in refused.stderr and "--force" in refused.stderr
    assert not server.requests("storage:"), "no weights were asked for"
    assert mycli("pull", "org/odd", "--dry-run").returncode == 3, "as the real run would"
    assert mycli("pull", "org/odd", "--force").returncode == 0
    models = json.loads(mycli("list", "--json").stdout)["models"]
    (odd,) = [one for one in models if one["name"] == "org/odd"]
    assert not odd["usable"] and odd["problem"].startswith("unsupported: ")


def test_search_says_what_runs_here(server: HubServer, mycli: Mycli) -> None:
    done = mycli("search", "pico", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["models"] == [
        {
            "name": "org/pico",
            "downloads": 7,
            "parameters": 5_770_496,
            "model_type": "llama",
            "gated": False,
            "supported": True,
        }
    ]
    assert "| org/odd |" in mycli("search", "org/odd").stdout


# Refused before the work


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quantize", "pico", "--max-kl", "-1"), "--max-kl -1"),
        (("quantize", "pico", "--plot", "nowhere/x.svg"), "there is no folder"),
        (("quantize", "pico", "--bits", "3", "--target-bpw", "4"), "--bits and --target-bpw"),
        (("quantize", "pico", "-o", "mine", "--dry-run"), "was not made by this program"),
        (("quantize", "pico", "-o", "mine", "--overwrite"), "was not made by this program"),
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
        (("bench", "pico", "-n", "-1", "--draft", "ngram"), "-n -1: '-1' is not a count"),
        (("bench", "pico", "--serve", "-p", "-1"), "-p -1: '-1' is not a count"),
        (("bench", "pico", "--serve", "--clients", "-1"), "--clients -1: '-1' is not a count"),
        (("bench", "pico", "--serve", "--shared", "-1"), "--shared: '-1' is not a count"),
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
    assert refused.returncode == 2 and "also holds notes.md" in refused.stderr and notes.read_text() == "mine"
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
    monkeypatch.setattr(build, "must_be_built", lambda: True)
    monkeypatch.setattr(build, "native", lambda: "g++ failed: a.h:1: error")
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
