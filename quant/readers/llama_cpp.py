"""Reads GGUF files with llama.cpp: llama-quantize decodes every weight to F32, llama-server computes logits."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mycli.quant.readers import Names, Reading, ReadWeight, Task, run_program
from mycli.quant.readers._digests import row_digests
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks
from mycli.runtime.checkpoint.gguf.files import GgufFiles
from mycli.runtime.checkpoint.gguf_parts import is_gguf
from mycli.runtime.errors import ModelError, NotFoundError

WEIGHT_NAMES: Names = "gguf"
# Of decoded weights, and of the file itself, for which llama.cpp rounds activations to 8 bits and keys to fp16.
_TOLERANCE, _ROUNDED_TOLERANCE = 0.01, 0.5  # nats
_EXACT = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")
_LIKELIEST = 10
_START_SECONDS = 300.0


def read(task: Task) -> Reading:
    """See `ReaderModule.read`."""
    if not is_gguf(task.model):
        raise ModelError(f"{task.model}: llama.cpp reads GGUF files only", "name a .gguf file")
    quantize, server = _find(task, "llama-quantize"), _find(task, "llama-server")
    with tempfile.TemporaryDirectory(prefix="mycli-read-") as folder:
        dense = Path(folder) / "dense.gguf"
        run_program([quantize, "--allow-requantize", str(task.model), str(dense), "F32"], "llama.cpp", task.model)
        weights = _weights(dense)
        likeliest = _likeliest(server, dense, task.tokens, _EXACT)
    rounded = _likeliest(server, task.model, task.tokens)
    version = subprocess.run([server, "--version"], capture_output=True, text=True, errors="replace", check=False)
    words = (version.stderr + version.stdout).partition("version:")[2].split()
    program = f"llama.cpp {words[0] if words else ''}".strip()
    return Reading(program, weights, likeliest, True, _TOLERANCE, rounded, _ROUNDED_TOLERANCE)


def _find(task: Task, name: str) -> str:
    folder = None if task.program is None else str(task.program)
    path = shutil.which(name, path=folder)
    if path is None:
        where = "on PATH" if folder is None else f"in {folder}"
        raise NotFoundError(
            f"llama.cpp is not installed: no {name} {where}",
            "cmake -B build && cmake --build build --target llama-server llama-quantize, then add build/bin to PATH",
        )
    return path


def _weights(file: Path) -> dict[str, ReadWeight]:
    import torch

    opened = GgufFiles.open(file)
    weights = {}
    for name, entry in opened.header.tensors.items():
        data = torch.empty(entry.nbytes, dtype=torch.uint8)
        opened.files[entry.file].read_into(data.numpy().data, entry.offset)
        columns = entry.shape[-1]
        values = dequantize_blocks(data.view(1, -1), entry.dtype).view(-1, columns)
        weights[name] = ReadWeight("float32", entry.shape, row_digests(values))
    return weights


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _likeliest(server: str, model: Path, tokens: Sequence[int], options: Sequence[str] = ()) -> dict[int, float]:
    # A free port may be taken before the server binds it; the server then fails, and the command can be repeated.
    port = _free_port()
    command = [server, "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-c", "512", "-np", "1"]
    environment = {**os.environ, "LLAMA_ARG_NO_WARMUP": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, *options, "--no-webui"], stdout=log, stderr=log, env=environment)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(process, address, model)
            body = {"prompt": list(tokens), "n_predict": 1, "n_probs": _LIKELIEST, "temperature": 0.0}
            answer = _post(f"{address}/completion", body)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
    first = answer["completion_probabilities"][0]
    return {int(token["id"]): float(token["logprob"]) for token in first["top_logprobs"]}


def _wait(process: "subprocess.Popen[bytes]", address: str, model: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        if _is_ready(address):
            return
        time.sleep(0.1)
    raise ModelError(f"{model}: llama-server does not load it", "start llama-server by hand to see why")


def _is_ready(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as answer:  # noqa: S310  # ours
        return bool(answer.status == 200)
    return False


def _post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(  # noqa: S310  # our own server
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310  # our own server
        result: dict[str, Any] = json.load(answer)
        return result
