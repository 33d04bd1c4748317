"""Test `mycli serve --engine`: arguments and environment of the other server, which replaces this process."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.serving import other_engines
from mycli.runtime.device.nvml import Gpu
from tests.support.command_line import COMMAND, Mycli, default_signals
from tests.support.paths import PICO

GIB = 1 << 30
STAND_IN = """#!{python}
import json, os, signal, sys, time
def stop(number, frame):
    print("stopped by", number, flush=True)
    sys.exit(40 + number)
signal.signal(signal.SIGTERM, stop)
told = {{name: value for name, value in os.environ.items() if name.startswith("VLLM")}}
print(json.dumps([sys.argv[1:], told, os.getpid()]), flush=True)
if "--max-num-seqs" in sys.argv and sys.argv[sys.argv.index("--max-num-seqs") + 1] == "7":
    time.sleep(60)
sys.exit(23)
"""


@pytest.fixture
def installed(tmp_path: Path, environment: dict[str, str]) -> dict[str, str]:
    for name in ("vllm", "sglang"):
        (tmp_path / name).write_text(STAND_IN.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    return {**environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def started(
    mycli: Mycli,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    *arguments: str,
    gpus: tuple[Gpu, ...] = (),
) -> tuple[list[str], dict[str, str], str]:
    """Return the other engine's command line, its environment, and the messages printed before it started."""
    called: list[Any] = []

    def become(path: str, command: list[str], told: dict[str, str]) -> None:
        called.append((command, told))
        raise SystemExit(0)

    with monkeypatch.context() as patch:
        patch.setattr(os, "execve", become)
        patch.setattr(signal, "signal", lambda *_: None)
        patch.setattr(other_engines, "gpus", lambda: list(gpus))
        result = mycli("serve", "pico", *arguments, env=environment)
    assert result.returncode == 0 and called, result.stderr
    ((command, told),) = called
    assert Path(command.pop(command.index(next(word for word in command if word.endswith("pico/pico"))))).samefile(PICO)
    return command, told, result.stderr


def of(free: int, count: int = 2) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, "H", 80 * GIB, (free + index) * GIB, (9, 0), "1") for index in range(count))


def test_vllm_is_told_what_was_asked_and_what_follows_from_the_estimate(
    mycli: Mycli, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    key.chmod(0o600)
    asked = ("--engine", "vllm", "--tensor-parallel-size", "2", "--port", "9000", "--alias", "gpt", "--ctx", "1k")
    more = ("--api-key-file", str(key), "--dtype", "bf16", "--kv", "bf16", "--cors", "https://example.org")
    command, told, said = started(mycli, monkeypatch, installed, *asked, *more, gpus=of(60))
    assert command == [
        *(str(tmp_path / "vllm"), "serve", "--host", "127.0.0.1", "--port", "9000", "--served-model-name", "gpt"),
        *("--max-model-len", "1024", "--max-num-seqs", "32", "--tensor-parallel-size", "2"),
        *("--dtype", "bfloat16", "--kv-cache-dtype", "bfloat16", "--gpu-memory-utilization", "0.74"),
        *("--allowed-origins", '["https://example.org"]'),
    ]
    assert told["VLLM_API_KEY"] == "secret" and "secret" not in said and told["HOME"] == str(tmp_path)
    assert f"{tmp_path}/vllm serve" in said


def test_sglang_is_told_the_same_in_its_words(
    mycli: Mycli, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], tmp_path: Path
) -> None:
    command, _, _ = started(
        mycli, monkeypatch, installed, "--engine", "sglang", "--tensor-parallel-size", "2", gpus=of(79, 3)
    )
    assert command == [
        *(str(tmp_path / "sglang"), "serve", "--model-path", "--host", "127.0.0.1", "--port", "8080"),
        *("--served-model-name", "pico", "--context-length", "2048", "--max-running-requests", "32"),
        *("--tp-size", "2", "--dtype", "auto", "--kv-cache-dtype", "auto", "--mem-fraction-static", "0.92"),
    ]


def test_on_a_cpu_no_share_is_named_and_no_page_of_others_let_in(
    mycli: Mycli, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    command, told, _ = started(mycli, monkeypatch, installed, "--engine", "vllm", "--device", "cpu", gpus=of(79))
    assert command[-2:] == ["--allowed-origins", "[]"] and "--gpu-memory-utilization" not in command
    assert told["VLLM_CPU_KVCACHE_SPACE"] == "1" and "VLLM_API_KEY" not in told
    own = {**installed, "VLLM_CPU_KVCACHE_SPACE": "9"}
    assert started(mycli, monkeypatch, own, "--engine", "vllm")[1]["VLLM_CPU_KVCACHE_SPACE"] == "9"


@pytest.mark.parametrize(
    ("cores", "nodes", "ranks", "said"),
    [
        pytest.param([0, 1, 2, 3, 6], 1, 2, "0,1|2,3,6", id="5-cores-2-parts"),
        pytest.param([0, 1], 1, 2, "0|1", id="2-cores-2-parts"),
        pytest.param([0, 1, 2, 3], 2, 2, None, id="a-node-for-each"),
        pytest.param([0], 1, 2, None, id="1-core-2-parts"),
        pytest.param([0, 1, 2, 3], 1, 1, None, id="whole"),
    ],
)
def test_on_a_cpu_of_fewer_numa_nodes_than_parts_each_part_has_cores_of_its_own(
    mycli: Mycli,
    monkeypatch: pytest.MonkeyPatch,
    installed: dict[str, str],
    cores: list[int],
    nodes: int,
    ranks: int,
    said: str | None,
) -> None:
    """vLLM exits if a rank has neither a NUMA node nor assigned cores."""
    monkeypatch.setattr(other_engines, "_cores", lambda: cores)
    monkeypatch.setattr(other_engines, "_numa_nodes", lambda: nodes)
    arguments = ("--engine", "vllm", "--device", "cpu", "--tensor-parallel-size", str(ranks))
    _, told, _ = started(mycli, monkeypatch, installed, *arguments)
    assert told.get("VLLM_CPU_OMP_THREADS_BIND") == said


@pytest.mark.parametrize(
    ("arguments", "free", "code", "said"),
    [
        (("--engine", "vllm", "--tensor-parallel-size", "3"), 79, 3, "num_attention_heads"),
        (
            ("--engine", "vllm", "--tensor-parallel-size", "8"),
            79,
            5,
            "--tensor-parallel-size 8: this machine has 2 GPUs",
        ),
        (("--engine", "vllm", "--tensor-parallel-size", "2"), 0, 5, "each of 2 GPUs needs"),
        (("--engine", "vllm", "--kv", "int8"), 79, 2, "--kv int8 is not supported by vLLM"),
        (("--engine", "vllm", "--activations", "8"), 79, 2, "--activations 8 is not supported by vLLM"),
        (("--engine", "vllm", "--adapter", "x"), 79, 2, "--adapter is not available with"),
        (("--engine", "vllm", "--expert-memory", "1GiB"), 79, 2, "--expert-memory is not available with vLLM"),
        (("--engine", "vllm", "--draft", "ngram"), 79, 2, "--draft is not available with vLLM"),
        (("--engine", "vllm", "--prefix-cache-dir", "x"), 79, 2, "--prefix-cache-dir is not available with"),
        (("--engine", "vllm", "--grace", "3"), 79, 2, "--grace is not available with"),
        (("--engine", "vllm", "--host", "0.0.0.0"), 79, 2, "no API key is set"),
        (("--engine", "sglang", "--cors", "https://example.org"), 79, 2, "--cors is not supported by SGLang"),
        (("--engine", "llama"), 79, 2, "--engine takes: mycli, vllm, sglang"),
        (("--tensor-parallel-size", "2"), 79, 2, "add --engine vllm"),
    ],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, tuple) else None,
)
def test_what_cannot_be_is_said_before_anything_begins(
    mycli: Mycli,
    monkeypatch: pytest.MonkeyPatch,
    installed: dict[str, str],
    arguments: tuple[str, ...],
    free: int,
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(os, "execve", None)
    monkeypatch.setattr(other_engines, "gpus", lambda: list(of(free, 3 if "3" in arguments else 2)))
    result = mycli("serve", "pico", *arguments, env=installed)
    assert result.returncode == code and said in result.stderr, result.stderr


def test_a_key_is_never_put_where_others_can_read_it(
    mycli: Mycli, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    monkeypatch.setattr(other_engines, "gpus", lambda: [])
    result = mycli("serve", "pico", "--engine", "sglang", env={**installed, "MYCLI_API_KEY": "secret"})
    assert result.returncode == 2 and "where other users can read it" in result.stderr


def test_one_that_is_not_installed_is_named_with_what_brings_it(mycli: Mycli, tmp_path: Path) -> None:
    result = mycli("serve", "pico", "--engine", "vllm", env={"PATH": str(tmp_path)})
    assert result.returncode == 5 and "vLLM is not installed" in result.stderr and "pip install vllm" in result.stderr


def test_the_process_becomes_the_other_engine(installed: dict[str, str]) -> None:
    arguments = [*COMMAND, "serve", "pico", "--engine", "vllm", "--device", "cpu", "--json"]
    ended = subprocess.run(arguments, env=installed, cwd=tempfile.gettempdir(), capture_output=True, timeout=120)
    ours, theirs = (json.loads(line) for line in ended.stdout.splitlines())
    assert ended.returncode == 23 and ours["command"][1:] == theirs[0] and ours["engine"] == "vllm"
    assert ours["environment"] == sorted(theirs[1])
    child = subprocess.Popen(
        [*arguments, "--max-sequences", "7"],
        env=installed,
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        preexec_fn=default_signals,
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert json.loads(child.stdout.readline())[2] == child.pid
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 40 + signal.SIGTERM and child.stdout.read() == b"stopped by 15\n"
