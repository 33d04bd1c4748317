"""Compares embedding throughput with llama-server's: `python -m tests.benchmarks.embedding_rates LLAMA_BIN`.

Uses a random Qwen3 (12 layers of 512) in bf16 on both sides, last-token pooling, and batches of texts of about 40
tokens from several clients. Rounds alternate; prints the medians in texts per minute.
"""

import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.support.command_line import COMMAND
from tests.support.embedding_models import qwen3_embedding, qwen3_reranker

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
TEXTS, BATCH, CLIENTS, ROUNDS = 256, 16, 4, 3
WORDS = [
    "the",
    "city",
    "of",
    "light",
    "was",
    "once",
    "a",
    "small",
    "place",
    "where",
    "people",
    "came",
    "to",
    "trade",
    "what",
    "they",
    "had",
    "made",
    "over",
    "the",
    "winter",
]  # noqa: SIM905  # readable


def texts() -> list[str]:
    return [" ".join(WORDS[(index * 7 + at) % len(WORDS)] for at in range(32)) + f" {index}" for index in range(TEXTS)]


@contextmanager
def process(command: list[str]) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            yield
        finally:
            child.terminate()


def ask(port: int, batch: list[str]) -> int:
    """Send a batch and return the number of prompt tokens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/embeddings", json.dumps({"input": batch}), {"content-type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert len(answer["data"]) == len(batch)
    return int(answer["usage"]["prompt_tokens"])


def wait(port: int) -> None:
    while True:
        try:
            ask(port, ["hello"])
            return
        except (OSError, KeyError, ValueError):
            time.sleep(0.2)


def rate(port: int, serial: int) -> tuple[float, int]:
    """Return texts per minute and the number of tokens; every text is new."""
    batches = [[f"{serial} {text}" for text in texts()[at : at + BATCH]] for at in range(0, TEXTS, BATCH)]
    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        tokens = sum(pool.map(lambda batch: ask(port, batch), batches))
    return TEXTS * 60 / (time.perf_counter() - began), tokens


def main(llama: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder, causal = Path(scratch) / "embedding", Path(scratch) / "causal"
        qwen3_embedding(folder, **SHAPE)
        qwen3_reranker(causal, **SHAPE)  # the same shape with a head, which the GGUF file needs
        gguf = Path(scratch) / "model.gguf"
        export = [*COMMAND, "export", str(causal), "--to", "gguf:bf16", "--requantize", "-o", str(gguf)]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
        ours = [*COMMAND, "serve", str(folder), "--port", "18401", "--device", "cpu", "--dtype", "bf16"]
        server = [str(llama / "llama-server"), "-m", str(gguf), "--embeddings", "--pooling", "last", "-t", "2"]
        server += ["--port", "18402", "-c", "8192", "--parallel", "16", "-b", "2048", "-ub", "2048"]
        with process(ours), process(server):
            for port in (18401, 18402):
                wait(port)
            results: dict[int, list[float]] = {18401: [], 18402: []}
            for serial in range(ROUNDS):
                for port, rates in results.items():
                    value, tokens = rate(port, serial)
                    rates.append(value)
                    print(port, round(value), "texts/minute,", tokens, "tokens", flush=True)
        print(
            {
                name: round(statistics.median(results[port]))
                for name, port in (("mycli", 18401), ("llama-server", 18402))
            }
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
