"""Writes receipts of replies with portable bits, and makes the replies again on other sets of instructions.

    python -m tests.benchmarks.portable_receipts write FOLDER MODEL... [--tokens 10000]
    MYCLI_CPU_ISA=avx2 python -m tests.benchmarks.portable_receipts replay FOLDER
    python -m tests.benchmarks.portable_receipts replay FOLDER --variant emulated-amx

`write` asks each model for greedy and sampled replies by turns, with a cache in bf16, int8 and int4. `replay` returns 1
if a token differs. With PYTHONPATH=.links; `tests.support.arm_python` runs the same command for ARM.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build
from tests.support.command_line import run_here
from tests.support.native_code import VARIANTS, compiled

REPLY = 250  # tokens
KINDS = ("bf16", "int8", "int4")
PROMPTS = ("Once upon a time", "Tell me a story.", "What is 7 times 8?", "How old is Leo?", "The weather today is")


def write_receipts(folder: Path, models: Sequence[str], tokens: int, ends: Sequence[int]) -> int:
    """Write receipts of at least `tokens` tokens over all models, `ends` banned; return how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    written = index = 0
    bans = [word for end in ends for word in ("--logit-bias", f"{end}=-100")]
    while written < tokens:
        model = models[index % len(models)]
        number, path = index // len(models), folder / f"{index:03}.json"
        index += 1
        sampler = ("-t", "0") if number % 2 else ("-t", "0.9", "--seed", str(index))
        form = ("--raw",) if number % 3 else ()
        words = ("run", model, *form, PROMPTS[number % len(PROMPTS)], *sampler, "-n", str(REPLY))
        rest = ("--kv", KINDS[number % len(KINDS)], *bans, "--receipt", str(path), "--json")
        if not path.exists():  # an earlier call was interrupted
            done = run_here((*words, *rest, "--device", "cpu", "--portable-bits"), os.environ)
            if done.returncode:
                raise SystemExit(f"{model}: {done.stderr}")
        written += len(json.loads(path.read_text())["tokens"])
    return written


def replay_receipts(folder: Path, first: int) -> tuple[int, list[str]]:
    """Return how many tokens are the same, and what was said of the replies that differ."""
    same, differences = 0, []
    for path in sorted(folder.glob("*.json"))[first:]:
        done = run_here(("replay", str(path), "--json"), os.environ)
        answer = json.loads(done.stdout)
        if done.returncode == 0 and answer["same"]:
            same += answer["tokens"]
        else:
            differences.append(f"{path.name}: {answer.get('error', {}).get('message', done.stderr)}")
        print(f"{path.name} {'same' if done.returncode == 0 else differences[-1]}", file=sys.stderr, flush=True)
    return same, differences


def main() -> int:
    """Print the number of tokens and the instruction set; return 1 if a reply differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "replay"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", default=["pico"])
    parser.add_argument("--first", type=int, default=0, help="number of the first receipt to replay")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--ends", type=int, nargs="+", default=[0, 2], help="tokens that end replies; they are banned")
    parser.add_argument("--variant", choices=VARIANTS, default="native", help="a build of the tests, as emulated-amx")
    options = parser.parse_args()
    library = build.native() if options.variant == "native" else compiled(options.variant)
    name = str(library) if isinstance(library, Declined) else library.isa
    with mock.patch.object(build, "native", lambda: library):
        return act(options, name)


def act(options: argparse.Namespace, name: str) -> int:
    """Do what the command line says on the instruction set `name`."""
    if options.action == "write":
        written = write_receipts(options.folder, options.models, options.tokens, options.ends)
        print(f"{written} tokens written on {name}")
        return 0
    same, differences = replay_receipts(options.folder, options.first)
    print(f"{same} tokens the same on {name}, {len(differences)} replies differ", *differences, sep="\n")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
