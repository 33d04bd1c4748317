"""Test for problems that new users reported."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mycli.cli import main as program
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


# Refused before any work starts


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


TINY = ("quantize", "pico-draft", "--group", "64", "--samples", "8", "--seq", "64", "--report", "none")


@pytest.mark.usefixtures("short_calibration_text")
def test_quantizing_in_a_pipe_says_what_it_does_and_what_is_left(
    mycli: Mycli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mycli.cli.quantizing.request.STEP_SECONDS", 0)
    out = tmp_path / "out"
    done = mycli(*TINY, "-o", str(out), "--device", "cpu")
    lines = done.stderr.splitlines()
    assert "pico-draft → out: gptq of 14 layers in 2 blocks on 8 windows of 64 tokens" in lines
    (first,) = [line for line in lines if re.match(r"quantizing blocks: 1 of 2, \d.* s each, \d.* s left$", line)]
    assert lines.index(first) + 1 < len(lines) and lines[lines.index(first) + 1].startswith("quantizing blocks: 2 of 2")
    assert "with rounding to nearest" in done.stdout


@pytest.mark.usefixtures("short_calibration_text")
def test_unfinished_work_is_listed_resumed_named_and_dropped(
    mycli: Mycli, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mycli.quant.output.work_folder import WorkFolder

    work = Path(environment["XDG_DATA_HOME"]) / "mycli" / "models" / ".pico-draft-gptq-int4-g64.work"
    save = WorkFolder.save

    def interrupted(self: WorkFolder, block: int, solved: object) -> None:
        save(self, block, solved)  # type: ignore[arg-type]  # passed on
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "save", interrupted)
        assert mycli(*TINY, "--device", "cpu").returncode == 130
    listed = mycli("list")
    assert "pico-draft-gptq-int4-g64.work" in listed.stdout and "1 finished block" in listed.stdout
    assert "mycli rm NAME" in listed.stderr and "mycli rm NAME" not in mycli("list", "--json").stderr
    early = mycli("chat", "pico-draft-gptq-int4-g64")
    assert early.returncode == 4 and "its quantization is not finished" in early.stderr
    assert "mycli rm pico-draft-gptq-int4-g64.work" in early.stderr
    run = json.loads((work / "run.json").read_text())
    (work / "run.json").write_text(json.dumps({**run, "versions": {**run["versions"], "torch": "2.0"}}))
    other = mycli(*TINY, "--device", "cpu")
    assert other.returncode == 2 and "was begun with torch 2.0; this is torch 2." in other.stderr
    assert "--restart" in other.stderr
    (work / "run.json").write_text(json.dumps(run))
    resumed = mycli(*TINY, "--device", "cpu")
    assert resumed.returncode == 0 and "resumed: 1 of 2 blocks were finished by an earlier run" in resumed.stderr
    work.mkdir()
    (work / "run.json").write_text(json.dumps({**run, "recipe": {}}))
    (work / "block-00000.safetensors").write_text("of another run")
    restarted = mycli(*TINY, "--device", "cpu", "--restart", "--overwrite")
    assert restarted.returncode == 0 and "resumed" not in restarted.stderr and not work.exists()
    work.mkdir()
    assert mycli("rm", "pico-draft-gptq-int4-g64.work", "--yes").returncode == 0 and not work.exists()
    assert (work.parent / "pico-draft-gptq-int4-g64").is_dir(), "only the leftovers are removed"


def test_a_taken_name_is_refused_before_torch_is_imported(environment: dict[str, str]) -> None:
    taken = Path(environment["XDG_DATA_HOME"]) / "mycli" / "models" / "pico-rtn-int4-g128"
    taken.mkdir(parents=True)
    (taken / "letter.txt").write_text("Dear Ada,")
    program = (
        "import sys; from mycli.cli.main import main\n"
        "try: main(['quantize', 'pico', '--method', 'rtn'])\n"
        "except SystemExit as stop: sys.exit(f'{stop.code} {\"torch\" in sys.modules}')"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "2 False" and "was not written by this program" in done.stderr


def test_the_widths_of_a_dry_run_are_announced_and_timed(mycli: Mycli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mycli.quant.planning.pace._SECONDS", 0.01)
    done = mycli(*TINY, "--target-bpw", "4", "--dry-run", "--device", "cpu")
    assert re.search(r"makes a temporary copy of 3 bits and measures what each layer loses, about \d", done.stderr)
    assert re.search(r"\n  work +choose bits for a mean of 4; gptq of 14 layers", done.stdout)
    assert re.search(r"\n  time +about \d", done.stdout)
    assert re.search(r"\n  time +about \d", mycli(*TINY, "--method", "awq", "--dry-run", "--device", "cpu").stdout)


def test_a_comparison_labels_both_perplexities(mycli: Mycli) -> None:
    done = mycli("eval", "pico-draft", "--ref", "pico", "--ctx", "64", "--tokens", "512", "--device", "cpu")
    answer = json.loads(mycli(*done.args, "--json").stdout)
    ours, reference = answer["perplexity"]["value"], answer["divergence"]["reference_perplexity"]["value"]
    assert "pico-draft compared with pico\n" in done.stdout
    assert re.search(rf"perplexity +pico-draft {ours:.2f} ± [\d.]+, pico {reference:.2f}\n", done.stdout)


def test_a_damaged_gguf_is_a_file(mycli: Mycli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("bad.gguf", "models/bad.gguf"):
        (tmp_path / name).write_bytes(b"GGUF\x03\x00\x00\x00")
        done = mycli("show", name)
        assert done.returncode == 3 and "the file is damaged or incomplete: copy it again" in done.stderr, done.stderr


SCHEMA = '{"enum": ["seven"]}'


def test_a_schema_may_be_typed(mycli: Mycli, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(SCHEMA)
    options = ("-t", "0", "-n", "60", "--device", "cpu")
    typed, read = (
        mycli("run", "pico", "Give me JSON.", "--schema", schema, *options)
        for schema in (SCHEMA, str(tmp_path / "schema.json"))
    )
    assert json.loads(typed.stdout) == "seven" and read.stdout == typed.stdout
    wrong = mycli("run", "pico", "Hi", "--schema", '{"type": 7}', *options)
    assert wrong.returncode == 2 and "--schema" in wrong.stderr


def test_bench_serve_names_what_is_no_model(mycli: Mycli) -> None:
    done = mycli("bench", "serve", "http://127.0.0.1:9", "nosuch", "-r", "1")
    assert done.returncode == 4 and "nosuch: no model of that name" in done.stderr


# Completion and the machine


@pytest.mark.parametrize("problem", ["is missing", ""], ids=["compiled", "no compiler"])
def test_a_kernel_that_cannot_be_built_is_told(problem: str, mycli: Mycli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_reason", lambda: problem)
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


@pytest.mark.parametrize("quota, threads", [(None, None), (1.5, "2"), (0.5, "1")])
def test_a_containers_quota_sets_the_threads(
    quota: float | None, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "cpu_quota", lambda: quota)
    for chosen in (None, "9"):  # the user's own setting stays
        monkeypatch.setenv("OMP_NUM_THREADS", chosen or "")
        if chosen is None:
            del os.environ["OMP_NUM_THREADS"]
        with pytest.raises(SystemExit):
            main(["list"])
        assert os.environ.get("OMP_NUM_THREADS") == (chosen or threads)


def test_threads_wait_for_work_so_shortly_that_a_neighbour_gets_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """One spin iteration takes about 10 ns, so that waiting threads yield after 0.1 ms at most."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    with pytest.raises(SystemExit):
        main(["list"])
    assert 0 < int(os.environ["GOMP_SPINCOUNT"]) <= 10_000
