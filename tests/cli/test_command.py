"""Test behaviour shared by all commands: exit codes, signals, failing streams, and command line errors."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mycli.cli.command import MAX_SHOWN_PATH, explain, subject_of
from mycli.cli.main import GLOBAL, reorder
from mycli.cli.remedies import Subject
from mycli.runtime.errors import ExitCode, GateError, NotFoundError
from tests.support.command_line import Mycli, default_signals

# A child process with its own command; `do` receives the command's Call.
PROBE = """
import sys, types
import mycli.cli.main as program
from mycli.cli.command import Call, command

@command
def probe(call: Call, path: str = "") -> None:
    {do}

sys.modules["mycli.cli.commands.probe"] = types.SimpleNamespace(probe=probe, EXAMPLES=("mycli probe",))
program.COMMANDS = {{"probe": ("probe", "Probe.")}}
program.main(["probe", *sys.argv[1:]])
"""


def start(do: str, environment: dict[str, str], *arguments: str, **streams: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]  # streams are Popen's keywords
        [sys.executable, "-c", PROBE.format(do=do), *arguments],
        env=environment,
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **streams},
    )


def probe(do: str, environment: dict[str, str], *arguments: str, **streams: object) -> tuple[int, str, str]:
    child = start(do, environment, *arguments, **streams)
    out, err = child.communicate(timeout=240)
    return child.returncode, out or "", err or ""


ENDS = {
    "ok": ("pass", 0, ""),
    "bug": ("raise ZeroDivisionError('boom')", 1, "error: internal error: ZeroDivisionError: boom"),
    "keyboard-interrupt": ("raise KeyboardInterrupt", 130, ""),
    "memory": ("raise MemoryError", 5, "error: not enough memory"),
    "torch-cpu-memory": ("raise RuntimeError('DefaultCPUAllocator: can not allocate')", 5, "error: not enough memory"),
    "D13-denied": ("raise PermissionError(13, 'Permission denied', '/x')", 3, "error: /x: Permission denied"),
    "D13-path-too-long": ("open('x' * 5000)", 3, "File name too long"),
    "D2-disk-full": ("raise OSError(28, 'No space left on device', '/x')", 5, "error: /x: No space left on device"),
    "D2-disk-read-only": (
        "raise OSError(30, 'Read-only file system', '/x')",
        5,
        "error: /x: Read-only file system",
    ),
    "D18-pipe": ("raise BrokenPipeError", 141, ""),
}


@pytest.mark.parametrize("case", ENDS)
def test_how_a_command_ends(case: str, environment: dict[str, str]) -> None:
    do, code, message = ENDS[case]
    ended, out, errors = probe(do, environment)
    assert (ended, out) == (code, "")
    lines = errors.splitlines()
    if message:
        assert message in lines[0] and lines[1].startswith("hint: ") and len(lines) == 2
    else:
        assert lines == []


@pytest.mark.parametrize("kind", [GateError, NotFoundError])
def test_a_user_error_carries_its_code(kind: type[Exception]) -> None:
    error = kind("m", "h")  # type: ignore[call-arg]  # a UserError takes a hint
    assert explain(error) is error


def test_errors_of_the_system_name_their_file() -> None:
    found = explain(FileNotFoundError(errno.ENOENT, "No such file", "a\x1bb"))
    assert found is not None and found.exit_code is ExitCode.MODEL and found.message.startswith("a\x1bb: ")
    assert explain(ValueError("x")) is None and explain(RuntimeError("x")) is None


@pytest.mark.parametrize(("length", "shown"), [(MAX_SHOWN_PATH, "p"), (MAX_SHOWN_PATH + 1, "…p")])
def test_the_end_of_a_long_path_is_shown(length: int, shown: str) -> None:
    found = explain(FileNotFoundError(errno.ENOENT, "No such file", "p" * length))
    assert found is not None and found.message == f"{shown}{'p' * (MAX_SHOWN_PATH - 1)}: No such file"


def test_debug_shows_the_traceback_of_the_cause(environment: dict[str, str]) -> None:
    plain = probe("1 / 0", environment)
    assert "Traceback" not in plain[2]
    debug = probe("1 / 0", environment, "--debug")
    assert "ZeroDivisionError" in debug[2] and "Traceback" in debug[2] and debug[0] == 1
    system = probe("open('/nowhere')", environment, "--debug", "--json")
    assert "FileNotFoundError" in system[2] and json.loads(system[1])["error"]["exit_code"] == 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130)])
def test_signals_let_a_command_clean_up(number: int, code: int, environment: dict[str, str], tmp_path: Path) -> None:
    """D16, D17: context managers exit as for any exception, so temporary files are removed."""
    do = """
    import contextlib, pathlib, time
    with contextlib.ExitStack() as stack:
        temporary = pathlib.Path(path)
        temporary.touch()
        stack.callback(temporary.unlink)
        call.out.stream("ready")
        time.sleep(60)
    """
    file = tmp_path / "temporary"
    child = start(do, environment, "--path", str(file), preexec_fn=default_signals)
    assert child.stdout is not None and child.stdout.read(5) == "ready" and file.exists()
    child.send_signal(number)
    _, errors = child.communicate(timeout=240)
    assert (child.returncode, errors, file.exists()) == (code, "", False)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130)])
def test_a_signal_while_the_program_is_imported_is_silent(
    number: int, code: int, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "typer.py").write_text(f"import os; os.kill(os.getpid(), {number:d})")
    environment = {**environment, "PYTHONPATH": f"{tmp_path}:{environment.get('PYTHONPATH', tmp_path)}"}
    line = [sys.executable, "-m", "mycli.cli", "list"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, preexec_fn=default_signals)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_torch_is_imported_ends_the_command(
    number: int, code: int, environment: dict[str, str], tmp_path: Path
) -> None:
    """torch 2.13 ignores an exception in some of its C++ code and dies of SIGABRT in the rest."""
    swallow = f"import os\ntry:\n    os.kill(os.getpid(), {number:d})\nexcept BaseException:\n    pass"
    (tmp_path / "torch.py").write_text(swallow)
    environment = {**environment, "PYTHONPATH": f"{tmp_path}:{environment.get('PYTHONPATH', tmp_path)}"}
    assert probe("import torch", environment, preexec_fn=default_signals) == (code, "", "")


def test_nohup_is_respected(environment: dict[str, str]) -> None:
    do = "import os, signal; os.kill(os.getpid(), signal.SIGHUP); call.out.result('alive')"
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731  # what nohup does
    assert probe(do, environment, preexec_fn=ignore)[:2] == (0, "alive\n")


@pytest.mark.parametrize("text", ["x", "x" * 100_000], ids=["buffered", "larger-than-the-buffer"])
def test_a_full_disk_behind_stdout_is_5(text: str, environment: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        code, _, errors = probe(f"call.out.result({text!r})", environment, stdout=full)
    assert code == 5 and "No space left on device" in errors
    assert len(errors.splitlines()) == 2, "nothing of the interpreter's own"


def test_a_full_disk_behind_the_json_answer_is_5(environment: dict[str, str]) -> None:
    """The error cannot be a field of the answer, so it is printed on stderr."""
    with open("/dev/full", "w") as full:
        code, _, errors = probe("call.out.json({'a': 1})", environment, "--json", stdout=full)
    assert code == 5 and errors.startswith("error: standard output: No space left") and len(errors.splitlines()) == 2


def test_a_full_disk_behind_stderr_ends_nothing(environment: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        done = probe("call.out.note('begun'); call.out.result('done')", environment, stderr=full)
    assert done[:2] == (0, "done\n")


def test_a_user_without_a_home_folder(environment: dict[str, str]) -> None:
    code = "import pwd; pwd.getpwuid = {}.__getitem__; from mycli.cli.main import main; main(['list', '--json'])"
    without = {name: value for name, value in environment.items() if name != "HOME"}
    done = subprocess.run([sys.executable, "-c", code], env=without, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)["models"]


@pytest.mark.parametrize("close_fds", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_do_no_harm(close_fds: str, environment: dict[str, str]) -> None:
    command = f'exec "$0" -m mycli.cli estimate pico {close_fds}'
    done = subprocess.run(["bash", "-c", command, sys.executable], env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert done.returncode == (5 if "1>&-" in close_fds else 0), "an answer that went nowhere is not success"
    assert ("standard output: it is closed" in done.stderr) == (close_fds == "1>&-")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_no_character_is_too_strange(encoding: str, environment: dict[str, str]) -> None:
    """D13: text that the terminal's encoding lacks, and a file name that is not UTF-8."""
    do = r"call.out.result('é · \udcff'); call.out.json({'name': 'é \udcff'}); call.out.note('·')"
    code, out, _ = probe(do, {**environment, "PYTHONIOENCODING": encoding}, encoding="latin-1")
    assert code == 0
    assert json.loads(out.splitlines()[1].encode("latin-1").decode(encoding))["name"] == "é \udcff"
    if encoding == "utf-8":
        assert out.splitlines()[0].encode("latin-1") == "é · ".encode() + b"\xff", "as a shell needs it"


# The command line


@pytest.mark.parametrize(
    "words", [["--json"], ["-q"], ["-qv"], ["--device", "cpu"], ["--device=cpu"], ["-v", "--debug"]], ids=str
)
def test_global_options_stand_before_the_command_too(words: list[str]) -> None:
    assert reorder([*words, "run", "pico"]) == ["run", *words, "pico"]
    assert reorder(["run", *words, "pico"]) == ["run", *words, "pico"]


@pytest.mark.parametrize("words", [[], ["--help"], ["nonsense"], ["--", "run"]], ids=str)
def test_what_is_no_command_stays_as_it_is(words: list[str]) -> None:
    assert reorder(words) == words


@pytest.mark.parametrize("words", [["--json"], ["-q"], ["--device", "cpu"], ["--threads=2"]], ids=str)
def test_a_misspelled_command_is_named_behind_global_options(words: list[str], mycli: Mycli) -> None:
    done = mycli(*words, "quantise", "pico")
    assert done.returncode == 2 and "no such command 'quantise'" in done.stderr + done.stdout


@pytest.mark.parametrize("line", ["--help", "run --help", "--version"])
@pytest.mark.parametrize("stdout", ["&-", "/dev/full"])
def test_a_help_page_that_went_nowhere(line: str, stdout: str, environment: dict[str, str]) -> None:
    shell = f'"{sys.executable}" -m mycli.cli {line} >{stdout}'
    done = subprocess.run(shell, shell=True, env=environment, capture_output=True, text=True)
    assert done.returncode == 5 and done.stderr.startswith("error: standard output: ")


@pytest.mark.parametrize("option", GLOBAL)
def test_every_global_option_is_known_to_a_command(option: str, mycli: Mycli) -> None:
    value = {"--device": ["cpu"], "--threads": ["2"]}.get(option, [])
    assert mycli("list", option, *value).returncode == 0


def test_version_anywhere(mycli: Mycli) -> None:
    first, second = mycli("--version"), mycli("run", "--version")
    assert first.stdout == second.stdout and first.stdout.startswith("mycli ") and second.returncode == 0


MISTAKES = {
    "no-such-command": (["runn"], "no such command 'runn'. Did you mean 'run'?", "mycli --help"),
    "no-such-option": (["run", "pico", "--colour"], "no such option: --colour", "mycli run --help"),
    "missing": (
        ["run"],
        "missing argument 'MODEL'",
        'for example: mycli run pico "What is the capital of Japan?"; mycli run --help',
    ),
    "bad-value": (["run", "pico", "-n", "x"], "-n / --max-tokens: 'x' is not a count", "mycli run --help"),
    "no-value": (["run", "pico", "--ctx"], "option '--ctx' requires an argument", "mycli run --help"),
    "too-many": (
        ["run", "pico", "a", "b"],
        "unexpected 'b'; run takes [MODEL] [PROMPT]",
        "put a prompt of several words in quotes",
    ),
    "C22-escapes": (["run", "pico", "--\x1b[2J\nerror: x"], "no such option: --", "mycli run --help"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_two_lines_or_one_object(case: str, mycli: Mycli) -> None:
    words, message, hint = MISTAKES[case]
    done = mycli(*words)
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: {message}") and second == f"hint: {hint}"
    assert (done.returncode, done.stdout) == (2, "") and "\x1b" not in done.stderr
    found = json.loads(mycli(*words, "--json").stdout)["error"]
    if case != "no-value":  # which takes --json as its value
        assert found["message"].startswith(message) and found["exit_code"] == 2


def test_no_words_is_help(mycli: Mycli) -> None:
    assert mycli().stdout == mycli("--help").stdout and mycli().returncode == 0


# Completion


def complete(words: str, environment: dict[str, str]) -> list[str]:
    asked = {"_MYCLI_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "mycli.cli"], env={**environment, **asked}, capture_output=True, text=True, timeout=240
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mycli es", {"estimate"}),
        ("mycli spec ", {"check", "verify"}),
        ("mycli run --temp", {"--temperature", "--template-arg"}),
        ("mycli run pico-d", {"pico-draft"}),
        ("mycli run pico Hi -ngl 99 --kv ", {"auto", "bf16", "int8", "int4"}),
        ("mycli run pico --kv ", {"auto", "bf16", "int8", "int4"}),
        ("mycli quantize pico --method a", {"awq", "awq+gptq"}),
    ],
)
def test_completion_of_commands_options_and_models(words: str, expected: set[str], environment: dict[str, str]) -> None:
    assert set(complete(words, environment)) == expected


def test_the_completion_script_is_for_mycli(mycli: Mycli) -> None:
    script = mycli("--show-completion", "bash", env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}).stdout
    assert "_MYCLI_COMPLETE=complete_bash" in script and "complete -o default -F" in script
    assert os.access("/bin/bash", os.X_OK)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_hints_are_for_a_folder_a_file_or_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied" / "a.gguf").touch()
    assert subject_of("./copied") == Subject("./copied", fetched=False, recorded=False, single_file=False)
    assert subject_of("copied/a.gguf") == Subject("copied/a.gguf", fetched=False, recorded=False, single_file=True)
    assert subject_of("some/a.gguf") == Subject("some/a.gguf", fetched=True, recorded=False, single_file=False)
    (tmp_path / "copied" / "mycli.json").touch()
    assert subject_of("./copied").recorded
    for name in ("x" * 300, f"./{'x' * 300}", f"./copied/{'x' * 300}.gguf"):  # longer than a file name can be
        assert not subject_of(name).recorded
