"""Test `mycli serve` as a process: one line when ready, one line per error, and a clean shutdown."""

import http.client
import io
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from mycli.cli.command import Call
from mycli.cli.commands.serve import _announce
from mycli.cli.output import Output
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.open import open_model
from tests.support.command_line import COMMAND, Mycli
from tests.support.embedding_models import cross_encoder, encoder
from tests.support.forked import ForkedProcess
from tests.support.grids import chosen


@contextmanager
def process(environment: dict[str, str], *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    child = ForkedProcess(
        [*COMMAND, "serve", "pico", "--port", "0", "--ctx", "512", *arguments],
        env=environment,
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), (line, child.communicate())
        yield child, int(line.split(":")[2].split()[0])
    finally:
        child.kill()
        child.communicate()


def begin(port: int, stream: bool = True, tokens: int = 450, count: int = 1) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    body = {"model": "pico", "prompt": "Once upon", "max_tokens": tokens, "stream": stream}
    body |= {"ignore_eos": True, "n": count}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200 and response.read(6) == b"data: "
    return response


def health(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    connection.request("GET", "/health")
    return connection.getresponse().status


@pytest.mark.parametrize(
    ("number", "code"),
    chosen(
        [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)],
        quick=[(signal.SIGTERM, 143)],
    ),
)
def test_g27_a_reply_under_way_is_finished_first(
    environment: dict[str, str], number: signal.Signals, code: int
) -> None:
    with process(environment) as (child, port):
        response = begin(port)
        child.send_signal(number)
        end = time.monotonic() + 60
        while health(port) != 503:
            assert time.monotonic() < end
        rest = response.read()
        assert rest.endswith(b"data: [DONE]\n\n") and b'"error"' not in rest
        assert child.wait(60) == code
        assert child.stderr is not None and "Traceback" not in child.stderr.read()


def test_g27_what_takes_too_long_is_told_and_ended(environment: dict[str, str]) -> None:
    with process(environment, "--grace", "0.3") as (child, port):
        slow = [begin(port, tokens=500)]
        child.send_signal(signal.SIGINT)
        rest = slow[0].read()
        assert b"shutting_down" in rest or rest.endswith(b"data: [DONE]\n\n")
        assert child.wait(60) == 130


def test_g28_the_second_signal_ends_it_at_once(environment: dict[str, str]) -> None:
    with process(environment, "--grace", "3600") as (child, port):
        responses = [begin(port, count=32) for _ in range(2)]
        os.kill(child.pid, signal.SIGTERM)
        while health(port) != 503:
            pass
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(60) == 143
        assert child.stderr is not None
        said = child.stderr.read()
        assert said.count("\n") == 1 and said.endswith("replies; press Ctrl-C again to stop now\n")
        assert int(said.removeprefix("stopping after ").split()[0]) > len(responses), "of each request 32 replies"
        for response in responses:
            with suppress(http.client.IncompleteRead, ConnectionError):  # cut off in the middle
                assert b"data: [DONE]" not in response.read()


def test_g7_the_key_is_neither_said_nor_logged(environment: dict[str, str], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("the-s3cret\n")
    key.chmod(0o644)
    with process(environment, "--api-key-file", str(key), "-v") as (child, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
        for headers, status in (({}, 401), ({"authorization": "Bearer the-s3cret"}, 200)):
            connection.request("GET", "/v1/models", headers=headers)
            response = connection.getresponse()
            response.read()
            assert response.status == status
        child.terminate()
        out, err = child.communicate(timeout=240)
        assert "the-s3cret" not in out + err and "GET /v1/models 401" in err and "chmod 600" in err


def test_json_says_where_it_is(environment: dict[str, str]) -> None:
    child = ForkedProcess(
        [*COMMAND, "serve", "pico", "--port", "0", "--alias", "gpt, pico", "--max-sequences", "3", "--json"],
        env=environment,
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert child.stdout is not None
        told = json.loads(child.stdout.readline())
        assert told["model"] == "gpt" and told["url"].startswith("http://127.0.0.1:")
        assert told["sequences"] == told["full_length"] == 3
        with urllib.request.urlopen(f"{told['url']}/v1/models", timeout=120) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["gpt", "pico"], "each name once"
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["--host", "0.0.0.0"], 2, "--api-key-file"),
        (["--host", "no such host"], 2, "--host"),
        (["--host", "192.0.2.1", "--insecure-no-auth"], 5, "--host"),
        (["--port", "99999"], 2, "--port"),
        (["--api-key-file", "/nowhere/key"], 4, "key"),
        (["--cors", "*"], 2, "https://"),
        (["--alias", ""], 2, "--alias"),
    ],
    ids=lambda value: "-".join(value)[:24] if isinstance(value, list) else "",
)
def test_g1_g29_what_cannot_be_is_said_before_anything_is_loaded(
    mycli: Mycli, arguments: list[str], code: int, words: str
) -> None:
    done = mycli("serve", "pico", *arguments)
    assert done.returncode == code and words in done.stderr and done.stdout == ""
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) <= 2


def test_g29_a_port_that_is_taken(mycli: Mycli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = mycli("serve", "pico", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 5 and "is in use" in done.stderr and "--port 0" in done.stderr


@pytest.mark.parametrize("text", ["", "two words", "two\nlines", "clé"])
def test_g7_a_key_that_is_none(mycli: Mycli, tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    (tmp_path / "key").chmod(0o600)
    done = mycli("serve", "pico", "--api-key-file", str(tmp_path / "key"))
    assert done.returncode == 2 and "openssl rand" in done.stderr


def test_without_its_libraries_it_says_what_to_install(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "starlette.py").write_text("raise ImportError('none', name='starlette')\n")
    path = f"{tmp_path}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [*COMMAND, "serve", "pico"],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2 and "starlette, which is not installed" in done.stderr


def test_the_line_of_a_server_says_what_it_holds(tmp_path: Path) -> None:
    """The option is named for a context below the model's limit; models that compute vectors have no cache."""
    limit, pico = 2048, "up to 5 replies concurrently; the cache holds 1 sequence of"
    for model, context, holds in (
        ("pico", 256, f"{pico} 256 tokens (--ctx allows up to {limit})"),
        ("pico", limit, f"{pico} {limit} tokens"),
        (encoder(tmp_path / "encoder"), 64, "vectors of texts of up to 64 tokens"),
        (cross_encoder(tmp_path / "ranks"), 64, "scores of pairs of up to 64 tokens"),
    ):
        with open_model(model, EngineConfig(device="cpu", context=context), offline=True) as opened:
            out = io.StringIO()
            _announce(Call(Output(stdout=out), offline=True), "http://x:1", "name", opened, 5)
        assert out.getvalue() == f"http://x:1 · name · {holds}\n"
