"""Measure times other than tokens: quantizing an 8B model, a new process, transformers' bf16 decoding."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from mycli.runtime.device.placement import Placement
from mycli.runtime.models.config import ModelConfig
from tests.benchmarks.throughput import LLAMA_8B, layer_seconds
from tests.gpu.bench.report import Case, NotInstalled, Row
from tests.gpu.bench.shapes import tiny
from tests.gpu.bench.timing import Context

TINY = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS = 2  # measured; each remaining layer of the model is assumed to take as long


def quantization(context: Context) -> Iterator[Case]:
    """Measure GPTQ of Llama-3.1-8B's shapes on 128 x 2048 tokens, extrapolated from two layers."""
    yield Case("GPTQ", 60, lambda: _quantization(context))


def _quantization(context: Context) -> list[Row]:
    shape = LLAMA_8B | {"vocab_size": 8192} | (TINY if context.tiny else {})
    samples, seq = (2, 16) if context.tiny else (128, 2048)
    placement = Placement(context.device, torch.float32)
    layer_seconds(shape, 1, 2, 16, placement)  # kernels are compiled
    seconds = layer_seconds(shape, LAYERS, samples, seq, placement)
    whole = statistics.mean(seconds) * 32
    return [{"tokens": f"{samples} x {seq}", "s a layer": seconds[-1], "s for 32 layers": whole, "samples": seconds}]


def cold_start(context: Context) -> Iterator[Case]:
    """Measure new processes: the interpreter with torch, and the first token of the bundled model."""
    yield Case("run pico", 30, lambda: _cold_start(context))


def _cold_start(context: Context) -> list[Row]:
    torch_alone = "import torch" + ("; torch.zeros(1, device='cuda')" if context.cuda else "")
    run = ["-m", "mycli.cli", "run", "pico", "Once", "-n", "1", "--device", context.device.type]
    rows: list[Row] = []
    for name, arguments in (("import torch, device ready", ["-c", torch_alone]), ("run pico -n 1", run)):
        samples = [_seconds([sys.executable, *arguments]) for _ in range(context.rounds)]
        rows.append({"process": name, "s": statistics.median(samples), "samples": samples})
    return rows


def _seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=dict(os.environ))
    return time.perf_counter() - began


def transformers(context: Context, config: ModelConfig) -> Iterator[Case]:
    """Measure greedy tokens per second of transformers' eager bf16 model of the same shapes, with random weights."""
    yield Case("generate", 40, lambda: _transformers(context, tiny(config) if context.tiny else config))


def _transformers(context: Context, config: ModelConfig) -> list[Row]:
    if find_spec("transformers") is None:
        raise NotInstalled("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        eos_token_id=None,
        dtype=torch.bfloat16,
    )
    with context.device:
        model = LlamaForCausalLM(theirs).bfloat16().eval()
    prompt = torch.randint(0, config.vocab_size, (1, 8), device=context.device)
    new, samples = 8 if context.tiny else 128, []
    for _ in range(2 if context.tiny else 3):
        context.synchronize()
        began = time.perf_counter()
        made = model.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        context.synchronize()
        samples.append((made.shape[1] - prompt.shape[1]) / (time.perf_counter() - began))
    rates = samples[1:]  # the first one warms up
    return [{"test": f"tg{new}", "tokens/s": statistics.median(rates), "samples": rates}]
