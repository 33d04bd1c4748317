"""Measures the gain of `--draft mtp` with an MTP head of controlled accuracy, on a constructed model of 0.2 B.

    python -m tests.benchmarks.prediction [--noise 0 4 6 8] [--sequences 1] [--tokens 64] [--rounds 3]

The model's next token is a function of the last one. Its head knows the function except for noise, which makes it miss
some tokens (`tests.support.prediction`); the layers contribute nothing to the result but take their normal time. The
model is quantized to int4 in groups of 128, its head stays in 16 bits. Each round decodes `--sequences` concurrent
sequences alternately with and without the head; the draft length is adaptive, as in `run` and `serve`. Replies are
compared token by token.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.sequence import Request
from mycli.runtime.hub.resolve import Source
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.speculative.draft_length import AdaptiveDraftLength
from mycli.runtime.speculative.mtp import MtpHead, MtpProposer
from mycli.runtime.speculative.speculator import ProposerSpeculator, warm_up
from tests.support.engines import drain
from tests.support.paths import PICO
from tests.support.prediction import make_that_predicts
from tests.support.quantizing import make

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 1024,
}
CONTEXT, PROMPT = 512, (5, 6, 7)


@dataclass(frozen=True)
class Made:
    """Holds a quantized and loaded model with its MTP head."""

    runner: ModelRunner
    head: MtpHead

    @classmethod
    def with_noise(cls, folder: Path, noise: float) -> "Made":
        """Build the model under `folder`, which is not needed afterwards."""
        make_that_predicts(folder / "source", "qwen3_5-delta", noise, **SHAPE)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(PICO / name, folder / "source" / name)
        recipe = Recipe("rtn", 4, 128)
        make(Source("made", folder / "source"), folder / "copy", recipe)
        opened = open_model_folder(folder / "copy")
        runner = load_model(opened, Placement(torch.device("cpu"), torch.bfloat16))
        assert opened.mtp_head is not None
        return cls(runner, MtpHead(opened.mtp_head, runner))

    def engine(self, sequences: int, drafting: bool) -> Engine:
        """Return a warmed-up engine for this number of concurrent sequences."""
        shape, speculator = CacheShape.contiguous(CONTEXT, sequences), None
        if drafting:
            proposer = MtpProposer(self.head, shape)
            speculator = ProposerSpeculator(proposer, lambda: AdaptiveDraftLength(proposer.relative_cost))
        engine = Engine(self.runner, shape, SHAPE["vocab_size"], running=sequences, speculator=speculator)
        warm_up(engine)
        return engine


@dataclass(frozen=True)
class Replies:
    """Holds the replies of one round. acceptance: the accepted share of the drafted tokens."""

    tokens: list[list[int]]
    rate: float
    acceptance: float


def replies(engine: Engine, sequences: int, turn: int, tokens: int) -> Replies:
    """Generate replies for this number of concurrent sequences."""
    asked = [Request((*PROMPT, turn, index), limit=tokens) for index in range(sequences)]
    numbers, began = [engine.submit(one) for one in asked], time.perf_counter()
    outputs = drain(engine)
    seconds = time.perf_counter() - began
    found = [[token for output in outputs[number] for token in output.tokens] for number in numbers]
    every = [output for some in outputs.values() for output in some]
    drafted, accepted = (sum(getattr(output, name) for output in every) for name in ("drafted", "accepted"))
    return Replies(found, sum(map(len, found)) / seconds, accepted / max(drafted, 1))


def compare(made: Made, sequences: int, tokens: int, rounds: int) -> str:
    """Describe the speedup from speculation with this number of concurrent sequences."""
    plain, drafting = made.engine(sequences, False), made.engine(sequences, True)
    rates = []
    for turn in range(rounds):
        without, drafted = (replies(engine, sequences, turn, tokens) for engine in (plain, drafting))
        assert drafted.tokens == without.tokens
        rates.append((without.rate, drafted.rate, drafted.rate / without.rate, drafted.acceptance))
    before, after, ratio, acceptance = (statistics.median(column) for column in zip(*rates, strict=True))
    return f"{acceptance:.0%} of drafted tokens stand, {before:.1f} to {after:.1f} tokens/s, {ratio:.2f} x"


def main() -> None:
    """Print a line for each noise and number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, nargs="*", default=[0, 4, 6, 8])
    parser.add_argument("--sequences", type=int, nargs="*", default=[1])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    for noise in given.noise:
        with tempfile.TemporaryDirectory() as name:
            made = Made.with_noise(Path(name), noise)
        for sequences in given.sequences:
            said = compare(made, sequences, given.tokens, given.rounds)
            print(f"noise {noise:g}, {sequences} at once: {said}", flush=True)


if __name__ == "__main__":
    main()
