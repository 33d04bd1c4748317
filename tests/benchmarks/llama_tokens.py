"""llama-server reads GGUF files that we exported and says what we say: pico, and random models of three families.

    PYTHONPATH=.links python -m tests.benchmarks.llama_tokens --llama-server PATH [--to gguf:q8_0 ...]

Each model is written as a GGUF file and served by llama-server; it continues 20 prompts greedily, of which half are
also sent as text, to see that both cut it into the same tokens. llama.cpp keeps keys and values in fp16 and sums in
another order, so that two tokens that are equally likely may change places: each of its tokens must be ours, or within
`TIE` of the spread of our logits below ours, in our own pass over its reply. Where weights are quantized llama.cpp also
rounds their inputs to 8 bits (Q8_0 in blocks of 32, Q8_K of 256). How far that moves the logits of each step, a second
pass of ours says, which rounds so too; by as much more a token may lie below. The path may stand in $LLAMA_SERVER too.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from mycli.quant.evaluate import held_out_text
from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.progress import silent
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.engine.loader import load_model
from mycli.runtime.hub.resolve import Source
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.quantization.packed_weight import Matmul
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.engines import whole
from tests.support.families import make
from tests.support.models import CPU
from tests.support.paths import PICO

TIE = 0.02  # of the standard deviation of a step's logits
BLOCKS = {"gguf:q8_0": 32, "gguf:q4_0": 32, "gguf:q4_k": 256}  # of inputs that share a scale
PROMPTS, PROMPT, REPLY = 20, 24, 24
WAIT = 120  # seconds for the server to be there
_SIZE = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
_SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
FAMILIES = {"qwen3": {"head_dim": 64}, "olmo2": {"eos_token_id": 2, "pad_token_id": 1}, "qwen2": {}}


def random_folder(folder: Path, family: str) -> Path:
    """A random model with the vocabulary of pico."""
    make(folder, family, {**_SIZE, **FAMILIES[family]})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, folder / name)
    return folder


@contextmanager
def serving(program: str, file: Path) -> Iterator[str]:
    """llama-server with the model of `file`; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["-t", "1", "-c", "256", "--parallel", "1", "--no-warmup", "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([program, "-m", str(file), *options], stdout=said, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            _await(address, process)
            yield address
        except Exception:
            said.seek(0)
            print(said.read()[-3000:].decode("utf-8", "replace"))
            raise
        finally:
            process.kill()
            process.wait()


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
    """One request."""
    request = urllib.request.Request(
        f"{address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        return json.load(answer)


def theirs(address: str, prompt: Sequence[int]) -> list[int]:
    """The greedy continuation of token ids."""
    sampling = {"temperature": 0, "n_predict": REPLY, "ignore_eos": True, "cache_prompt": False, "return_tokens": True}
    tokens: list[int] = ask(address, "/completion", prompt=list(prompt), samplers=["temperature"], **sampling)["tokens"]
    return tokens


class RoundedInputs:
    """A product whose inputs are rounded as llama.cpp rounds them for quantized weights: 8 bits, blocks of `block`.

    Scales of Q8_0 are fp16, those of Q8_K fp32.
    """

    def __init__(self, inner: Matmul, block: int) -> None:
        self._inner, self._block = inner, block

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        blocks = x.float().view(x.shape[0], -1, self._block)
        scales = blocks.abs().amax(-1, keepdim=True) / 127
        codes = (blocks / scales.clamp(min=1e-30)).round()
        return self._inner((codes * (scales.half().float() if self._block == 32 else scales)).view_as(x))

    def dequantize(self) -> Tensor:
        return self._inner.dequantize()


def load(opened: ModelFolder) -> Transformer:
    """The model, in fp32."""
    model = load_model(opened, CPU).model
    assert isinstance(model, Transformer)
    return model


def as_there(opened: ModelFolder, file: Path, block: int) -> Transformer:
    """The model as llama.cpp computes it: inputs rounded in blocks of `block`, of the head's in those of 32.

    Its embedding, and a tied head, are what the file says; here they are dense, in bf16.
    """
    model = load(opened)
    stored = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "token_embd.weight")
    model.embedding = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
    if opened.config.tie_embeddings:
        model.head.replace(model.embedding)
    for linear in model.modules():
        if isinstance(linear, Linear):
            assert linear.matmul is not None, "all of one type"
            linear.replace(RoundedInputs(linear.matmul, 32 if linear is model.head else block))
    return model


def logits_over(model: Transformer, prompt: Sequence[int], reply: Sequence[int]) -> Tensor:
    """fp32 [reply, vocabulary]: what the model says before each token of the reply."""
    return whole(model, torch.tensor([[*prompt, *reply]]))[0, len(prompt) - 1 : -1].float()


def behind(logits: Tensor, reply: Sequence[int]) -> Tensor:
    """How far each token of a reply lies below the likeliest, fp32 [reply]."""
    return logits.max(1).values - logits.gather(1, torch.tensor(reply)[:, None]).squeeze(1)


def agreement(model: Transformer, prompt: Sequence[int], reply: Sequence[int]) -> tuple[int, float]:
    """How many tokens are our greedy ones, and how far below ours the worst of the others lies, in deviations."""
    logits = logits_over(model, prompt, reply)
    below = behind(logits, reply)
    return int((below == 0).sum()), float((below / logits.std(1)).max())


def texts(tokenizer: Tokenizer) -> list[str]:
    """Pieces of the held-out text, and what tokenizers differ in."""
    text = held_out_text()
    pieces = [text[start : start + 200] for start in range(0, PROMPTS * 200, 400)]
    return [*pieces, "Grüße 1,024 — naïve\n\n\t x  y", "DON'T I'm we've", "日本語 🙂🚀 3.14159", " " * 7 + "a"]


def check(program: str, name: str, folder: Path, to: str, work: Path) -> bool:
    """Export a model, serve it, and hold its replies and its tokens against ours."""
    module, variant = find_export_target(to)
    request = ExportRequest(Source(name, folder), ModelFolder.open(folder), work / "a.gguf", variant, True, True)
    opened = ModelFolder.open(module.export(request, silent).path)
    tokenizer, model = opened.tokenizer(), load(opened)
    rounding = as_there(opened, work / "a.gguf", BLOCKS[to]) if to in BLOCKS else None
    ids = tokenizer.encode(held_out_text()[: PROMPTS * PROMPT * 8], add_special=False)
    prompts = [ids[start : start + PROMPT] for start in range(0, PROMPTS * PROMPT, PROMPT)]
    with serving(program, work / "a.gguf") as address:
        replies = [theirs(address, prompt) for prompt in prompts]
        found = [ask(address, "/tokenize", content=text, add_special=False)["tokens"] for text in texts(tokenizer)]
    cut = sum(
        one != tokenizer.encode(text, add_special=False) for one, text in zip(found, texts(tokenizer), strict=True)
    )
    same, worst, share = 0, 0.0, 0.0
    for prompt, reply in zip(prompts, replies, strict=True):
        logits = logits_over(model, prompt, reply)
        below, spread = behind(logits, reply), logits.std(1)
        allowed = TIE * spread
        if rounding is not None:  # two tokens may each move by as much, towards each other
            allowed += 2 * (logits_over(rounding, prompt, reply) - logits).abs().amax(1)
        same += int((below == 0).sum())
        worst, share = max(worst, float((below / spread).max())), max(share, float((below / allowed).max()))
    ok = share <= 1 and not cut
    verdict = "ok" if ok else "FAILED"
    print(
        f"{name} as {to}: {same} of {PROMPTS * REPLY} greedy tokens are ours, the others at most {worst:.4f} deviations"
        f" below, {share:.2f} of what is allowed; {cut} of {len(found)} texts cut otherwise: {verdict}",
        flush=True,
    )
    return ok


def main() -> None:
    """One line a model and type; a failure ends the program with 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", default=os.environ.get("LLAMA_SERVER"))
    parser.add_argument("--to", nargs="*", default=["gguf", *BLOCKS])
    given = parser.parse_args()
    if not given.llama_server or not Path(given.llama_server).exists():
        print("skipped: no llama-server (give --llama-server or set LLAMA_SERVER)")
        return
    failed = False
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        folders = {"pico": PICO, **{family: random_folder(work / family, family) for family in FAMILIES}}
        for model, folder in folders.items():
            for to in given.to:
                failed |= not check(given.llama_server, model, folder, to, work)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
