"""Compares passes of few rows where layers run in one native call with the same passes step by step.

    python -m tests.benchmarks.native_parts MODEL [--rows 1,4,16,64] [--seconds 5]

Both alternate in one process with the same caches; prints medians. Also checks that the logits are bit-identical.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.passes import Passes
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.memory.cache_shape import CacheShape
from tests.support.waiting_threads import wait_as_the_command_does

LENGTH = 128  # tokens already in the cache


def main() -> None:
    """Print a line for each number of rows; each row is a separate sequence."""
    wait_as_the_command_does()
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--seconds", type=float, default=5.0)
    chosen = parser.parse_args()
    runner = load_model(open_model_folder(chosen.model), Placement(torch.device("cpu"), torch.bfloat16))
    passes, plain = runner.passes, Passes((PlainPass(runner.model),), {})
    for rows in map(int, chosen.rows.split(",")):
        cache = runner.make_cache(CacheShape.contiguous(LENGTH + 1, rows))
        runner.run([Chunk(list(range(LENGTH)), 0, (block,), 0) for block in range(rows)], cache)
        chunks = [Chunk([block], LENGTH, (block,), 1) for block in range(rows)]
        times: dict[str, list[float]] = {"whole": [], "by steps": []}
        logits = {}
        began = time.perf_counter()
        while time.perf_counter() - began < chosen.seconds:
            for way, seconds in times.items():
                runner.passes = passes if way == "whole" else plain
                start = time.perf_counter()
                logits[way] = runner.run(chunks, cache)
                seconds.append(time.perf_counter() - start)
        assert torch.equal(*logits.values())
        whole, stepwise = (1e3 * statistics.median(seconds[1:]) for seconds in times.values())
        print(f"{rows} rows: {whole:.2f} ms whole, {stepwise:.2f} by steps: {stepwise / whole:.2f} times as fast")


if __name__ == "__main__":
    main()
