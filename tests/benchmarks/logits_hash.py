"""Prints a hash of the logits of random tokens, which must be the same with every set of instructions.

MYCLI_CPU_ISA=avx2 PYTHONPATH=.links python -m tests.benchmarks.logits_hash FOLDER [--sequences 14]

Each sequence is a prompt of 130 tokens, 100 single tokens, and a pass of 20, with a cache in bf16, int8 and int4. The
products of the model must be packed, the head's too: dense products sum in the order of the machine's vectors.
"""

import argparse
import hashlib
import random
from pathlib import Path

import torch

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import CacheShape
from mycli.runtime.models.config import KvDtype

KINDS: tuple[KvDtype, ...] = ("bf16", "int8", "int4")
PROMPT, REPLY, LAST = 130, 100, 20
LENGTH = PROMPT + REPLY + LAST


def main() -> None:
    """Print the number of rows and their hash."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sequences", type=int, default=14)
    arguments = parser.parse_args()
    folder = open_model_folder(arguments.folder)
    single = ((first, first + 1) for first in range(PROMPT, PROMPT + REPLY))
    passes = [(0, PROMPT), *single, (PROMPT + REPLY, LENGTH)]
    digest, rows = hashlib.sha256(), 0
    for kv in KINDS:
        runner = load_model(folder, Placement(torch.device("cpu"), torch.bfloat16, kv=kv))
        for seed in range(arguments.sequences):
            draw, cache = random.Random(seed), runner.make_cache(CacheShape.contiguous(LENGTH))
            tokens = [draw.randrange(folder.config.vocab_size) for _ in range(LENGTH)]
            for first, last in passes:
                logits = runner.run([Chunk(tokens[first:last], first, (0,), last - first)], cache)
                rows += len(logits)
                digest.update(logits.float().numpy().tobytes())
    print(f"{rows} rows of logits, sha256 {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
