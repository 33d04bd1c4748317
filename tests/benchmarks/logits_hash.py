"""Prints a hash of the logits of random tokens, which must be the same with every set of instructions.

MYCLI_CPU_ISA=avx2 PYTHONPATH=.links python -m tests.benchmarks.logits_hash FOLDER... [--sequences 14] [--portable-bits]

Each sequence is a prompt of 130 tokens, single tokens, and a pass of 20, with a cache in bf16, int8 and int4. Without
--portable-bits the products of the model must be packed, the head's too: dense products sum in the order of the
machine's vectors.
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
from mycli.runtime.errors import ModelError
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.models.config import KvDtype

KINDS: tuple[KvDtype, ...] = ("bf16", "int8", "int4")
PROMPT, LAST = 130, 20


def logits_hash(path: Path, sequences: int, replies: int, portable: bool) -> str:
    """Return the number of rows and their hash. Raises ModelError for a model without portable bits."""
    folder, length = open_model_folder(path), PROMPT + replies + LAST
    single = ((first, first + 1) for first in range(PROMPT, PROMPT + replies))
    passes = [(0, PROMPT), *single, (PROMPT + replies, length)]
    digest, rows = hashlib.sha256(), 0
    for kv in KINDS:
        placement = Placement(torch.device("cpu"), torch.bfloat16, kv=kv, portable=portable)
        runner = load_model(folder, placement)
        for seed in range(sequences):
            draw, cache = random.Random(seed), runner.make_cache(CacheShape.contiguous(length))
            tokens = [draw.randrange(folder.config.vocab_size) for _ in range(length)]
            for first, last in passes:
                logits = runner.run([Chunk(tokens[first:last], first, (0,), last - first)], cache)
                rows += len(logits)
                digest.update(logits.float().numpy().tobytes())
    return f"{rows} rows of logits, sha256 {digest.hexdigest()[:16]}"


def main() -> None:
    """Print a line for each model, preceded by its name if there are several."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--sequences", type=int, default=14)
    parser.add_argument("--replies", type=int, default=100, help="single tokens of a sequence")
    parser.add_argument("--portable-bits", action="store_true")
    arguments = parser.parse_args()
    for folder in arguments.folders:
        try:
            line = logits_hash(folder, arguments.sequences, arguments.replies, arguments.portable_bits)
        except ModelError as error:
            line = f"{error.message}: {error.data.get('declined', error.hint)}"
        print(f"{folder.name}: {line}" if len(arguments.folders) > 1 else line, flush=True)


if __name__ == "__main__":
    main()
