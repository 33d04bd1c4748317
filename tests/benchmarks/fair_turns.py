"""Measures the time to the first token of one user, alone and while another API key keeps many replies running.

`python -m tests.benchmarks.fair_turns [MODEL] [REPLIES]` prints the 95th percentile of each, with separate keys and
with one key, and the other key's tokens per second with and without this user's requests.
"""

import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.benchmarks.several_models import server

ASKS, PROMPT, TOKENS = 40, 160, 8
LONG = 64  # tokens of each reply of the other key
ALICE, BOB = "alice-secret", "bob-secret"


def ask(port: int, key: str, prompt: str, tokens: int) -> tuple[float, int]:
    """Return the seconds to the first token and the number of tokens of a streamed reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    first = response.readline()
    seconds = time.perf_counter() - began
    rest = (first + response.read()).decode()
    connection.close()
    usages = [line for line in rest.splitlines() if '"usage":{' in line]
    return seconds, json.loads(usages[-1][6:])["usage"]["completion_tokens"] if usages else 0


def text(seed: int, words: int) -> str:
    return f"{seed} " + " ".join(
        ("the", "city", "of", "light", "was", "a", "place")[(seed + at) % 7] for at in range(words)
    )


class Load:
    """Keeps replies of the other key running in threads and counts their tokens."""

    def __init__(self, port: int, key: str, replies: int) -> None:
        self.tokens, self._done, self._lock = 0, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(port, key, n), daemon=True) for n in range(replies)]
        self._began = time.perf_counter()
        for thread in self._threads:
            thread.start()

    def _run(self, port: int, key: str, number: int) -> None:
        serial = number
        while not self._done.is_set():
            serial += 1000
            _, tokens = ask(port, key, text(serial, PROMPT), LONG)
            with self._lock:
                self.tokens += tokens

    def stop(self) -> float:
        """Stop the load and return its tokens per second over the replies that ended."""
        rate = self.tokens / (time.perf_counter() - self._began)
        self._done.set()
        for thread in self._threads:
            thread.join()
        return rate


def first_tokens(port: int, key: str, begin: int) -> float:
    """Return the 95th percentile of the time to the first token, in ms."""
    times = []
    for number in range(ASKS):
        times.append(ask(port, key, text(begin + number, PROMPT), TOKENS)[0] * 1000)
        time.sleep(0.05)
    return statistics.quantiles(times, n=20)[-1]


def main(model: str, replies: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        keys = Path(scratch) / "keys"
        keys.write_text(f"alice {ALICE}\nbob {BOB}\n")
        keys.chmod(0o600)
        with server(model, "--api-keys-file", str(keys), "--max-sequences", "32") as (_, port):
            ask(port, ALICE, "hello", 4)
            for repeat in range(2):
                alone = first_tokens(port, ALICE, 10_000 * repeat)
                results = {}
                for name, key in (("fair", BOB), ("one key", ALICE)):
                    load = Load(port, key, replies)
                    time.sleep(3)
                    results[name] = first_tokens(port, ALICE, 10_000 * repeat + 5000 + 100 * len(results))
                    results[f"{name} tokens/s"] = load.stop()
                load = Load(port, BOB, replies)
                time.sleep(8)
                results["tokens/s without the user"] = load.stop()
                shown = {name: round(value, 1) for name, value in {"alone": alone, **results}.items()}
                print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "pico", int(sys.argv[2]) if sys.argv[2:] else 30)
