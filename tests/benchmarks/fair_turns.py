"""Measures the time to the first token of one user, alone and while another API key keeps many replies running.

    python -m tests.benchmarks.fair_turns [MODEL] [--replies 30] [--requests 40] [--repeats 2]

Prints the median and the 95th percentile of the user's times in ms: alone, beside the other key, and with one key for
both, which is first come, first served. Load and requests are the same in the last two, which alternate, so the
difference of their tokens per second (prompts and replies, by /metrics) is what fairness costs.
"""

import argparse
import asyncio
import http.client
import json
import multiprocessing
import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.several_models import server

PROMPT, TOKENS = 160, 8  # words of a prompt, tokens of a reply of the user
LONG = range(32, 97)  # tokens of a reply of the load: different, so that replies do not begin together
ALICE, BOB = "alice-secret", "bob-secret"
_COUNTED = ("prompt_tokens_total", "generation_tokens_total")


def request(key: str, serial: int, tokens: int) -> bytes:
    words = ("the", "city", "of", "light", "was", "a", "place")
    prompt = f"{serial} " + " ".join(words[(serial + at) % 7] for at in range(PROMPT))
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def reply(port: int, data: bytes) -> float:
    """Return the seconds to the first event of a streamed reply, after its last."""
    began, seconds = time.perf_counter(), 0.0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        received = b""
        while part := await reader.read(1 << 16):
            if not seconds:
                received += part
                seconds = time.perf_counter() - began if b"data:" in received else 0.0
    finally:
        writer.close()
    assert received.startswith(b"HTTP/1.1 200"), received[:200]
    return seconds


def load(port: int, key: str, replies: int, serial: int) -> None:
    """Keep `replies` streams running until the process is terminated."""

    async def stream(number: int) -> None:
        for turn in range(1000):
            serial_number = serial + turn * replies + number
            await reply(port, request(key, serial_number, LONG[serial_number * 37 % len(LONG)]))

    async def streams() -> None:
        await asyncio.gather(*(stream(number) for number in range(replies)))

    asyncio.run(streams())


def tokens(port: int) -> float:
    """Return the prompt and reply tokens of all keys so far."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics", headers={"authorization": f"Bearer {ALICE}"})
    text = connection.getresponse().read().decode()
    connection.close()
    return sum(float(re.findall(rf"^mycli:{name} (\S+)$", text, re.MULTILINE)[0]) for name in _COUNTED)


def first_tokens(port: int, requests: int, serial: int, seconds: float = 600.0) -> list[float]:
    """Return the times to the first token in ms; no request begins after `seconds`."""
    times, end = list[float](), time.monotonic() + seconds
    for number in range(requests):
        if len(times) > 1 and time.monotonic() > end:
            break
        times.append(asyncio.run(reply(port, request(ALICE, serial + number, TOKENS))) * 1000)
        time.sleep(0.05)
    return times


class Serials:
    """Numbers that make prompts differ, so that none is in the prefix cache."""

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> int:
        self._next += 100_000
        return self._next


def beside(
    port: int, key: str, replies: int, requests: int, serials: Serials, warm: float, seconds: float = 600.0
) -> tuple[list[float], float]:
    """Return the user's times beside the load of `key`, and all tokens per second."""
    child = multiprocessing.get_context("spawn").Process(target=load, args=(port, key, replies, serials.take()))
    child.start()
    try:
        time.sleep(warm)
        began, before = time.perf_counter(), tokens(port)
        times = first_tokens(port, requests, serials.take(), seconds)
        rate = (tokens(port) - before) / (time.perf_counter() - began)
    finally:
        child.terminate()
        child.join()
    time.sleep(0.5)  # the server cancels what was under way
    return times, rate


def shown(times: list[float]) -> str:
    return f"median {statistics.median(times):7.1f}  p95 {statistics.quantiles(times, n=20)[-1]:7.1f} ms"


def main(model: str, replies: int, requests: int, repeats: int, warm: float) -> None:
    serials, ratios, costs = Serials(), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        keys = Path(scratch) / "keys"
        keys.write_text(f"alice {ALICE}\nbob {BOB}\n")
        keys.chmod(0o600)
        options = (model, "--api-keys-file", str(keys), "--max-sequences", "32")
        # A second server, since the first expects prompts of both keys for a while after the last.
        (_, port), (_, plain_port) = (stack.enter_context(server(*options)) for _ in range(2))
        for each in (port, plain_port):
            first_tokens(each, 3, serials.take())
        for _ in range(repeats):
            alone = first_tokens(port, requests, serials.take())
            fair, fair_rate = beside(port, BOB, replies, requests, serials, warm)
            # Every request waits behind all others here: as many as fit the same time are enough.
            seconds = sum(fair) / 1000 + 5
            plain, plain_rate = beside(plain_port, ALICE, replies, requests, serials, warm, seconds)
            ratios.append(statistics.quantiles(fair, n=20)[-1] / statistics.quantiles(alone, n=20)[-1])
            costs.append(1 - fair_rate / plain_rate)
            print("alone        ", shown(alone))
            print("another key  ", shown(fair), f"{fair_rate:8.1f} tokens/s")
            print("the same key ", shown(plain), f"{plain_rate:8.1f} tokens/s", flush=True)
        print(f"p95 beside another key / alone: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
        print(f"tokens/s lost by fairness: {', '.join(f'{cost:.1%}' for cost in costs)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="pico")
    for name, value in (("--replies", 30), ("--requests", 40), ("--repeats", 2), ("--warm", 3)):
        parser.add_argument(name, type=int, default=value)
    arguments = parser.parse_args()
    main(arguments.model, arguments.replies, arguments.requests, arguments.repeats, arguments.warm)
