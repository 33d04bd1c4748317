"""Compares llama-server's greedy tokens on exported GGUF files with ours: pico and random models of three families.

    python -m tests.benchmarks.llama_tokens --llama-server PATH [--to gguf:q8_0 ...] [--cases CASE ...]

Each model is written as a GGUF file and served by llama-server; it continues 20 prompts greedily, half of which are
also sent as text to compare the tokenization. llama.cpp rounds activations and sums in another order, so two almost
equally likely tokens may swap: each of its tokens must be ours, or within `TIE` standard deviations of our logits below
ours, in our fp32 pass over its reply. llama.cpp's products of quantized weights round their inputs to 8 bits. Where a
token is further below, the file's exact values are written as F32 and served again: with them the case must pass, so
the difference was that rounding alone. Our pass is also repeated with inputs rounded in the same way, to show how many
of our own choices that changes and by how much. The two cannot agree token by token: a difference in the last place of
an input, from attention, becomes a full step after rounding. The path may also be set in $LLAMA_SERVER.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import NormalDist
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from mycli.quant.evaluate import held_out_text
from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.progress import silent
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import UserError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.layers.feed_forward import Mlp
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.quantization.packed_weight import Matmul
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.engines import whole
from tests.support.families import make
from tests.support.gguf_exports import MULTIMODAL_NAMES, NAMES, make_exported
from tests.support.models import CPU
from tests.support.paths import PICO

TIE = 0.02  # in standard deviations of a step's logits
PROMPTS, PROMPT, REPLY = 20, 24, 24
# llama.cpp rounds keys and values to 16 bits unless asked not to; experts with close scores then change places.
_CACHE = ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
# The 25 layers of this case enlarge small differences, so our pass computes its gates as llama.cpp does.
GATED = "gemma3n-sparse-shared-kv"
WAIT = 120  # seconds until the server must be ready
_SIZE = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
_SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
FAMILIES = {"qwen3": {"head_dim": 64}, "olmo2": {"eos_token_id": 2, "pad_token_id": 1}, "qwen2": {}}


def random_folder(folder: Path, family: str) -> Path:
    make(folder, family, {**_SIZE, **FAMILIES[family]})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, folder / name)
    return folder


@contextmanager
def serving(program: str, file: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [
        "-t",
        "1",
        "-c",
        "256",
        "--parallel",
        "1",
        "--no-warmup",
        *_CACHE,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([program, "-m", str(file), *_CACHE, *options], stdout=said, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            _await(address, process)
            yield address
        except Exception:
            said.seek(0)
            print(*_errors(said.read().decode("utf-8", "replace")), sep="\n", flush=True)
            raise
        finally:
            process.kill()
            process.wait()


def _errors(log: str) -> list[str]:
    lines = log.splitlines()
    return [line for line in lines if "error" in line or "ASSERT" in line][:3] or lines[-3:]


def _await(address: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + WAIT
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(0.2)


def ask(address: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        return json.load(answer)


def theirs(address: str, prompt: Sequence[int]) -> list[int]:
    """Return llama-server's greedy continuation of token ids; it may end early."""
    # Not ignore_eos: the server then leaves out tokens that its vocabulary takes for ends, which are not ours.
    sampling = {"temperature": 0, "n_predict": REPLY, "cache_prompt": False, "return_tokens": True}
    tokens: list[int] = ask(address, "/completion", prompt=list(prompt), samplers=["temperature"], **sampling)["tokens"]
    return tokens


class RoundedInputs:
    """Rounds the inputs of a product to 8 bits first, as ggml's block_q8_0 (32 inputs) or block_q8_K (256) does."""

    def __init__(self, product: Matmul, block: int) -> None:
        self._product, self._block = product, block

    @property
    def nbytes(self) -> int:
        return self._product.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [rows, K], K a multiple of the block, to [rows, N]."""
        blocks = x.float().view(len(x), -1, self._block)
        if self._block == 32:
            step = blocks.abs().amax(-1, keepdim=True) / 127
            kept = step.half().float()
        else:
            extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
            step = kept = extreme / -127
        rounded = torch.where(step == 0, 0, (blocks / step).round().clamp(max=127)) * kept
        return self._product(rounded.view_as(x).to(x.dtype))

    def dequantize(self) -> Tensor:
        return self._product.dequantize()


def round_inputs(model: Transformer, block: int) -> None:
    """Make every product of packed weights round its inputs; the head uses Q8_0 blocks whatever the layers use."""
    for linear in (part for part in model.modules() if isinstance(part, Linear)):
        size = 32 if linear is model.head else block
        if all(not isinstance(product, DenseMatmul) for product in linear.matmuls):
            linear.matmuls = tuple(RoundedInputs(product, size) for product in linear.matmuls)


def gates_of_llama_cpp(mlp: Mlp, gate_up: Tensor) -> Tensor:
    """Compute Gemma 3n's gates with the deviation of a sample and 16-bit numbers before and after the GELU."""
    gate, up = gate_up.chunk(2, dim=-1)
    if mlp.spec.sparsity:
        deviation, mean = torch.std_mean(gate, dim=-1, keepdim=True)
        gate = torch.relu(gate - (mean + NormalDist().inv_cdf(mlp.spec.sparsity) * deviation))
    return functional.gelu(gate.half().float(), approximate="tanh").half().float() * up


def logits_over(model: Transformer, prompt: Sequence[int], reply: Sequence[int]) -> Tensor:
    return whole(model, torch.tensor([[*prompt, *reply]]))[0, len(prompt) - 1 : -1]


def passes(model: Transformer, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]) -> Tensor:
    return torch.cat([logits_over(model, *one) for one in zip(prompts, replies, strict=True)])


def agreement(logits: Tensor, chosen: Tensor) -> tuple[int, float]:
    """Return the number of tokens equal to our greedy ones, and how far the worst other one lies below, in deviations.

    logits [steps, vocabulary], chosen [steps].
    """
    below = logits.max(1).values - logits.gather(1, chosen[:, None]).squeeze(1)
    return int((below == 0).sum()), float((below / logits.std(1)).max())


def texts(tokenizer: Tokenizer) -> list[str]:
    """Return pieces of the held-out text and inputs on which tokenizers differ."""
    text = held_out_text()
    pieces = [text[start : start + 200] for start in range(0, PROMPTS * 200, 400)]
    return [*pieces, "Grüße 1,024 — naïve\n\n\t x  y", "DON'T I'm we've", "日本語 🙂🚀 3.14159", " " * 7 + "a"]


def check(program: str, name: str, folder: Path, to: str, work: Path) -> bool:
    """Export a model, serve it, and compare its replies and its tokenization with ours."""
    module, variant = find_export_target(to)
    request = ExportRequest(Source(name, folder), open_model_folder(folder), work / "a.gguf", variant, True, True)
    opened = open_model_folder(module.export(request, silent).path)
    tokenizer, model = opened.tokenizer(), load_model(opened, CPU).model
    assert isinstance(model, Transformer)
    ids = tokenizer.encode(held_out_text()[: PROMPTS * PROMPT * 8], add_special=False)
    prompts = [ids[start : start + PROMPT] for start in range(0, PROMPTS * PROMPT, PROMPT)]
    cut = 0
    with serving(program, work / "a.gguf") as address:
        replies = [theirs(address, prompt) for prompt in prompts]
        for text in texts(tokenizer):
            found = ask(address, "/tokenize", content=text, add_special=False)["tokens"]
            cut += found != tokenizer.encode(text, add_special=False)
    with patch.object(Mlp, "_activate", gates_of_llama_cpp) if name == GATED else nullcontext():
        logits = passes(model, prompts, replies)
    chosen = torch.tensor([token for reply in replies for token in reply])
    same, worst = agreement(logits, chosen)
    said = f"{name} as {to}: {same} of {len(chosen)} greedy tokens are ours, the others at most {worst:.4f} below"
    if worst > TIE and opened.packings:
        decoded = ExportRequest(Source(name, folder), opened, work / "b.gguf", "f32", True, True)
        with serving(program, module.export(decoded, silent).path) as address:
            exact = [theirs(address, prompt) for prompt in prompts]
        chosen_exact = torch.tensor([token for reply in exact for token in reply])
        count, furthest = agreement(passes(model, prompts, exact), chosen_exact)
        said += f" (the same weights as F32: {count} of {len(chosen_exact)} and {furthest:.4f}"
        round_inputs(model, 256 if to.endswith("_k") else 32)
        rounded = passes(model, prompts, replies).argmax(1)
        said += "; rounded inputs alone: {} and {:.4f})".format(*agreement(logits, rounded))
        worst = furthest
    ok = worst <= TIE and not cut and len(chosen) > PROMPTS * REPLY // 2
    cuts = f"{cut} of {len(texts(tokenizer))} texts cut otherwise"
    print(f"{said}; {cuts}: {'ok' if ok else 'FAILED'}", flush=True)
    return ok


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", default=os.environ.get("LLAMA_SERVER"))
    parser.add_argument("--to", nargs="*", default=["gguf", "gguf:q8_0", "gguf:q4_0", "gguf:q4_k"])
    parser.add_argument("--cases", nargs="*", help="cases of tests.support.gguf_exports, as gguf:f32, instead; or all")
    given = parser.parse_args()
    if not given.llama_server or not Path(given.llama_server).exists():
        print("skipped: no llama-server (give --llama-server or set LLAMA_SERVER)")
        return
    failed = False
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for case in (*NAMES, *MULTIMODAL_NAMES) if given.cases == ["all"] else given.cases or ():
            try:
                make_exported(work / case, case, **({"intermediate_size": 4096} if case == GATED else {}))
                failed |= not check(given.llama_server, case, work / case, "gguf:f32", work)
            except (OSError, UserError) as error:
                print(f"{case} as gguf:f32: FAILED: {type(error).__name__}: {error}", flush=True)
                failed = True
        if given.cases is not None:
            raise SystemExit(failed)
        folders = {"pico": PICO, **{family: random_folder(work / family, family) for family in FAMILIES}}
        for model, folder in folders.items():
            for to in given.to:
                failed |= not check(given.llama_server, model, folder, to, work)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
