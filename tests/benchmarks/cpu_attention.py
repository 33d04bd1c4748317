"""Compares native CPU attention with torch's for prefill and decode, for each instruction set in turn.

    python -m tests.benchmarks.cpu_attention [--sets amx,avx512,avx2] [--head-dim 128] [--lengths 512,4k,16k]

Each set runs in a process of its own, in which torch and its libraries are limited to that set too. Without AMX, the
best set of the processor runs instead of `amx`, and its rows have that set's name; other sets that the processor lacks
are left out. A prompt is a chunk of 512 tokens at the end of the context; a decode step is one token. torch is timed
with the faster of its grouped products and of keys repeated for every head (the repetition is not timed), and with a
mask where one is needed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch.nn import functional

from mycli.cli.flags.options import parse_count
from mycli.runtime.cache.kv_cache import PACKED, Stored
from mycli.runtime.device.system import cpu
from mycli.runtime.kernels.cpu import attention
from mycli.runtime.kernels.cpu.library import build, isa
from mycli.runtime.kernels.paged import Ragged, Scoring

# By instruction set: the flags left out of our compilation, and the variables that limit torch, oneDNN and MKL to it.
SETS = {
    "amx": ((), {}),
    "avx512": (
        ("-mno-amx-tile", "-mno-avx512bf16"),
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1"},
    ),
    "avx2": (
        ("-mno-avx512f", "-mno-avxvnni"),
        {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    ),
}
BEST = "amx"  # nothing is left out of it
CHUNK = 512
HEADS, KV_HEADS = 32, 8


def runnable(name: str, flags: Collection[str]) -> str | None:
    """Return the instruction set that `name` runs on a processor with these flags, None if it lacks the set."""
    if name == BEST:
        return isa.best_set(flags)
    return name if isa.SETS[name].on(flags) else None


def medians(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the median seconds of each call, run alternately for about `seconds`, without the first round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(times[next(iter(times))]) < 4:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def contest(tokens: int, length: int, head_dim: int, dtype: torch.dtype, seconds: float) -> dict[str, float]:
    """Return the seconds of native attention (cache in `dtype`, int8 and int4) and of torch's variants."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(tokens, HEADS, head_dim, generator=generator).to(dtype)
    shape = (1, KV_HEADS, length, head_dim)
    keys, values = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    one_block = torch.tensor([0, tokens]).int(), torch.tensor([length]).int(), torch.tensor([[0]]).int()
    ragged, scoring = Ragged(*one_block), Scoring(head_dim**-0.5)
    causal, mask = tokens == length, None
    if 1 < tokens < length:
        mask = torch.arange(length) <= torch.arange(length - tokens, length).unsqueeze(1)
    turned, key, value = query.transpose(0, 1).unsqueeze(0), keys.to(dtype), values.to(dtype)
    grouped = query.view(1, KV_HEADS, -1, head_dim) if tokens == 1 else turned
    wide_key, wide_value = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (key, value))
    sdpa = functional.scaled_dot_product_attention

    def ours(kind: torch.dtype) -> Callable[[], object]:
        held = (Stored.of(keys, kind), Stored.of(values, kind))
        return lambda: attention.attend_paged(query, *held, ragged, scoring)

    gqa = tokens > 1
    return medians(
        {
            "ours": ours(dtype),
            "int8": ours(torch.int8),
            "int4": ours(PACKED),
            "grouped": lambda: sdpa(grouped, key, value, attn_mask=mask, is_causal=causal and gqa, enable_gqa=gqa),
            "repeated": lambda: sdpa(turned, wide_key, wide_value, attn_mask=mask, is_causal=causal and gqa),
        },
        seconds,
    )


def child(name: str, head_dim: int, lengths: list[int], seconds: float) -> None:
    """Measure one instruction set and print one line of JSON for each length."""
    flags = isa.compiler_flags(None, cpu()) if name == BEST else SETS[name][0]
    library = build.load_library(build.compile_library(build.cache_folder(), flags))
    build.native = lambda: library  # type: ignore[assignment]  # for the life of this process
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (CHUNK, 1):
            for length in lengths:
                found = contest(min(tokens, length), length, head_dim, dtype, seconds)
                print(json.dumps({"dtype": str(dtype)[6:], "tokens": tokens, "length": length, **found}), flush=True)


def main() -> None:
    """Measure every instruction set in turn and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--lengths", default="512,4k,16k")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each line")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    lengths = [parse_count(one) for one in asked.lengths.split(",")]
    if asked.child:
        torch.set_grad_enabled(False)
        child(asked.child, asked.head_dim, lengths, asked.seconds)
        return
    print(
        f"{HEADS}/{KV_HEADS} heads of {asked.head_dim}, {torch.get_num_threads()} threads; ms, and torch's best / ours"
    )
    for name in asked.sets.split(","):
        instructions = runnable(name, cpu().flags)
        if instructions is None:
            print(f"{name}: this processor does not have it")
            continue
        options = ["--child", name, "--head-dim", str(asked.head_dim), "--lengths", asked.lengths]
        command = [sys.executable, "-m", "tests.benchmarks.cpu_attention", *options, "--seconds", str(asked.seconds)]
        environment = {**os.environ, **SETS[name][1]}
        root = Path(__file__).parents[2]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=root) as process:
            assert process.stdout is not None
            for line in process.stdout:
                found = json.loads(line)
                best = min(found["grouped"], found["repeated"])
                flops = 4 * HEADS * asked.head_dim * found["tokens"] * (found["length"] - found["tokens"] / 2)
                shape = f"{instructions:10} {found['dtype']:9} {found['tokens']:4} tokens at {found['length']:6}"
                ours = "ours", "int8", "int4"
                times = " ".join(f"{key} {found[key] * 1e3:9.3f}" for key in (*ours, "grouped", "repeated"))
                ratio = ", ".join(f"{best / found[key]:.2f}x {key}" for key in ours)
                print(f"{shape}: {times} {ratio}, {flops / found['ours'] / 1e9:.0f} GFLOP/s", flush=True)


if __name__ == "__main__":
    main()
