"""Times `mycli run pico hi -n 1` beyond importing torch: `python -m tests.benchmarks.first_text [--rounds 9]`.

Both are whole processes, run alternately with warm caches, so that a change of machine speed affects both. A figure is
the median over the rounds; the difference is computed within each round.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

TORCH = ("-c", "import torch")
RUN = ("-m", "mycli.cli", "run", "pico", "hi", "-n", "1", "--device", "cpu")


def seconds(arguments: Sequence[str]) -> tuple[float, float]:
    """Return the seconds until Python, called with `arguments`, writes its first byte or exits, and until it exits."""
    began = time.perf_counter()
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - began
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return first, time.perf_counter() - began


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    seconds(TORCH), seconds(RUN)
    pairs = [(seconds(TORCH)[1], *seconds(RUN)) for _ in range(rounds)]
    torch, first, whole = (statistics.median(pair[index] for pair in pairs) for index in range(3))
    beside = statistics.median(whole - torch for torch, _, whole in pairs)
    print(
        f"import torch {torch:.2f} s; first text after {first:.2f} s, "
        f"end after {whole:.2f} s: {beside:.2f} s beside torch"
    )


if __name__ == "__main__":
    main()
