"""Measures the time and memory of quantizing on a random model of a real model's shape.

    PYTHONPATH=.links python -m tests.benchmarks.throughput [--layers 2] [--samples 128] [--seq 512]

The shape is that of Qwen2.5-0.5B (hidden 896, MLP 4864, 14 heads, 2 KV heads) with a small vocabulary. Prints the
seconds for each layer, which do not grow with depth, and the peak resident set size beyond the start. With `--rates 250
250 20` nothing is run: the time of an 8 B model is estimated from operation counts and the rates that a GPU may reach.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.output.work_folder import Solved
from mycli.quant.recipe import Recipe
from mycli.quant.solving.blockwise import BlockSolver, OriginalBlocks, quantize_blocks
from mycli.quant.solving.linear_solver import LinearSolver
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.models import CPU

SHAPE: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
LLAMA_8B: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def estimated_seconds(
    config: ModelConfig, tokens: int, forward: float, moments: float, factor: float
) -> dict[str, float]:
    """Return the seconds of the parts of quantizing a model, from operation counts and rates in FLOP/s for each part.

    Two models run through every block: the original once, the quantized one with its qkv and gate_up twice (see
    `observe`). Moments are two [K, K] sums per input. Factoring is two Cholesky factors of K^3 / 3, two triangular
    solves of K^3 and the inverse of K^3 / 3; the columns take N K^2 for their corrections and 2 N K^2 for each of two
    sweeps and the refit.
    """
    flops = dict.fromkeys(("forwards", "moments", "factors", "columns"), 0.0)
    for name, group in config.layer(0).products().items():
        inputs, rows = group[0].in_features, sum(each.out_features for each in group)
        passes = 3 if name in ("qkv", "gate_up") else 2
        flops["forwards"] += passes * 2 * tokens * inputs * rows
        flops["moments"] += 2 * 2 * tokens * inputs**2
        flops["factors"] += 2 * (2 * inputs**3 / 3 + 2 * inputs**3 + inputs**3 / 3)
        flops["columns"] += 2 * (1 + 3 * 2) * rows * inputs**2 / 2
    rates = {"forwards": forward, "moments": moments, "factors": factor, "columns": factor}
    return {part: config.layers * count / rates[part] for part, count in flops.items()}


def layer_seconds(
    shape: Mapping[str, object], layers: int, samples: int, seq: int, placement: Placement
) -> list[float]:
    """Return the seconds for each block of a random bf16 model with GPTQ at 4 bits in groups of 128.

    Calibrates on samples x seq tokens. `shape`: the fields of a config.json except num_hidden_layers. The model is
    written first, and read block by block.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": layers}))
        config, device = open_model_folder(folder).config, placement.device
        tensors = {
            name: (torch.randn(shape, device=device) * 0.02 + (name.endswith("norm.weight"))).bfloat16().cpu()
            for name, shape in config.tensors()
        }
        save_file(tensors, folder / "model.safetensors")
        del tensors
        windows = torch.randint(0, config.vocab_size, (samples, seq))
        model, times = StreamedModel(open_model_folder(folder), placement), [time.monotonic()]

        def sink(_: Solved) -> None:  # called when the block is in host memory
            times.append(time.monotonic())

        solver = LinearSolver("gptq", torch.bfloat16, "mse")
        quantize_blocks(BlockSolver(OriginalBlocks(model, windows), Recipe().packings(config), solver), sink)
        return [after - before for before, after in pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument(
        "--rates", type=float, nargs=3, metavar="TFLOPS", help="forward, moments, factors: estimate an 8 B"
    )
    options = parser.parse_args()
    if options.rates:
        large = parse_config(Fields(LLAMA_8B, "Llama-3.1-8B"))
        parts = estimated_seconds(large, options.samples * options.seq, *(1e12 * rate for rate in options.rates))
        for part, seconds in parts.items():
            print(f"{part}: {seconds:.1f} s")
        print(f"8 B, {options.samples} x {options.seq} tokens: {sum(parts.values()):.0f} s of arithmetic")
        return
    before, processor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    seconds = layer_seconds(SHAPE, options.layers, options.samples, options.seq, CPU)
    for index, took in enumerate(seconds):
        print(f"layer {index}: {took:.1f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{options.samples} x {options.seq} tokens, {torch.get_num_threads()} threads:"
        f" {sum(seconds) / len(seconds):.1f} s per layer"
        f" ({(time.process_time() - processor) / len(seconds):.1f} s of processor time),"
        f" peak {peak / 2**20:.2f} GiB, {(peak - before) / 2**20:.2f} GiB of it since the start"
    )


if __name__ == "__main__":
    main()
