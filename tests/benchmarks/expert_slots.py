"""Measures the cost of keeping only some experts in memory: `python -m tests.benchmarks.expert_slots [--tokens 20]`.

A random MoE model of 0.5 GB (6 layers, 32 experts with 4 active per token, int4 in groups of 128) is written to a
temporary folder, then run with ever fewer experts in memory. Prints tokens per second of single tokens, with the page
cache warm and dropped before each token, and of a prompt of 128. The hit rates are those of this random router.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.memory.cache_shape import CacheShape
from tests.support.packed_folder import write_packed

SHAPE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
PROMPT, BEGUN, ROOM = 128, 8, 1024


class Subject:
    """Runs the model of `folder` on one sequence, with `slots` experts of each layer in memory (None: all)."""

    def __init__(self, folder: Path, slots: int | None) -> None:
        self._runner = load_model(
            open_model_folder(folder), Placement(torch.device("cpu"), torch.bfloat16), expert_slots=slots
        )
        self._cache, self._random, self._place = (
            self._runner.make_cache(CacheShape.contiguous(ROOM)),
            random.Random(0),
            0,
        )
        self.seconds(BEGUN)

    def seconds(self, count: int) -> float:
        """Return the seconds of a pass over the next `count` tokens."""
        tokens = [self._random.randrange(int(str(SHAPE["vocab_size"]))) for _ in range(count)]
        began = time.perf_counter()
        self._runner.run([Chunk(tokens, self._place, (0,), 1)], self._cache)
        self._place += count
        return time.perf_counter() - began

    def rate(self, tokens: int, weights: int | None) -> str:
        """Describe single tokens per second and the hit rate; `weights`: drop their page cache before each token."""
        reads, times = self._runner.model.expert_reads, []
        before = None if reads is None else replace(reads)
        for _ in range(tokens):
            if weights is not None:
                os.posix_fadvise(weights, 0, 0, os.POSIX_FADV_DONTNEED)
            times.append(self.seconds(1))
        hits = "" if reads is None or before is None else f" ({reads.since(before).hit_rate:.0%})"
        return f"{1 / statistics.median(times):.0f}{hits}"


def main() -> None:
    """Print a line for each number of experts in memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20, help="of each kind")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = write_packed(Path(place) / "model", SHAPE, {"": 4}, group=128)
        weights = os.open(folder / "model.safetensors", os.O_RDONLY)
        print("experts held | tokens/s warm (hits) | cold (hits) | prompt of 128, tokens/s")
        for slots in (None, 24, 16, 8, 4):
            subject = Subject(folder, slots)
            subject.rate(asked.tokens, None)  # the page cache then holds everything that was read once
            warm, cold = subject.rate(asked.tokens, None), subject.rate(asked.tokens, weights)
            prompt = PROMPT / min(subject.seconds(PROMPT) for _ in range(3))
            print(" | ".join((str(slots or "all"), warm, "" if slots is None else cold, f"{prompt:.0f}")), flush=True)
        os.close(weights)


if __name__ == "__main__":
    main()
