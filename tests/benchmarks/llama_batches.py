"""Compares batched decoding with llama-batched-bench on the same cores: total tokens/s of concurrent sequences.

    PYTHONPATH=.links python -m tests.benchmarks.llama_batches MODEL GGUF [--llama-batched-bench PATH]
        [--sequences 4,8,16,32,64] [--prompt 128] [--generate 32] [--rounds 3] [--prefix WORDS] [--activations 8]

The path may also be set in $LLAMA_BATCHED_BENCH; without it only mycli is measured, with a message. Every round runs
both programs once for each number of sequences, one after the other; a figure is the median over the rounds, a ratio is
computed within each round. MYCLI_CPU_ISA selects our instructions; compare with a llama.cpp built for the same set. One
token of each sequence is one pass of the model, without sampling on either side. llama.cpp reads a prompt that its
sequences share; mycli attends to a cache of the same length that was not filled by a prompt.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.quantization.activations import Activations


def decode_rate(runner: ModelRunner, sequences: int, prompt: int, generate: int) -> float:
    cache = runner.make_cache(CacheShape.contiguous(prompt + generate + 1, sequences))

    def step(position: int) -> None:
        runner.run([Chunk([1 + block], position, (block,), 1) for block in range(sequences)], cache)

    step(prompt)  # the first access to a memory page is slower
    start = time.perf_counter()
    for position in range(prompt, prompt + generate):
        step(position)
    return sequences * generate / (time.perf_counter() - start)


def our_rates(
    model: str, sizes: tuple[int, int], sequences: Sequence[int], prefix: Sequence[str], activations: Activations
) -> list[float]:
    command = [*prefix, sys.executable, "-m", "tests.benchmarks.llama_batches", model, "--ours"]
    options = ["--sequences", ",".join(map(str, sequences)), "--prompt", str(sizes[0]), "--generate", str(sizes[1])]
    options += ["--activations", activations]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    return [float(line) for line in done.stdout.split()]


def peer_rates(
    program: str, gguf: str, sizes: tuple[int, int], sequences: Sequence[int], prefix: Sequence[str]
) -> list[float]:
    context = sizes[0] + max(sequences) * (sizes[1] + 1)
    shape = ["-npp", str(sizes[0]), "-ntg", str(sizes[1]), "-npl", ",".join(map(str, sequences)), "-pps"]
    options = ["-c", str(context), "-t", str(len(os.sched_getaffinity(0))), "--output-format", "jsonl"]
    command = [*prefix, program, "-m", gguf, *shape, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [float(row["speed_tg"]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("gguf", nargs="?")
    parser.add_argument("--llama-batched-bench", default=os.environ.get("LLAMA_BATCHED_BENCH"))
    parser.add_argument(
        "--sequences", type=lambda text: [int(one) for one in text.split(",")], default=[4, 8, 16, 32, 64]
    )
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefix", type=shlex.split, default=[], help="put before both commands")
    parser.add_argument("--activations", choices=get_args(Activations), default="auto", help="of mycli")
    parser.add_argument("--ours", action="store_true", help="measure ours alone, in this process")
    given = parser.parse_args()
    sizes = given.prompt, given.generate
    if given.ours:
        place = Placement(torch.device("cpu"), torch.bfloat16, activations=given.activations)
        runner = load_model(open_model_folder(Path(given.model)), place)
        for sequences in given.sequences:
            print(decode_rate(runner, sequences, *sizes), flush=True)
        return
    if not given.llama_batched_bench or not given.gguf:
        print("skipped: no llama-batched-bench and its model (see --help)")
        return
    found: dict[int, list[tuple[float, float]]] = {sequences: [] for sequences in given.sequences}
    for index in range(given.rounds):
        for sequences, pairs in found.items():
            (peer,) = peer_rates(given.llama_batched_bench, given.gguf, sizes, [sequences], given.prefix)
            (ours,) = our_rates(given.model, sizes, [sequences], given.prefix, given.activations)
            pairs.append((peer, ours))
            print(f"round {index + 1}, {sequences} sequences: {ours:.1f} / {peer:.1f}", flush=True)
    for sequences, pairs in found.items():
        peer, ours = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        ratio = statistics.median(mine / theirs for theirs, mine in pairs)
        print(f"{sequences} sequences: mycli {ours:.1f}, llama.cpp {peer:.1f} tokens/s together, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
