"""How long quantizing takes, and how much memory, on a random model of a real one's shape.

    PYTHONPATH=.links python -m tests.peers.throughput [--layers 2] [--samples 128] [--seq 512]

The shape is that of Qwen2.5-0.5B (hidden 896, MLP 4864, 14 heads, 2 of them for keys and values), the vocabulary small.
Prints seconds for each layer, which do not grow with depth, and the peak of the resident set beyond the start.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from mycli.quant.blockwise import Solver, quantize_blocks
from mycli.quant.recipe import Recipe
from mycli.quant.resume import Solved
from mycli.quant.streaming import StreamedModel
from mycli.runtime.config import load_config
from mycli.runtime.device import Placement

SHAPE = {
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq", type=int, default=512)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": options.layers}))
        config = load_config(folder)
        tensors = {
            name: (torch.randn(shape, generator=generator) * 0.02 + (name.endswith("norm.weight"))).bfloat16()
            for name, shape in config.tensors()
        }
        save_file(tensors, folder / "model.safetensors")
        del tensors
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        windows = torch.randint(0, config.vocab_size, (options.samples, options.seq), generator=generator)
        started, seconds = [time.monotonic()], []

        def sink(_: Solved) -> None:
            seconds.append(time.monotonic() - started[-1])
            started.append(time.monotonic())
            print(f"layer {len(seconds) - 1}: {seconds[-1]:.1f} s", flush=True)

        model = StreamedModel(folder, Placement(torch.device("cpu"), torch.float32))
        processor = time.process_time()
        quantize_blocks(model, Recipe().packings(config), Solver("gptq", torch.bfloat16, "mse"), windows, sink)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"{options.samples} x {options.seq} tokens, {torch.get_num_threads()} threads:"
            f" {sum(seconds) / len(seconds):.1f} s per layer"
            f" ({(time.process_time() - processor) / len(seconds):.1f} s of processor time),"
            f" peak {peak / 2**20:.2f} GiB, {(peak - before) / 2**20:.2f} GiB of it for this"
        )


if __name__ == "__main__":
    main()
