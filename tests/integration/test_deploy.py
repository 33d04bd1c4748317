"""The files of docs/deploy: checked by the programs that read them, and nginx in front of a server."""

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.paths import ROOT

DEPLOY = ROOT / "docs" / "deploy"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
ANALYZE = shutil.which("systemd-analyze")


def test_options_of_the_files_exist() -> None:
    options = set(re.findall(r"--[a-z][a-z-]+", (ROOT / "docs" / "commands.md").read_text()))
    for name in ("mycli.service", "Containerfile"):
        lines = [
            line for line in (DEPLOY / name).read_text().splitlines() if line.startswith(("ExecStart=", "ENTRYPOINT"))
        ]
        assert lines and set(re.findall(r"--[a-z][a-z-]+", lines[0])) <= options, name


def test_the_container_copies_what_the_package_needs() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for word in line.split()}
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "docs/mycli.1", "cli", "quant", "runtime"}
    assert all((ROOT / path).exists() for path in copied)


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    """With a program that exists, which systemd looks for, and groups that every machine has."""
    text = (DEPLOY / "mycli.service").read_text().replace("/opt/mycli/bin/mycli", sys.executable)
    (tmp_path / "mycli.service").write_text(text)
    done = subprocess.run(
        [str(ANALYZE), "verify", "--man=no", str(tmp_path / "mycli.service")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "mycli.service" not in done.stderr, done.stderr


@contextmanager
def proxy(folder: Path, path: Path, port: int) -> Iterator[None]:
    """nginx with the documented site, whose socket and port are the test's."""
    site = (DEPLOY / "nginx.conf").read_text()
    assert "/run/mycli/socket" in site and "listen 80;" in site
    site = site.replace("/run/mycli/socket", str(path)).replace("listen 80;", f"listen 127.0.0.1:{port};")
    (folder / "site.conf").write_text(site)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"{'user root;' if os.getuid() == 0 else ''} daemon off; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; {temporary} include {folder}/site.conf; }}\n"
    )
    words = [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf")]
    checked = subprocess.run([*words, "-t"], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_nginx_passes_streams_on_through_a_unix_socket(tmp_path: Path, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = tmp_path / "socket"
    serve = ["serve", "pico", "--unix-socket", str(path), "--allow-host", "llm.example.org"]
    server = subprocess.Popen([sys.executable, "-m", "mycli.cli", *serve], env=environment, stderr=subprocess.DEVNULL)
    try:
        with proxy(tmp_path, path, port):
            await_health(port)
            assert get(port, "/").startswith(b"<!doctype html>")
            assert b"marked" in get(port, "/web/vendor/marked/marked.umd.js")
            status, arrivals, text = stream(port)
            assert status == 200 and text.rstrip().endswith("data: [DONE]") and arrivals > 1
    finally:
        server.terminate()
        server.wait(60)
    assert server.returncode == 143 and not path.exists()  # as the unit expects


def get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"host": "llm.example.org"})
    response = connection.getresponse()
    return response.read() if response.status == 200 else b""


def await_health(port: int) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            if get(port, "/health"):
                return
        except OSError:
            pass
        assert time.monotonic() < end, "the server is not reachable through nginx"
        time.sleep(0.1)


def stream(port: int) -> tuple[int, int, str]:
    """Status of a streamed chat, the number of pieces in which it arrived, and its text."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 400, "temperature": 1}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    # As the page sends it when nginx ends TLS.
    headers = {"host": "llm.example.org", "origin": "https://llm.example.org", "content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    parts = []
    while part := response.read1(1 << 20):
        parts.append(part)
    return response.status, len(parts), b"".join(parts).decode()
