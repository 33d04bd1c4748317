"""The installed command, from a wheel and from an editable checkout, run in another folder.

Nothing is downloaded: the new environments use the dependencies of this interpreter.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pexpect
import pytest

from mycli.runtime.device.system import cpu
from mycli.runtime.kernels.cpu.library import isa
from tests.support.paths import PICO, ROOT
from tests.support.platform_wheel import build

QUESTION, ANSWER = "What is the capital of Japan?", "Tokyo"
PROGRAM = f"""
import contextlib, io, json, sys
import mycli.runtime.pico as pico
from mycli.runtime import open_model
reply = open_model("pico").generate("{QUESTION}").text
from mycli.cli.main import main
outputs = []
for words in json.loads(sys.argv[1]):
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(output):
        try:
            main(words)
        except SystemExit as end:
            assert not end.code, words
        output.flush()
    outputs.append(output.buffer.getvalue().decode())
print(json.dumps([*pico.__path__, reply, outputs]))
"""


def install(options: Sequence[str], target: Path) -> Path:
    venv.create(target, symlinks=True)
    (packages,) = target.glob("lib/python*/site-packages")
    theirs = [entry for entry in sys.path if entry.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(theirs))  # its .pth files are not read
    pip = [sys.executable, "-m", "pip", "--python", str(target / "bin" / "python"), "install", "--quiet"]
    # Python compiles what is imported, a third of the files.
    pip += ["--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation", "--no-compile"]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*pip, *options], env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target / "bin" / "mycli"


def linked(folder: Path) -> Path:
    """Link the sources into a folder, so that a build writes nothing into the checkout."""
    (folder / "docs").mkdir(parents=True)
    for name in ("cli", "runtime", "quant", "docs/mycli.1", "pyproject.toml", "README.md", "LICENSE"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.parametrize("kind", ["wheel", pytest.param("editable", marks=pytest.mark.slow)])
def test_every_main_command_works_where_it_is_installed(kind: str, tmp_path: Path, environment: dict[str, str]) -> None:
    editable = ["-e"] if kind == "editable" else []
    program = install([*editable, str(linked(tmp_path / "source"))], tmp_path / "environment")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {key: value for key, value in environment.items() if key != "PYTHONPATH"}
    environment["MYCLI_DEVICE"] = "cpu"

    def mycli(*arguments: str) -> str:
        command = [str(program), *arguments]
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def together(*lines: Sequence[str]) -> list[dict[str, Any]]:
        """Run the Python interface and several commands in one process; return the JSON object that each prints."""
        python = [str(program.parent / "python"), "-c", PROGRAM, json.dumps(lines)]
        done = subprocess.run(python, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        location, reply, outputs = json.loads(done.stdout)
        assert (Path(location) / "pico").samefile(PICO) is (kind == "editable"), "another install was found"
        assert ANSWER in reply
        return [json.loads(output) for output in outputs]

    quantize = ("quantize", "pico-draft", "--method", "rtn", "--report", "none", "-o", "small")
    if kind == "editable":  # it has the files of the checkout, and each part of the package is found
        together()
        mycli(*quantize)
        return
    assert (program.parent.parent / "share" / "man" / "man1" / "mycli.1").is_file()
    (elsewhere / "prompts.txt").write_text(QUESTION + "\n")
    verify = ("spec", "verify", "pico", "pico-draft", "--prompts", "prompts.txt", "-n", "4", "--draws", "100", "--json")
    run = ("run", "./small", QUESTION, "--json", "-n", "4")
    lines = ((*quantize, "--json"), run, ("estimate", "./small", "--json"), verify)
    _, short, estimate, verified, doctor = together(*lines, ("doctor", "--json"))
    assert short["text"] and estimate["fits"] and verified["prompts"] == 1 and ANSWER in doctor["reply"]
    chat: pexpect.spawn[str] = pexpect.spawn(
        str(program),
        ["chat", "pico", "-t", "0"],
        cwd=str(elsewhere),
        env={**environment, "TERM": "xterm"},  # type: ignore[arg-type]  # a dict is a mapping
        encoding="utf-8",
        timeout=240,
    )
    chat.expect_exact(">>> ")
    chat.sendline(QUESTION)
    chat.expect_exact(ANSWER)
    chat.expect_exact(">>> ")
    chat.sendeof()
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("objdump") is None, reason="needs g++ and objdump")
def test_the_wheel_needs_no_compiler(tmp_path: Path, environment: dict[str, str]) -> None:
    best = isa.portable_name(None, cpu())
    if best not in isa.portable_flags():
        pytest.skip("no library is for this processor")
    program = install([str(build(tmp_path / "wheel", (best,)))], tmp_path / "environment")
    environment = {key: value for key, value in environment.items() if key not in ("PYTHONPATH", "CXX", isa.VARIABLE)}
    environment |= {"PATH": str(program.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [str(program), "doctor", "--device", "cpu", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["path"]["CPU kernel"].startswith("native, ") and result["path"]["CPU kernel"].endswith("; prebuilt")
    assert {"cpu"} == {kernel["kernel"] for kernel in result["kernels"] if kernel["used"]} and ANSWER in result["reply"]
    assert not list((tmp_path / "cache").rglob("*.so")), "nothing was compiled"
