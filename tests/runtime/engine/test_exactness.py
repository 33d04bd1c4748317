"""A reply has the same bits alone, among others, after a prefix hit, after a preemption: pico on the CPU.

However a text is read (in other chunks, beside other prompts, from where another began alike, again after a
preemption), the logits are those of the reply alone, bit for bit, in bf16 and in fp32, with any kind of cache.
"""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.block_table import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loader import load_model
from mycli.runtime.engine.model_runner import CacheShape, ModelRunner
from mycli.runtime.engine.sequence import Request
from mycli.runtime.engine.speculation import Listener
from mycli.runtime.kernels.cpu import build
from mycli.runtime.models.config import Kv
from mycli.runtime.sampling.params import SamplingParams
from tests.support.engines import together
from tests.support.paths import PICO

CONTEXT = 96
LONG = 640  # positions: attention cuts them into chunks of 256

pytestmark = pytest.mark.skipif(isinstance(build.native(), str), reason="torch's products have no promise of bits")


class Recorded(ModelRunner):
    """Keeps the logits that tokens were drawn from, by the first block of the sequence, in order."""

    seen: dict[int, list[Tensor]]

    def run(self, chunks: Sequence[Chunk], cache: KVCache, listener: Listener | None = None) -> Tensor:
        logits = super().run(chunks, cache, listener)
        row = 0
        for chunk in chunks:
            row += chunk.logits
            if chunk.logits:
                self.seen.setdefault(chunk.blocks[0], []).append(logits[row - 1].clone())
        return logits


def recorded(dtype: torch.dtype, kv: Kv) -> Recorded:
    loaded = load_model(ModelFolder.open(PICO), Placement(torch.device("cpu"), dtype, kv=kv))
    runner = Recorded(loaded.model, loaded.kv)
    runner.seen = {}
    return runner


def requests(count: int, seed: int = 0) -> list[Request]:
    """Mixed lengths, greedy and seeded, half of them with beginnings that others have."""
    chance = random.Random(seed)
    begins = [[chance.randrange(300, 4000) for _ in range(24)] for _ in range(3)]
    made = []
    for index in range(count):
        begin = chance.choice(begins)[: chance.randint(0, 24)] if index % 2 else []
        prompt = (*begin, *(chance.randrange(300, 4000) for _ in range(chance.randint(1, 20))))
        temperature = 0.0 if index % 3 else 0.9
        made.append(Request(prompt, SamplingParams(temperature, seed=index), limit=chance.randint(2, 20)))
    return made


def alone(runner: ModelRunner, asked: Sequence[Request]) -> list[list[int]]:
    return [together(Engine(runner, CacheShape.lanes(CONTEXT), runner.config.vocab_size), [one])[0] for one in asked]


def batched(runner: ModelRunner, blocks: int, running: int) -> Engine:
    return Engine(runner, CacheShape(CONTEXT, blocks, 8), runner.config.vocab_size, running=running, chunk=64)


CASES = [
    pytest.param(torch.float32, "auto", id="fp32"),
    pytest.param(torch.bfloat16, "auto", id="bf16"),
    pytest.param(torch.float32, "int8", id="fp32-int8kv"),
    pytest.param(torch.bfloat16, "int8", id="bf16-int8kv"),
]


@pytest.mark.parametrize(("dtype", "kv"), CASES)
def test_tokens_are_those_of_the_reply_alone(dtype: torch.dtype, kv: Kv) -> None:
    runner, asked = recorded(dtype, kv), requests(9)
    expected = alone(runner, asked)
    engine = batched(runner, 13, 8)
    assert together(engine, asked) == expected
    assert together(engine, asked) == expected
    assert engine.stats.preemptions >= len(asked) // 2 and engine.stats.prefix_hits > 20


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv"), CASES)
def test_tokens_of_two_hundred_replies(dtype: torch.dtype, kv: Kv) -> None:
    runner, asked = recorded(dtype, kv), requests(200, seed=1)
    engine = batched(runner, 40, 32)
    assert together(engine, asked) == alone(runner, asked)
    assert engine.stats.preemptions >= 100


def logits_of(runner: Recorded, engine: Engine, prompt: tuple[int, ...]) -> list[Tensor]:
    """What each of four tokens after `prompt` was drawn from."""
    runner.seen = {}
    together(engine, [Request(prompt, limit=4)])
    ((_, logits),) = runner.seen.items()
    runner.seen = {}
    assert len(logits) == 4
    return logits


@pytest.mark.parametrize(("dtype", "kv"), CASES)
def test_logits_after_a_prefix_hit_are_those_of_the_prompt_alone(dtype: torch.dtype, kv: Kv) -> None:
    """Prompts below and above what attention takes at once; where they were cut, and in which blocks, is no matter."""
    runner, chance = recorded(dtype, kv), random.Random(4)
    for length, chunk, block in ((33, 5, 0), (300, 77, 64), (530, 512, 16)):
        prompt = tuple(chance.randrange(300, 4000) for _ in range(length))
        expected = logits_of(runner, Engine(runner, CacheShape.lanes(LONG), runner.config.vocab_size), prompt)
        shape = CacheShape.paged(LONG, 2 * LONG, block) if block else CacheShape.lanes(LONG, 2)
        engine = Engine(runner, shape, runner.config.vocab_size, running=2, chunk=chunk)
        for shared in (1, length // 3, length - 1):
            together(engine, [Request((*prompt[:shared], 7, 8), limit=1)])
            before = engine.stats.prefix_hits
            found = logits_of(runner, engine, prompt)
            assert engine.stats.prefix_hits > before
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), (length, shared)
            engine.forget()


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")],
)
def test_decoding_beside_others_has_the_same_bits(dtype: torch.dtype) -> None:
    """Of prompts that were read alone: their replies side by side."""
    runner = recorded(dtype, "auto")
    asked = [Request((300 + place, 5, 17), limit=12) for place in range(6)]
    logits: list[list[Tensor]] = []
    for many in (1, 6):
        runner.seen = {}
        engine = Engine(runner, CacheShape.lanes(CONTEXT, many), runner.config.vocab_size, chunk=3)
        tokens = together(engine, asked)
        assert engine.stats.preemptions == 0 and len(tokens[0]) == 12
        logits.append([one for block in sorted(runner.seen) for one in runner.seen[block]])
    assert len(logits[0]) == len(logits[1]) == 6 * 12
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*logits, strict=True))
