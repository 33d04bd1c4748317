"""Test that samples of one prompt and prompts of one file equal single replies, and that logprobs are the model's."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.replies.completion import Completion, complete_all, finish_replies
from mycli.runtime.engine.replies.reader import ReplyReader
from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import UsageError
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.grammars.grammar import Grammar
from mycli.runtime.sampling.logprobs import LogprobRecorder
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.tokenizer.stream import TextRules
from tests.support.engines import contiguous_engine
from tests.support.paths import PICO


@pytest.fixture(scope="module")
def pico() -> LoadedModel:
    return LoadedModel.load(open_model_folder(PICO), Placement(torch.device("cpu"), torch.float32))


def prompt(pico: LoadedModel, text: str) -> list[int]:
    return pico.tokenizer.apply_chat_template([Message("user", text)])


def completion(
    pico: LoadedModel,
    engine: Engine,
    ids: Sequence[int],
    sampling: SamplingParams = SamplingParams(),  # noqa: B008  # frozen
    stops: Sequence[str] = (),
    **options: Any,
) -> Completion:
    request = Request(tuple(ids), sampling, stop_ids=pico.stop_ids, **options)
    return Completion(engine, request, ReplyReader(pico.tokenizer, TextRules(stops)))


def drawn(
    pico: LoadedModel, engine: Engine, ids: list[int], sampling: SamplingParams, count: int, **options: Any
) -> list[Completion]:
    replies = [completion(pico, engine, ids, sampling, **options) for _ in range(count)]
    finish_replies(engine, [replies])
    return replies


def paged(pico: LoadedModel, tokens: int, context: int = 256) -> Engine:
    return Engine(pico.runner, CacheShape.paged(context, tokens, 16), pico.vocabulary_size, running=8)


def test_greedy_samples_are_the_greedy_reply(pico: LoadedModel) -> None:
    ids = prompt(pico, "What is the capital of Japan?")
    engine = paged(pico, 1024)
    samples = drawn(pico, engine, ids, SamplingParams(), 3, limit=40, logprobs=1)
    reply = completion(pico, contiguous_engine(pico.runner, 128), ids, limit=40)
    text = "".join(reply)
    for sample in samples:
        assert (text, reply.tokens, reply.finish_reason) == (sample.text, sample.tokens, sample.finish_reason)
        assert [one.token for one in sample.logprobs] == sample.tokens
        assert all(one.top[0] == (one.token, one.logprob) for one in sample.logprobs)


@pytest.fixture(scope="module")
def stories(pico: LoadedModel) -> list[str]:
    ids = prompt(pico, "Tell me a story.")
    return [
        "".join(completion(pico, contiguous_engine(pico.runner, 128), ids, SamplingParams(1.0, seed=seed), limit=60))
        for seed in ((1 << 63) - 2, (1 << 63) - 1, -(1 << 63), 1 - (1 << 63))
    ]


@pytest.mark.parametrize("tokens", [1024, 208], ids=["room", "preempted"])
def test_a_sample_is_the_reply_to_its_seed(pico: LoadedModel, stories: list[str], tokens: int) -> None:
    ids = prompt(pico, "Tell me a story.")
    engine = paged(pico, tokens, 128)
    samples = drawn(pico, engine, ids, SamplingParams(1.0, seed=(1 << 63) - 2), 4, limit=60)
    assert (engine.stats.preemptions > 0) == (tokens < 1024)
    assert [sample.text for sample in samples] == stories
    assert len({*stories}) > 1


def test_the_prompt_is_read_once(pico: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[list[int]] = []
    run = ModelRunner.run

    def counting(self: ModelRunner, chunks: Sequence[Chunk], cache: KVCache, *others: Any) -> torch.Tensor:
        shapes.append([len(chunk.tokens) for chunk in chunks])
        return run(self, chunks, cache, *others)

    monkeypatch.setattr(ModelRunner, "run", counting)
    ids = prompt(pico, "Tell me a story.")
    drawn(pico, paged(pico, 1024), ids, SamplingParams(1.0, seed=1), 4, limit=5)
    assert shapes == [[len(ids)]] + [[1] * 4] * 4


def test_samples_end_alone_at_their_stops(pico: LoadedModel) -> None:
    ids = prompt(pico, "Tell me a story.")
    sampling = SamplingParams(1.0, seed=5)
    samples = drawn(pico, paged(pico, 1024), ids, sampling, 4, limit=60, stops=("was", "had"), logprobs=0)
    for sample in samples:
        assert len(sample.logprobs) == len(sample.tokens) <= 60
        assert not ("was" in sample.text or "had" in sample.text)
    assert len({len(sample.tokens) for sample in samples}) > 1


def test_constrained_samples_each_obey(pico: LoadedModel) -> None:
    grammar = Grammar.from_regex("(red|green|blue){1,3}", pico.tokenizer, pico.stop_ids)
    ids = prompt(pico, "Name a colour.")
    for sample in drawn(pico, paged(pico, 512), ids, SamplingParams(1.0, seed=2), 5, limit=30, grammar=grammar):
        rest = sample.text
        for word in ("red", "green", "blue"):
            rest = rest.replace(word, "")
        assert sample.finish_reason == "stop" and sample.text and not rest


def test_a_prompt_that_does_not_fit_is_refused(pico: LoadedModel) -> None:
    """F1."""
    with pytest.raises(UsageError, match="room for 4"):
        drawn(pico, contiguous_engine(pico.runner, 4, 2), prompt(pico, "Hello!"), SamplingParams(), 2, limit=8)


def test_a_file_of_prompts_goes_through_together_and_comes_out_in_order(pico: LoadedModel) -> None:
    names = ("Japan", "France", "Egypt", "Peru", "Italy", "Spain")
    engine = paged(pico, 1024)
    asked = [prompt(pico, f"What is the capital of {name}?") for name in names]
    asked.insert(2, [1] * 999)
    groups = [[completion(pico, engine, ids, limit=30)] for ids in asked]
    found = [group[0] for group in complete_all(engine, groups, 3)]
    assert [reply.request.prompt for reply in found] == [tuple(ids) for ids in asked]
    assert isinstance(found[2].error, UsageError) and found.pop(2).text == ""
    alone = [completion(pico, contiguous_engine(pico.runner, 64), reply.request.prompt, limit=30) for reply in found]
    assert [reply.text for reply in found] == ["".join(reply) for reply in alone]
    assert not engine.has_work or not engine.step(), "nobody is left behind"


def test_logprobs_are_of_the_model_before_settings() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5, -3.0], [0.0, 0.0, 0.0, 0.0]])
    recorder = LogprobRecorder(2)
    recorder.record(logits, [0, 3])
    first, second = recorder.entries
    total = sum(math.exp(value) for value in (1.0, 2.0, 0.5, -3.0))
    assert first.logprob == pytest.approx(math.log(math.exp(1.0) / total), abs=1e-6)
    assert [token for token, _ in first.top] == [1, 0] and first.top[0][1] == pytest.approx(
        2 - math.log(total), abs=1e-6
    )
    assert second.logprob == pytest.approx(math.log(1 / 4)) and len(second.top) == 2


@pytest.mark.parametrize("top", [-1, 21])
def test_logprobs_are_bounded(top: int) -> None:
    with pytest.raises(UsageError, match="top_logprobs"):
        LogprobRecorder(top)
