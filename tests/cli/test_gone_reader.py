"""Test which commands end when the reader of standard output is gone, and which complete their work."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from mycli.runtime.diagnostics import selftest
from mycli.runtime.errors import ExitCode
from mycli.runtime.quantization.scheme import Packing
from tests.support.command_line import Mycli
from tests.support.completion_server import scripted

CPU = ("--device", "cpu")
WINDOWS = ("--tokens", "64", "--ctx", "32", *CPU)


@pytest.fixture
def gone() -> Iterator[None]:
    with mock.patch("mycli.cli.output.Output.require_reader", side_effect=BrokenPipeError):
        yield


@pytest.fixture
def one_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "PACKINGS", (Packing(4, 128),))


@pytest.mark.parametrize(
    ("words", "later"),
    [
        (("eval", "pico", *WINDOWS), "mycli.cli.commands.evaluate.quality_rows"),
        (("eval", "pico", "--kv-sweep", *WINDOWS), "mycli.cli.commands.evaluate._show_sweep"),
        (("bench", "pico", "-p", "8", "-n", "2", "-r", "1", *CPU), "mycli.cli.commands.bench._row"),
        (("bench", "draft", "pico", "ngram", "-n", "2", "-r", "1", *CPU), "mycli.cli.commands.bench_draft._result"),
        (("spec", "verify", "pico", "pico-draft", "-n", "1", *CPU), "mycli.cli.commands.spec_verify._greedy"),
        (("doctor", *CPU), "mycli.runtime.diagnostics.selftest.golden_reply"),
    ],
    ids=["eval", "eval-sweep", "bench", "bench-draft", "spec-verify", "doctor"],
)
def test_a_measurement_ends(words: tuple[str, ...], later: str, mycli: Mycli, gone: None, one_packing: None) -> None:
    with mock.patch(later, side_effect=AssertionError):  # a command may run in a child of this process
        done = mycli(*words)
    assert done.returncode == ExitCode.PIPE and "error" not in done.stderr


def test_a_server_under_load_is_left(mycli: Mycli, gone: None) -> None:
    with scripted() as server:
        done = mycli("bench", "serve", server.url, "-p", "12", "-n", "3", "--clients", "1", "-r", "1")
    assert done.returncode == ExitCode.PIPE and "error" not in done.stderr


@pytest.mark.slow
def test_files_are_written_and_dropped(mycli: Mycli, gone: None, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    recipe = ("--group", "64", "--method", "rtn", "--bits", "8")
    assert mycli("quantize", "pico-draft", *recipe, "-o", str(copy), *CPU).returncode == 0
    assert mycli("verify", str(copy)).returncode == ExitCode.PIPE
    assert mycli("verify", str(copy), "--drop").returncode == 0


@pytest.mark.slow
def test_kernels_are_compiled(mycli: Mycli, gone: None, one_packing: None) -> None:
    assert mycli("doctor", "--warm", *CPU).returncode == 0
