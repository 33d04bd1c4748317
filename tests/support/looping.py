"""Engines whose passes sample several tokens in a launch, by a step that reads the tokens back from the cache."""

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import Passes
from mycli.runtime.engine.passes.base import PassInput
from mycli.runtime.engine.passes.device_loop import DeviceLoop
from mycli.runtime.engine.passes.graphs import Capture, StepInput
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import Declined
from mycli.runtime.layers.rope import Rope
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.params import SamplingParams
from tests.support.engines import cached_prefixes, in_one_block
from tests.support.graphs import UncomparedPass, recording
from tests.support.prefix_model import PrefixModel, random_function

VOCAB, PADDING = 300, 20


PROMPT = [3, 141, 59, 26]


CAPTURES: dict[str, Capture | None] = {"none": None, "runs-when-captured": recording, "does-not": lambda work: work}


Outcome = tuple[list[list[int]], list[str | None], list[list[int]], list[list[int]], int]


class Sequences(PrefixModel):
    """Returns different logits for every token sequence; head padding has the largest. NaN after `broken` tokens."""

    def __init__(self, seed: int = 0, broken: int = 99) -> None:
        random = random_function(seed, VOCAB + PADDING)

        def function(text: tuple[int, ...]) -> Tensor:
            logits = random(text)
            logits[VOCAB:] += 50
            return logits * torch.nan if len(text) > broken else logits

        super().__init__(function, VOCAB + PADDING)

    def after(self, cache: KVCache, inputs: StepInput) -> Tensor:
        """Return logits [sequences, 1, vocab + padding] for the tokens in the blocks of `cache`."""
        rows = []
        for length, blocks in zip(inputs.lengths.tolist(), inputs.block_table.tolist(), strict=True):
            held = [token for block in blocks for token in in_one_block(cache, block, cache.block_size)]
            rows.append(self.logits(tuple(held[:length] or [0])))
        return torch.stack(rows)[:, None]


class Step:
    """Replaces the fused pass, using the tokens and lengths in its buffers."""

    def __init__(self, model: Sequences) -> None:
        self.model, self.calls = model, 0

    def takes(self, sequences: int, tokens: int) -> bool:
        return sequences < 5

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
        self.calls += 1
        keys = cache.all(0)[0].data
        for place, end in enumerate(inputs.lengths.tolist()):
            if end:
                block = inputs.block_table[place, (end - 1) // cache.block_size]
                keys[block, 0, (end - 1) % cache.block_size] = inputs.tokens[place, 0].float()
        return self.model.after(cache, inputs).float()


def engines(capture: str, capacity: int = 64, sequences: int = 1, broken: int = 99) -> tuple[Engine, Engine, Step]:
    """Return engines with and without the loop, on equal models."""
    looped, plain = Sequences(broken=broken), Sequences(broken=broken)
    step = Step(looped)
    passes = looping(looped, step, DeviceLoop(step, CAPTURES[capture]))
    shape = CacheShape.contiguous(capacity, sequences)
    return Engine(ModelRunner(looped, passes=passes), shape, VOCAB), Engine(ModelRunner(plain), shape, VOCAB), step


class TokensOnly(UncomparedPass):
    """Declines passes that return logits, leaving them to the plain pass."""

    def takes(self, work: PassInput) -> Declined | None:
        return Declined("some-logits") if work.sampling is None else super().takes(work)


def looping(model: PrefixModel, step: "Step", loop: DeviceLoop) -> Passes:
    """Build an engine with the loop for tokens and the plain pass for logits."""
    way = TokensOnly(step, PlainPass(model), None)
    way.loop = loop
    return Passes((way, PlainPass(model)), {})


def outcome(
    engine: Engine,
    prompt: list[int],
    limit: int,
    stop: frozenset[int] = frozenset(),
    take: int = 999,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
) -> Outcome:
    """Return the visible result of replies of which `take` tokens are read, and the state for the next turn."""
    limit = min(limit, engine.context - len(prompt) + 1)
    sequences = engine.shape.blocks
    numbers = [engine.submit(Request((place, *prompt[1:]), sampling, limit, stop)) for place in range(sequences)]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    reasons: dict[int, str | None] = {}
    while engine.has_work:
        for output in engine.step():
            tokens[output.sequence] += output.tokens
            reasons[output.sequence] = output.finish_reason
            if len(tokens[output.sequence]) >= take:
                engine.cancel(output.sequence)
    said = [tokens[number][:take] for number in numbers]
    held = [in_one_block(engine.cache, block, engine.context) for block in range(sequences)]
    texts = cached_prefixes(engine)
    for text in texts:
        assert text in [row[: len(text)] for row in held], "what the index says is what the cache holds"
    return said, [reasons[number] for number in numbers] if take == 999 else [], texts, said, engine.stats.preemptions


# Each filter, and all of them with penalties; penalties with greedy decoding.
DRAWN = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.5, seed=2, top_k=20),
    SamplingParams(temperature=0.8, seed=-3, top_p=0.9),
    SamplingParams(temperature=1.2, seed=4, min_p=0.05),
    SamplingParams(
        temperature=1.3,
        seed=5,
        top_k=90,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    ),
    SamplingParams(repetition_penalty=1.3),
]
