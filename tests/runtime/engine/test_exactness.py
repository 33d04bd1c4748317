"""Test that a reply has the same bits alone, batched, after a prefix hit and after a preemption.

Logits are compared bit for bit for any chunking and batch, in bf16 and fp32 and with any kind of cache, on pico and
(slow) on a model of 0.1 B parameters.
"""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.sequence import Request, SequenceOutput
from mycli.runtime.engine.step_sampler import StepSampler, TokensAhead
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.layers.transformer import HiddenStateHook
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.models.config import KvDtype
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.speculative.draft_length import FixedDraftLength
from mycli.runtime.speculative.proposers import DraftModel
from mycli.runtime.speculative.speculator import ProposerSpeculator
from tests.support.engines import drain, together
from tests.support.models import random_model
from tests.support.paths import PICO

CPU = torch.device("cpu")
CONTEXT = 96
LONG = 640  # positions: attention processes them in chunks of 256

pytestmark = pytest.mark.skipif(isinstance(build.native(), str), reason="torch's products have no promise of bits")


class Recorded(ModelRunner):
    seen: dict[int, list[Tensor]]

    def run(self, chunks: Sequence[Chunk], cache: KVCache, hook: HiddenStateHook | None = None) -> Tensor:
        logits = super().run(chunks, cache, hook)
        row = 0
        for chunk in chunks:
            row += chunk.logits
            if chunk.logits:
                self.seen.setdefault(chunk.blocks[0], []).append(logits[row - 1].clone())
        return logits


def recorded(dtype: torch.dtype, kv: KvDtype, folder: Path = PICO) -> Recorded:
    loaded = load_model(open_model_folder(folder), Placement(torch.device("cpu"), dtype, kv=kv))
    runner = Recorded(loaded.model, loaded.kv)
    runner.seen = {}
    return runner


def requests(count: int, seed: int = 0, most: int = 20) -> list[Request]:
    chance = random.Random(seed)
    begins = [[chance.randrange(300, 4000) for _ in range(24)] for _ in range(3)]
    made = []
    for index in range(count):
        begin = chance.choice(begins)[: chance.randint(0, 24)] if index % 2 else []
        prompt = (*begin, *(chance.randrange(300, 4000) for _ in range(chance.randint(1, 20))))
        temperature = 0.0 if index % 3 else 0.9
        made.append(Request(prompt, SamplingParams(temperature, seed=index), limit=chance.randint(2, most)))
    return made


def alone(runner: ModelRunner, asked: Sequence[Request]) -> list[list[int]]:
    return [
        together(Engine(runner, CacheShape.contiguous(CONTEXT), runner.config.vocab_size), [one])[0] for one in asked
    ]


def batched(runner: ModelRunner, blocks: int, running: int) -> Engine:
    return Engine(runner, CacheShape(CONTEXT, blocks, 8), runner.config.vocab_size, running=running, chunk=64)


CASES = [
    pytest.param(torch.float32, "auto", id="fp32"),
    # Their halves are in the cases around them.
    pytest.param(torch.bfloat16, "auto", id="bf16", marks=pytest.mark.slow),
    pytest.param(torch.float32, "int8", id="fp32-int8kv", marks=pytest.mark.slow),
    pytest.param(torch.bfloat16, "int8", id="bf16-int8kv", marks=pytest.mark.slow),
    pytest.param(torch.bfloat16, "int4", id="bf16-int4kv"),
]


@pytest.mark.parametrize(("dtype", "kv"), CASES)
def test_tokens_are_those_of_the_reply_alone(dtype: torch.dtype, kv: KvDtype) -> None:
    runner, asked = recorded(dtype, kv), requests(9)
    expected = alone(runner, asked)
    engine = batched(runner, 13, 8)
    assert together(engine, asked) == expected
    assert together(engine, asked) == expected
    assert engine.stats.preemptions >= len(asked) // 2 and engine.stats.prefix_hits > 20


class DrawnFrom(StepSampler):
    """Records a hash of the logits of each drawn token by sequence and position."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.hashes: dict[int, dict[int, int]] = {}

    def sample(self, samples: Any, drafted: Any, logits: Tensor) -> Any:
        for part, rows in samples:
            places = self.hashes.setdefault(part.sequence.id, {})
            for place, row in enumerate(rows, start=len(part.sequence.tokens)):
                bits = logits[row].contiguous().view(torch.uint8)
                places[place] = hash(bits.numpy().tobytes())  # a rejected token: overwritten by the next
        return super().sample(samples, drafted, logits)


class Drawing(Engine):
    """Records the logits that tokens were drawn from, and which sequences were preempted for lack of blocks."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._sampler = recording = DrawnFrom(self.runner, self.cache, self._states, self.speculator)
        self.drawn_from = recording.hashes
        self.put_back = set[int]()

    def step(self) -> list[SequenceOutput]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TokensAhead, "next", lambda *_: None)  # a call with several passes returns no logits
            outputs = super().step()
        self.put_back |= {one.id for one in self.scheduler.waiting if one.started}
        return outputs


def drawing(runner: ModelRunner, shape: CacheShape, running: int, draft: ModelRunner | None = None) -> Drawing:
    speculator = None
    if draft is not None:
        proposer = DraftModel(draft, CacheShape.contiguous(CONTEXT, running), runner.nbytes)
        speculator = ProposerSpeculator(proposer, lambda: FixedDraftLength(3))
    return Drawing(runner, shape, runner.config.vocab_size, running=running, chunk=64, speculator=speculator)


def with_logits(engine: Drawing, asked: Sequence[Request]) -> list[tuple[list[int], list[int]]]:
    numbers = [engine.submit(one) for one in asked]
    outputs = drain(engine)
    found = []
    for number, one in zip(numbers, asked, strict=True):
        tokens = [token for output in outputs[number] for token in output.tokens]
        places = range(len(one.prompt), len(one.prompt) + len(tokens))
        found.append((tokens, [engine.drawn_from[number][place] for place in places]))
    return found


@cache
def each_alone(
    dtype: torch.dtype, kv: KvDtype, folder: Path, most: int, count: int
) -> tuple[Recorded, list[Request], list[tuple[list[int], list[int]]]]:
    runner, asked = recorded(dtype, kv, folder), requests(count, seed=1, most=most)
    return runner, asked, [with_logits(drawing(runner, CacheShape.contiguous(CONTEXT), 1), [one])[0] for one in asked]


DRAFTS = [pytest.param(False, id="plain"), pytest.param(True, id="drafted")]


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a_few_replies_have_the_bits_of_each_alone(drafts: bool) -> None:
    """Run a small version of the test below by default, so that its checks always run."""
    compare_with_each_alone(torch.bfloat16, "auto", PICO, 30, drafts, blocks=10, count=24, hits=4)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv"), CASES)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_two_hundred_replies_have_the_bits_of_each_alone(dtype: torch.dtype, kv: KvDtype, drafts: bool) -> None:
    """G43: 32 concurrent, a third of them preempted, with shared prefixes, with and without drafts."""
    compare_with_each_alone(dtype, kv, PICO, 44, drafts, blocks=20)


def compare_with_each_alone(
    dtype: torch.dtype,
    kv: KvDtype,
    folder: Path,
    most: int,
    drafts: bool,
    blocks: int,
    count: int = 200,
    hits: int = 250,
) -> None:
    runner, asked, expected = each_alone(dtype, kv, folder, most, count)
    draft = load_model(open_model_folder(PICO.parent / "pico-draft"), Placement(CPU, dtype, kv=kv)) if drafts else None
    engine = drawing(runner, CacheShape(CONTEXT, blocks, 8), 32, draft)
    found = with_logits(engine, asked)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [bits for _, bits in found] == [bits for _, bits in expected]
    assert engine.stats.preemptions >= len(engine.put_back) >= len(asked) // 3
    assert engine.stats.prefix_hits > hits and engine.scheduler.pool.used == 0


@pytest.fixture(scope="module")
def tenth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random model of 0.1 B parameters, wide enough for kernels to split its products."""
    layers = {"num_hidden_layers": 14, "num_attention_heads": 12, "num_key_value_heads": 4}
    folder = tmp_path_factory.mktemp("tenth") / "model"
    return random_model(folder, 0.03, hidden_size=768, intermediate_size=2048, max_position_embeddings=2048, **layers)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_two_hundred_replies_of_100_million_weights_have_the_bits_of_each_alone(
    tenth: Path, dtype: torch.dtype, drafts: bool
) -> None:
    """G43, on a model larger than the core's cache."""
    compare_with_each_alone(dtype, "auto", tenth, 36, drafts, blocks=14)


def logits_of(runner: Recorded, engine: Engine, prompt: tuple[int, ...]) -> list[Tensor]:
    runner.seen = {}
    together(engine, [Request(prompt, limit=4)])
    ((_, logits),) = runner.seen.items()
    runner.seen = {}
    assert len(logits) == 4
    return logits


@pytest.mark.parametrize(("dtype", "kv"), CASES)
def test_logits_after_a_prefix_hit_are_those_of_the_prompt_alone(dtype: torch.dtype, kv: KvDtype) -> None:
    """The prompts are below and above the attention chunk size; chunk boundaries and block numbers do not matter."""
    runner, chance = recorded(dtype, kv), random.Random(4)
    for length, chunk, block in ((33, 5, 0), (300, 77, 64), (530, 512, 16)):
        prompt = tuple(chance.randrange(300, 4000) for _ in range(length))
        expected = logits_of(runner, Engine(runner, CacheShape.contiguous(LONG), runner.config.vocab_size), prompt)
        shape = CacheShape.paged(LONG, 2 * LONG, block) if block else CacheShape.contiguous(LONG, 2)
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
    runner = recorded(dtype, "auto")
    asked = [Request((300 + place, 5, 17), limit=12) for place in range(6)]
    logits: list[list[Tensor]] = []
    for many in (1, 6):
        runner.seen = {}
        engine = Engine(runner, CacheShape.contiguous(CONTEXT, many), runner.config.vocab_size, chunk=3)
        tokens = together(engine, asked)
        assert engine.stats.preemptions == 0 and len(tokens[0]) == 12
        logits.append([one for block in sorted(runner.seen) for one in runner.seen[block]])
    assert len(logits[0]) == len(logits[1]) == 6 * 12
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*logits, strict=True))
