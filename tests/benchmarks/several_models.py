"""Sends requests to several models of which two fit: `python -m tests.benchmarks.several_models [REQUESTS] [CLIENTS]`.

Prints failures, replies that differ from those of the model served alone, loads and evictions, and the peak resident
memory of all server processes together with its limit.
"""

import http.client
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.command_line import COMMAND
from tests.support.paths import PICO

MODELS, PROMPTS, LIMIT_MIB = 5, 20, 960


@contextmanager
def server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [*COMMAND, "serve", *arguments, "--port", "0", "--device", "cpu", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        try:
            assert child.stdout is not None
            yield child, int(json.loads(child.stdout.readline())["url"].rpartition(":")[2])
        finally:
            child.terminate()


def ask(port: int, model: str, prompt: str) -> tuple[int, Any]:
    """Return the status of a chat request, and its text with the log-probabilities."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 16, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        data = json.dumps({**body, "logprobs": True, "top_logprobs": 2})
        connection.request("POST", "/v1/chat/completions", data, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    finally:
        connection.close()
    if response.status != 200:
        return response.status, answer
    choice = answer["choices"][0]
    return 200, (choice["message"]["content"], choice["logprobs"])


def descendants(pid: int) -> set[int]:
    """Return the process and its descendants. A child before its exec is left out: it shares its parent's memory."""
    children: dict[int, list[int]] = {}
    commands: dict[int, bytes] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(folder.name)] = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found, queue = {pid}, [pid]
    while queue:
        parent = queue.pop()
        new = [child for child in children.get(parent, ()) if commands[child] != commands.get(parent)]
        found.update(new)
        queue.extend(new)
    return found


def resident_bytes(pids: set[int]) -> int:
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))
    return total


class PeakMemory:
    def __init__(self, pid: int) -> None:
        self.peak, self._pid, self._done = 0, pid, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._done.wait(0.05):
            self.peak = max(self.peak, resident_bytes(descendants(self._pid)))

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self.peak


def counters(port: int, name: str) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    pairs = [line.split() for line in lines if line.startswith(f"mycli:{name}_total")]
    return {label.split('"')[1]: float(value) for label, value in pairs}


def measure(requests: int, clients: int, folder: Path) -> dict[str, Any]:
    prompts = [f"Tell me about the number {index}." for index in range(PROMPTS)]
    with server("pico") as (_, port):
        alone = {prompt: ask(port, "pico", prompt)[1] for prompt in prompts}
    for index in range(MODELS):
        shutil.copytree(PICO, folder / f"model-{index}")
    draw = random.Random(0)
    work = [(f"model-{draw.randrange(MODELS)}", draw.choice(prompts)) for _ in range(requests)]
    with server("--models-dir", str(folder), "--memory", f"{LIMIT_MIB}MiB") as (child, port):
        memory, began = PeakMemory(child.pid), time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(lambda item: ask(port, *item), work))
        seconds = time.perf_counter() - began
        loads, evictions = counters(port, "model_loads"), counters(port, "model_evictions")
        peak = memory.stop()
    failed = [answer for status, answer in answers if status != 200]
    different = sum(
        status == 200 and answer != alone[prompt] for (status, answer), (_, prompt) in zip(answers, work, strict=True)
    )
    return {
        "requests": requests,
        "clients": clients,
        "failed": len(failed),
        "first_failure": failed[0] if failed else None,
        "different": different,
        "seconds": round(seconds, 1),
        "loads": loads,
        "evictions": evictions,
        "peak_mib": round(peak / 2**20),
        "limit_mib": LIMIT_MIB,
    }


def main() -> None:
    numbers = [int(word) for word in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(numbers[0] if numbers else 1000, numbers[1] if numbers[1:] else 16, Path(scratch))
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
