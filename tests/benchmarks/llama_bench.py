"""Compares prompt and decode rates with llama.cpp's on the same cores in alternating runs.

    PYTHONPATH=.links python -m tests.benchmarks.llama_bench MODEL GGUF [--llama-bench PATH]
        [--rounds 5] [--prefix WORDS] [--busy N]

The path of llama-bench may also be set in $LLAMA_BENCH; without it only mycli is measured, with a message. Each round
runs both programs once, one after the other, so that load from other processes affects both; a figure is the median
over the rounds, a ratio is computed within each round. docs/cpu.md has the results and how the models were made.

With --busy each round runs twice, without and with N compute-bound processes of the same priority: prints also the
share of its rate that each program retains.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Pair = tuple[float, float]  # tokens per second: llama.cpp's, ours


def _run(command: Sequence[str]) -> Any:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def peer_rates(program: str, gguf: str, threads: int, prompt: int, generate: int, prefix: Sequence[str]) -> list[float]:
    sizes = ["-p", str(prompt), "-n", str(generate), "-t", str(threads), "-r", "1"]
    return [float(row["avg_ts"]) for row in _run([*prefix, program, "-m", gguf, *sizes, "-o", "json"])]


def our_rates(model: str, prompt: int, generate: int, prefix: Sequence[str]) -> list[float]:
    sizes = ["-p", str(prompt), "-n", str(generate), "-r", "1", "--device", "cpu"]
    found = _run([*prefix, sys.executable, "-m", "mycli.cli", "bench", model, *sizes, "-o", "json", "-q"])
    return [float(row["tokens_per_second"]) for row in found["results"]]


@contextmanager
def busy(processes: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _report(name: str, alone: Sequence[Pair], beside: Sequence[Pair]) -> None:
    """Print the medians of one test, llama.cpp's and ours of each round; `beside` may be empty."""
    for where, pairs in (("", alone), (" beside the busy", beside)):
        if pairs:
            them, us = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
            ratio = statistics.median(ours / peer for peer, ours in pairs)
            print(f"{name}{where}: mycli {us:.1f}, llama.cpp {them:.1f} tokens/s, ratio {ratio:.2f}")
    if beside:
        them, us = (
            statistics.median(second[side] / first[side] for first, second in zip(alone, beside, strict=True))
            for side in (0, 1)
        )
        print(f"{name} kept beside the busy: mycli {us:.0%}, llama.cpp {them:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("gguf")
    parser.add_argument("--llama-bench", default=os.environ.get("LLAMA_BENCH"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside, in half of the runs")
    parser.add_argument("--prefix", type=shlex.split, default=[], help="put before both commands")
    given = parser.parse_args()
    if not given.llama_bench:
        print("skipped: no llama-bench (give --llama-bench or set LLAMA_BENCH)")
        return
    sizes = given.prompt, given.generate
    found: dict[int, list[list[Pair]]] = {0: [], given.busy: []}
    for index in range(given.rounds):
        for processes, rounds in found.items():
            with busy(processes):
                peer = peer_rates(given.llama_bench, given.gguf, given.threads, *sizes, given.prefix)
                ours = our_rates(given.model, *sizes, given.prefix)
            rounds.append(list(zip(peer, ours, strict=True)))
            shown = "   ".join(f"{o:.1f} / {p:.1f}" for p, o in rounds[-1])
            print(f"round {index + 1}{f', beside {processes}' * bool(processes)}: {shown}")
    for test, name in enumerate((f"pp{given.prompt}", f"tg{given.generate}")):
        alone, beside = ([pairs[test] for pairs in found[processes]] for processes in (0, given.busy))
        _report(name, alone, beside if given.busy else [])


if __name__ == "__main__":
    main()
