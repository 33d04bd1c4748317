"""Runs a soak test of `mycli serve`: many clients that disconnect early or read slowly, and idle sockets at the end.

    python -m tests.benchmarks.soak --seconds 300 --clients 32 --idle 10000

Prints the server's memory, blocks, threads and open files before, during and after the load, the statuses that the
clients received, how many greedy replies differ from those of the idle server, and the latency of /health with `--idle`
idle sockets open beside the clients. Exits with 1 if blocks, threads or files leak, memory grew by more than a tenth
after the warm-up, a reply differs, a response was a 5xx other than 503, or /health did not respond.
"""

import argparse
import asyncio
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tests.support.command_line import COMMAND, INSTALLED
from tests.support.paths import ROOT

COMPARED = 16  # requests
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "he",
    "was",
    "that",
    "it",
    "his",
    "her",
    "with",
    "as",
    "had",
    "for",
    "she",
    "they",
)


def request(port: int, path: str, body: Any = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


def asked(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a random request; most are valid."""
    text = " ".join(chance.choices(WORDS, k=chance.choice((3, 30, 120))))
    begin = "Once upon a time there was " * chance.randint(0, 6)
    common: dict[str, Any] = {
        "model": "pico",
        "stream": chance.random() < 0.7,
        "temperature": chance.choice((0, 0.8)),
        "max_tokens": chance.choice((1, 8, 40, 120)),
    }
    kind = chance.random()
    if kind < 0.4:
        return "/v1/completions", {**common, "prompt": begin + text, "n": chance.choice((1, 1, 3))}
    if kind < 0.7:
        form = {"response_format": {"type": "json_object"}} if chance.random() < 0.3 else {}
        return "/v1/chat/completions", {**common, **form, "messages": [{"role": "user", "content": begin + text}]}
    if kind < 0.8:
        return "/v1/messages", {**common, "messages": [{"role": "user", "content": text}]}
    if kind < 0.9:
        return "/v1/completions", {**common, "prompt": text * 60}  # too long
    return "/v1/chat/completions", {**common, "messages": chance.choice(([], "x", [{"role": "nobody"}]))}


async def exchange(port: int, data: bytes, seconds: float = 120, leave: float = 0.0, slowly: bool = False) -> bytes:
    """Send a request and return the response; `leave`: seconds until the client disconnects, 0 for never."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = b""
    try:
        writer.write(data)
        async with asyncio.timeout(leave or seconds):
            while part := await reader.read(256 if slowly else 1 << 16):
                found += part
                if slowly:
                    await asyncio.sleep(0.05)
    except TimeoutError:
        if not leave:
            raise
    finally:
        writer.transport.abort()
    return found


def text_of(answer: bytes) -> str:
    body = answer.partition(b"\r\n\r\n")[2].decode()
    objects = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")] or [json.loads(body)]
    return "".join(choice["text"] for item in objects for choice in item["choices"])


def compared(number: int, stream: bool) -> bytes:
    """Return one of the requests whose replies are compared; HTTP/1.0, so that a stream has no chunk heads."""
    words = " ".join(WORDS[(number * 5 + at) % len(WORDS)] for at in range(4 + number * 6))
    body = {"model": "pico", "prompt": words, "max_tokens": 24 + number, "temperature": 0, "stream": stream}
    data = request(0, "/v1/completions", body)
    return data.replace(b"HTTP/1.1", b"HTTP/1.0", 1).replace(b"127.0.0.1:0", b"127.0.0.1", 1)


async def expected_texts(port: int) -> list[str]:
    """Return the replies of the idle server to the requests that are compared."""
    return [text_of(await exchange(port, compared(number, False))) for number in range(COMPARED)]


async def client(port: int, seed: int, end: float, told: Counter[str], expected: Sequence[str] = ()) -> None:
    """Send one request after another until `end`; one in five is compared with its expected reply."""
    chance = random.Random(seed)
    while time.monotonic() < end:
        if expected and chance.random() < 0.2:
            await compare(port, chance, expected, told)
            continue
        path, body = asked(chance)
        leave = chance.uniform(0.01, 2.0) if chance.random() < 0.3 else 0.0
        try:
            answer = await exchange(port, request(port, path, body), leave=leave, slowly=chance.random() < 0.1)
        except (OSError, TimeoutError) as error:
            told[type(error).__name__] += 1
            continue
        status = answer[9:12].decode() or "nothing"
        told["left early" if leave else status] += 1


async def compare(port: int, chance: random.Random, expected: Sequence[str], told: Counter[str]) -> None:
    number = chance.randrange(len(expected))
    try:
        answer = await exchange(port, compared(number, chance.random() < 0.5))
    except (OSError, TimeoutError) as error:
        told[type(error).__name__] += 1
        return
    status = answer[9:12].decode() or "nothing"
    told[status if status != "200" else "equal" if text_of(answer) == expected[number] else "different"] += 1


async def load(port: int) -> dict[str, float]:
    text = (await exchange(port, request(port, "/metrics"))).decode()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
    return {name: float(re.findall(rf"^mycli:{name} (\S+)$", text, re.MULTILINE)[0]) for name in names}


async def at_rest(port: int, seconds: float = 120) -> dict[str, float]:
    end = time.monotonic() + seconds
    while True:
        found = await load(port)
        if not (found["num_requests_running"] or found["num_requests_waiting"]) or time.monotonic() > end:
            return found
        await asyncio.sleep(0.2)


def memory(process: int) -> dict[str, int]:
    with open(f"/proc/{process}/status") as file:
        status = dict(line.split(":", 1) for line in file)
    files = len(os.listdir(f"/proc/{process}/fd"))
    return {"resident": int(status["VmRSS"].split()[0]) << 10, "threads": int(status["Threads"]), "files": files}


async def idle(port: int, count: int) -> dict[str, Any]:
    """Open this number of idle sockets, and request /health meanwhile and afterwards."""
    opened, refused, times = [], 0, []

    async def health() -> None:
        began = time.monotonic()
        answer = await exchange(port, request(port, "/health"), 30)
        times.append((time.monotonic() - began, answer[9:12].decode()))

    for index in range(count):
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 30)
            opened.append(writer)
        except (OSError, TimeoutError):
            refused += 1
        if index % (count // 5 or 1) == 0:
            with suppress(OSError, TimeoutError):
                await health()
    full = [status for _, status in times]
    for writer in opened:
        writer.transport.abort()
    end, recovered = time.monotonic() + 60, False
    while not recovered and time.monotonic() < end:
        with suppress(OSError, TimeoutError):
            await health()
            recovered = times[-1][1] == "200"
        await asyncio.sleep(0.2)
    slowest = max((seconds for seconds, _ in times), default=0.0)
    return {
        "opened": len(opened),
        "refused": refused,
        "health": full,
        "recovered": recovered,
        "slowest": round(slowest, 3),
    }


async def live(port: int, process: int, seconds: float, clients: int, sockets: int) -> dict[str, Any]:
    """Run the load and the idle phase against a server and return all measurements."""
    told: Counter[str] = Counter()
    expected = await expected_texts(port)
    warm = time.monotonic() + max(seconds / 5, 5)
    await asyncio.gather(*(client(port, seed, warm, Counter()) for seed in range(clients)))
    begun = {**await at_rest(port), **memory(process)}
    end = time.monotonic() + seconds
    series: list[dict[str, int]] = []

    async def watch() -> None:
        while time.monotonic() < end:
            series.append({"answers": sum(told.values()), **memory(process)})
            await asyncio.sleep(max(seconds / 20, 1))

    await asyncio.gather(watch(), *(client(port, 1000 + seed, end, told, expected) for seed in range(clients)))
    ended = {**await at_rest(port), **memory(process)}
    found = {"answers": dict(told), "begun": begun, "series": series, "ended": ended}
    if sockets:
        beside: Counter[str] = Counter()
        until = time.monotonic() + min(seconds / 5, 60)
        work = (client(port, 2000 + seed, until, beside, expected) for seed in range(clients))
        found["idle"], *_ = await asyncio.gather(idle(port, sockets), *work)
        found["answers_beside_idle"] = dict(beside)
        found["after_idle"] = {**await at_rest(port), **memory(process)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    for name, value in (("--seconds", 300), ("--clients", 32), ("--idle", 10_000)):
        parser.add_argument(name, type=int, default=value)
    given = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = subprocess.Popen(
        [*COMMAND, "serve", "pico", "--port", "0", "--ctx", "512", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tempfile.gettempdir(),
        env={**os.environ, **({} if INSTALLED else {"PYTHONPATH": os.pathsep.join([str(ROOT / ".links"), *sys.path])})},
    )
    assert server.stdout is not None
    try:
        port = int(json.loads(server.stdout.readline())["url"].rpartition(":")[2])
        found = asyncio.run(live(port, server.pid, given.seconds, given.clients, given.idle))
    finally:
        server.terminate()
        found_code = server.wait(60)
    begun, ended = found["begun"], found["ended"]
    statuses = {**found["answers"], **found.get("answers_beside_idle", {})}
    bad = [name for name in statuses if (name.startswith("5") and name != "503") or name == "different"]
    health = found.get("idle", {"recovered": True, "health": ["200"]})
    well = (
        not bad
        and ended["kv_cache_usage_perc"] == 0
        and ended["resident"] <= 1.1 * begun["resident"]
        and ended["threads"] <= begun["threads"]
        and ended["files"] <= begun["files"]
        and health["recovered"]
        and len(health["health"]) > 0
        and found_code == 143
    )
    print(json.dumps({**found, "exit_code": found_code, "well": well}, indent=1))
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
