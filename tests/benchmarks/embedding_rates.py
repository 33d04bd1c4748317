"""Compares embedding throughput with llama-server's: `python -m tests.benchmarks.embedding_rates LLAMA_BIN [FOLDER]`.

Uses a random Qwen3 (16 layers of 768, 0.12 B) in bf16, and GGUF files of it in several types, last-token pooling, and
batches of texts of about 40 tokens from several clients. Rounds alternate; prints the medians in texts per minute.
"""

import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.support.command_line import COMMAND
from tests.support.embedding_models import qwen3_embedding, qwen3_reranker

SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
TEXTS, BATCH, CLIENTS, ROUNDS = 192, 16, 4, 3
TYPES = ("bf16", "f16", "q8_0")  # of the GGUF files
_WORDS = "the city of light was once a small place where people came to trade what they had made over the winter"


def texts() -> list[str]:
    words = _WORDS.split()
    return [" ".join(words[(index * 7 + at) % len(words)] for at in range(32)) + f" {index}" for index in range(TEXTS)]


@contextmanager
def process(command: list[str]) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            yield
        finally:
            child.terminate()


def vector(port: int) -> list[float]:
    return answer(port, texts()[:1])["data"][0]["embedding"]


def ask(port: int, batch: list[str]) -> int:
    reply = answer(port, batch)
    assert len(reply["data"]) == len(batch)
    return int(reply["usage"]["prompt_tokens"])


def answer(port: int, batch: list[str]) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/embeddings", json.dumps({"input": batch}), {"content-type": "application/json"})
    reply = json.loads(connection.getresponse().read())
    connection.close()
    return reply


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


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def write_causal(folder: Path, causal: Path) -> None:
    """Write the same weights as a language model, whose head is the embedding: export needs one."""
    qwen3_reranker(causal, **SHAPE)
    tensors = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, causal / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((causal / "config.json").read_text())
    (causal / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


def prepare(scratch: Path) -> tuple[Path, dict[str, Path]]:
    """Write the model as a folder of sentence-transformers and as GGUF files of `TYPES`, unless they exist."""
    folder, causal = scratch / "embedding", scratch / "causal"
    if not folder.exists():
        qwen3_embedding(folder, **SHAPE)
        write_causal(folder, causal)
    files = {kind: scratch / f"{kind}.gguf" for kind in TYPES}
    for kind, file in files.items():
        if not file.exists():
            export = [*COMMAND, "export", str(causal), "--to", f"gguf:{kind}", "--requantize", "-o", str(file)]
            subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
    return folder, files


def measure(llama: Path, scratch: Path) -> None:
    folder, files = prepare(scratch)
    own, *ports = free_ports(1 + len(files))
    servers = {"mycli bf16": (own, [*COMMAND, "serve", str(folder), "--device", "cpu", "--dtype", "bf16"])}
    for (kind, file), port in zip(files.items(), ports, strict=True):
        command = [str(llama / "llama-server"), "-m", str(file), "--embeddings", "--pooling", "last", "-t", "2"]
        command += ["-c", "8192", "--parallel", "16", "-b", "2048", "-ub", "2048"]
        servers[f"llama-server {kind}"] = port, command
    with ExitStack() as stack:
        for port, command in servers.values():
            stack.enter_context(process([*command, "--port", str(port)]))
        for port, _ in servers.values():
            wait(port)
        vectors = [vector(port) for port, _ in servers.values()]
        cosines = [sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors]
        print("cosine to the first:", ", ".join(f"{value:.5f}" for value in cosines))
        results: dict[str, list[float]] = {name: [] for name in servers}
        for serial in range(ROUNDS):
            for name, rates in results.items():
                value, tokens = rate(servers[name][0], serial)
                rates.append(value)
                print(f"{name:18} {value:8.0f} texts/minute, {tokens} tokens", flush=True)
    print({name: round(statistics.median(rates)) for name, rates in results.items()})


def main(llama: Path, scratch: Path | None) -> None:
    if scratch is not None:
        scratch.mkdir(exist_ok=True)
        measure(llama, scratch)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(llama, Path(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None)
