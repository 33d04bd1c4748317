"""Test that the passes of later requests were launched and captured before, and that a warm-up leaves no trace."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine import warm_up
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import Passes
from mycli.runtime.engine.passes.graphs import Launches, StepInput
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.engine.sequence import Request
from mycli.runtime.engine.speculation import Speculator
from mycli.runtime.engine.warm_up import compiles, count_passes, warm_up_passes
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import HiddenStateHook
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.graphs import TOKEN_BUCKETS
from mycli.runtime.sampling.params import SamplingParams
from tests.runtime.engine.test_serving_trace import Reading
from tests.support.graphs import UncomparedPass, recording
from tests.support.prefix_model import PrefixModel, random_function

VOCAB, RUNNING = 97, 5


class Failing(Reading):
    """Fails for prompts of 64 tokens."""

    def takes(self, sequences: int, tokens: int) -> bool:
        return sequences * tokens <= 256

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
        if inputs.new == 64:
            raise RuntimeError("out of resource: shared memory")
        logits = super().__call__(inputs, rope, cache, last)
        if inputs.hidden is not None:
            inputs.hidden.rows = torch.zeros(*inputs.tokens.shape, 1)
        return logits if last else logits.expand(-1, inputs.new, -1)  # of drafts, the number of rows alone counts


class Served:
    """An engine with a stand-in for the fused pass; counts its captures and its steps by shape."""

    def __init__(self, fused: bool = True, running: int = RUNNING) -> None:
        self.captures, self.warnings = 0, list[Declined]()
        self.compiled = set[tuple[int, ...]]()
        model = PrefixModel(random_function(3, VOCAB), VOCAB, max_context=256)
        self.step = Failing(model)
        way = UncomparedPass(self.step, PlainPass(model), self.capture, self.warnings.append)
        plain = PlainPass(model)
        passes = Passes((way, plain) if fused else (plain,), {})
        passes.makes_tokens, self.ways = False, [way]
        self.engine = Engine(ModelRunner(model, passes=passes), CacheShape(256, 40, KEY_BLOCK), VOCAB, running=running)

    def capture(self, work: Launches) -> Launches:
        if not self.captures:
            self.compiled = set(self.step.shapes)
        self.captures += 1
        return recording(work)

    def replies(self) -> dict[int, list[int]]:
        drawing, tokens = random.Random(5), dict[int, list[int]]()
        for _ in range(12):
            prompt = tuple(drawing.randrange(VOCAB) for _ in range(drawing.choice([3, 11, 20, 50, 120, 200])))
            self.engine.submit(Request(prompt, SamplingParams(), drawing.randrange(1, 12)))
        while self.engine.has_work:
            for output in self.engine.step():
                tokens.setdefault(output.sequence, []).extend(output.tokens)
        return tokens


def test_no_request_captures_a_pass_or_changes_its_reply() -> None:
    warm, cold = Served(), Served()
    progress: list[tuple[int, int]] = []
    count = warm_up_passes(warm.engine, [SamplingParams()], lambda done, total: progress.append((done, total)))
    assert progress == [(done, count) for done in range(count + 1)] and count == count_passes(warm.engine, 1)
    shapes, captures = set(warm.step.shapes), warm.captures
    assert {(sequences, 1) for sequences in (1, 2, 4, 8)} <= shapes, "5 sequences are padded to 8"
    assert {(1, tokens) for tokens in TOKEN_BUCKETS if tokens != 64} <= shapes
    assert [warning.code for warning in warm.warnings] == ["kernels-failed"], "the others are captured all the same"
    assert captures == len(shapes) and warm.compiled == shapes, "all are compiled before one is captured"
    assert warm.replies() == cold.replies()
    alone = {shape for shape in warm.step.shapes if shape[0] == 1 or shape[1] == 1}
    assert alone <= shapes and cold.captures > 0
    assert warm.engine.stats.prefix_hits == cold.engine.stats.prefix_hits


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (3, 3), (64, 4)])
def test_kernels_are_compiled_by_a_thread_for_each_core_but_not_by_many(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    def pool(count: int, initializer: Callable[..., None], initargs: tuple[torch.device]) -> ThreadPoolExecutor:
        counts.append(count)
        return ThreadPoolExecutor(count, initializer=initializer, initargs=initargs)

    monkeypatch.setattr(warm_up, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(warm_up, "cpu", lambda: SimpleNamespace(cores=cores))
    warm_up_passes(Served(running=1).engine, [])
    assert counts == [threads]


def test_nothing_is_done_where_nothing_is_compiled_or_requests_run() -> None:
    plain = Served(fused=False)
    assert not compiles(plain.engine.runner) and warm_up_passes(plain.engine, []) == 0
    busy = Served()
    busy.engine.submit(Request((1, 2), SamplingParams(), 3))
    with pytest.raises(RuntimeError, match="requests"):
        warm_up_passes(busy.engine, [])


def test_a_model_that_computes_embeddings_alone_has_no_passes_to_compile() -> None:
    served = Served()
    served.engine.runner.model.config = replace(served.engine.runner.config, bidirectional=True)
    assert warm_up_passes(served.engine, [SamplingParams()]) == served.captures == 0 and not served.step.shapes


@pytest.mark.parametrize("hook", [None, lambda hidden: None], ids=["drafts", "drafts-from-hidden-states"])
def test_with_drafts_every_captured_pass_is_still_captured_after_the_warm_up(hook: HiddenStateHook | None) -> None:
    served, other = Served(running=40), Served()
    assert warm_up_passes(other.engine, []) == other.captures + 1 == count_passes(other.engine, 0), "one shape fails"
    served.engine.speculator = cast(Speculator, SimpleNamespace(hidden_state_hook=lambda parts: hook))
    passes = warm_up_passes(served.engine, [])
    (held,) = (way._graphs[served.engine.cache] for way in served.ways)
    assert served.captures == passes - 1 == sum(graph is not None for graph in held.by_shape.values())
    for lengths in ((2, 3), (4, 4), (1, 8), (5, 1, 2)):
        chunks = [Chunk([7] * count, 0, (place,), count, place) for place, count in enumerate(lengths)]
        served.engine.runner.run(chunks, served.engine.cache, hook)
    assert served.captures == passes - 1, "drafts of any lengths have a graph"
