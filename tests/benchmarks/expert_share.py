"""Measures which share of the memory bandwidth decoding a random MoE model reaches.

    python -m tests.benchmarks.expert_share [--layers 16] [--hidden 1536] [--experts 64] [--size 768] [--rounds 14]

A round reads memory with all threads, then decodes 24 tokens: bytes of a step over their median time, divided by the
bandwidth of the same round. Weights are random, int4 in groups of 128; the default shape has 3.7 B parameters, of which
0.55 B are active for a token, and takes 2 GB.
"""

import argparse
import statistics
import time

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import compile_passes
from mycli.runtime.kernels.cpu.matmul import memory_bandwidth
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.ceiling import bytes_per_step
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.random_packed import PACKING, mixture_fields, random_model
from tests.support.waiting_threads import wait_as_the_command_does

PROMPT, TOKENS = 8, 24


def main() -> None:
    """Print the share of each round and the median."""
    wait_as_the_command_does()
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 16), ("hidden", 1536), ("experts", 64), ("size", 768), ("rounds", 14)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    fields = mixture_fields(asked.layers, asked.hidden, asked.experts, asked.size)
    config = parse_config(Fields(fields, "a random shape"))
    model = random_model(config)
    runner = ModelRunner(model, passes=compile_passes(model))
    plan = MemoryPlan(config, {spec.name: PACKING for spec in config.linears()}, context=512)
    nbytes = bytes_per_step(plan, PROMPT)
    cache = runner.make_cache(CacheShape.contiguous(512))
    shares = []
    for turn in range(asked.rounds):
        rate = memory_bandwidth(1 << 28, 3)
        if rate is None:
            raise SystemExit("there is no native code here")
        runner.run([Chunk(list(range(PROMPT)), 0, (0,), 1)], cache)
        times = []
        for place in range(PROMPT, PROMPT + TOKENS):
            began = time.perf_counter()
            runner.run([Chunk([(place * 7919 + turn) % config.vocab_size], place, (0,), 1)], cache)
            times.append(time.perf_counter() - began)
        shares.append(nbytes / statistics.median(times) / rate)
    print(f"{nbytes / 1e6:.0f} MB a token at {statistics.median(shares):.2f} of the memory's rate")
    print("rounds", " ".join(f"{share:.2f}" for share in shares))


if __name__ == "__main__":
    main()
