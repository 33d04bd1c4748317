"""Test which passes of a busy server the fused GPU pass accepts: nearly all decode passes.

Scheduler and block pool run without a model: random requests arrive, share prefixes, branch, end, are cancelled and
preempted. Also, an engine with a stand-in for the fused kernels gives the replies of one without.
"""

import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.cache.prefix_index import PrefixIndex
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import Passes
from mycli.runtime.engine.passes.base import PassInput
from mycli.runtime.engine.passes.cuda import CudaPass
from mycli.runtime.engine.passes.graphs import StepInput
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.engine.scheduler import Limits, Scheduler
from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK
from mycli.runtime.layers.rope import Rope
from mycli.runtime.memory.cache_shape import SHARED_BLOCK, CacheShape
from mycli.runtime.sampling.params import SamplingParams
from tests.support.graphs import UncomparedPass, recording
from tests.support.prefix_model import CONFIG, CPU, PrefixModel, random_function

pytest.importorskip("triton")

from mycli.runtime.engine.passes.fused import FusedStep  # noqa: E402  (only where Triton is)
from tests.support.decode_models import Case, models  # noqa: E402  (as above)

CONTEXT = 512


class Server:
    """Keeps `load` requests running; each pass is answered with random tokens."""

    def __init__(self, running: int, load: int, blocks: int, seed: int) -> None:
        self.random, self.load = random.Random(seed), load
        self.scheduler = Scheduler(BlockPool(blocks, PrefixIndex(SHARED_BLOCK)), Limits(CONTEXT, 2048, running))
        self.shared = [self.random.randrange(30000) for _ in range(150)]  # a system prompt

    def arrive(self) -> None:
        waiting = len(self.scheduler.running) + len(self.scheduler.waiting)
        for _ in range(min(self.load - waiting, self.random.randrange(4))):
            head = self.shared if self.random.random() < 0.3 else []
            prompt = [self.random.randrange(30000) for _ in range(self.random.randrange(5, 60))]
            request = Request((*head, *prompt), limit=self.random.randrange(2, 200))
            first = self.scheduler.submit(request)
            if self.random.random() < 0.1:
                self.scheduler.branch(first, request)

    def step(self, cache: KVCache, rope: Rope) -> PassInput | None:
        self.arrive()
        for sequence in tuple(self.scheduler.running):
            if self.random.random() < 0.002:
                self.scheduler.finish(sequence)
        parts = self.scheduler.schedule()
        work = PassInput([part.chunk([]) for part in parts], cache, rope) if parts and parts[0].is_decode else None
        self.scheduler.pool.take_copies()
        for part in parts:
            branches = self.scheduler.start_branches(part) if part.completes else []
            for each in (part, *branches):
                sampled = [self.random.randrange(30000)] if each.completes else []
                if self.scheduler.advance(each, sampled)[1] is not None:
                    self.scheduler.finish(each.sequence)
        return work


# Running, load, blocks of the cache: enough for all, or so few that requests wait or are preempted.
TRACES = [(4, 3, 32), (4, 6, 8), (8, 8, 18), (16, 24, 40), (64, 48, 220), (64, 90, 130), (256, 300, 500)]
ROOMY = [TRACES[0], TRACES[4]]


@pytest.mark.parametrize(("running", "load", "blocks"), TRACES, ids=str)
def test_nearly_all_decode_passes_of_a_server_are_fused(running: int, load: int, blocks: int) -> None:
    fused, plain = models(Case())
    step = FusedStep.compile(fused)
    assert isinstance(step, FusedStep)
    way = CudaPass(step, PlainPass(plain), None)
    cache = KVCache(CONFIG, blocks, SHARED_BLOCK, torch.device("meta"), torch.float16)
    rope, server = Rope(CONFIG, CONTEXT, CPU, torch.float16), Server(running, load, blocks, seed=1)
    passes, widest = Counter[str](), 0
    for _ in range(1500 if running < 64 else 500):
        work = server.step(cache, rope)
        if work is None:
            continue
        declined = way.takes(work)
        passes["fused" if declined is None else declined.code] += 1
        widest = max(widest, len(work.chunks))
    assert passes["fused"] >= 0.95 * passes.total() and passes.total() > 200, passes
    assert set(passes) <= {"fused"}, f"each pass that is not fused has a reason that is meant: {passes}"
    assert widest > min(running, load) // 2
    assert (server.scheduler.counts.preemptions == 0) is ((running, load, blocks) in ROOMY)


def test_cache_blocks_are_whole_turns_of_the_kernel() -> None:
    assert SHARED_BLOCK % KEY_BLOCK == 0


class Reading:
    """Writes tokens where the block table points, and reads each sequence back from there."""

    def __init__(self, model: PrefixModel) -> None:
        self.model, self.shapes = model, Counter[tuple[int, ...]]()

    def takes(self, sequences: int, tokens: int) -> bool:
        return sequences * tokens <= 64

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
        self.shapes[tuple(inputs.tokens.shape)] += 1
        keys, size, rows = cache.all(0)[0].data, cache.block_size, []
        counts = [inputs.new] * len(inputs.lengths) if inputs.counts is None else inputs.counts.tolist()
        for tokens, end, count, blocks in zip(
            inputs.tokens, inputs.lengths.tolist(), counts, inputs.block_table, strict=True
        ):
            length = end - inputs.new + count
            if not end:
                rows.append(torch.full((1, self.model.config.vocab_size), torch.nan, dtype=torch.float64))
                continue
            for position, token in enumerate(tokens.tolist()[:count], length - count):
                keys[blocks[position // size], 0, position % size] = token
            text = keys[blocks.long(), 0].flatten(0, 1)[:length, 0].long().tolist()
            rows.append(self.model.logits(tuple(text))[None])
        return torch.stack(rows)


class Noting(UncomparedPass):
    """Counts decode passes by backend."""

    counts: Counter[str]

    def takes(self, work: PassInput) -> Declined | None:
        declined = super().takes(work)
        if work.sampling is None and work.rows == len(work.chunks):
            self.counts["fused" if declined is None else declined.code] += 1
        return declined


def replies(fused: bool, blocks: int) -> tuple[dict[int, list[int]], Counter[str], int]:
    """Return the tokens of requests that arrive, share a prefix, are cancelled and preempted, and the backends used."""
    model = PrefixModel(random_function(3, 97), 97, max_context=256)
    step = Reading(model)
    way = Noting(step, PlainPass(model), recording)
    way.counts = Counter()
    passes = Passes((way, PlainPass(model)) if fused else (PlainPass(model),), {})
    passes.makes_tokens = False
    engine = Engine(ModelRunner(model, passes=passes), CacheShape(256, blocks, KEY_BLOCK), 97, running=12)
    drawing, tokens, submitted, cancelled = random.Random(5), dict[int, list[int]](), 0, set[int]()
    while submitted < 30 or engine.has_work:
        for _ in range(drawing.randrange(3) if submitted < 30 else 0):
            prompt = [7] * drawing.choice([0, 70, 130]) + [
                drawing.randrange(97) for _ in range(drawing.randrange(1, 9))
            ]
            sampling = SamplingParams(temperature=drawing.choice([0.0, 1.0]), seed=submitted)
            engine.submit(Request(tuple(prompt), sampling, drawing.randrange(1, 100)))
            submitted += 1
        if drawing.random() < 0.05 and submitted:
            cancelled.add(drawing.randrange(submitted))
            engine.cancel(max(cancelled))
        for output in engine.step():
            tokens.setdefault(output.sequence, []).extend(output.tokens)
    return tokens, way.counts, engine.stats.preemptions


def test_replies_through_the_block_table_are_the_plain_ones() -> None:
    expected, _, preemptions = replies(False, 7)
    found, counts, _ = replies(True, 7)
    assert found == expected and preemptions > 0
    assert counts["fused"] > 100 and counts["fused"] >= 0.95 * counts.total(), counts
