"""Samples of one prefill are what single replies are; logprobs are the model's own."""

import math

import pytest
import torch

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.completion import Completion, LoadedModel, draw_samples
from mycli.runtime.engine.generate import Session
from mycli.runtime.errors import UsageError
from mycli.runtime.sampling.grammar import Grammar
from mycli.runtime.sampling.logprobs import LogprobRecorder
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.tokenizer.chat_template import Message
from tests.support.paths import PICO


@pytest.fixture(scope="module")
def pico() -> LoadedModel:
    return LoadedModel.load(ModelFolder.open(PICO), Placement(torch.device("cpu"), torch.float32))


def prompt(pico: LoadedModel, text: str) -> list[int]:
    return pico.tokenizer.chat([Message("user", text)])


def test_greedy_samples_are_the_greedy_reply(pico: LoadedModel) -> None:
    ids = prompt(pico, "What is the capital of Japan?")
    session = Session(pico.runner, 128)
    for sample in draw_samples(pico, session, ids, SamplingParams(), count=3, limit=40, top=1):
        reply = Completion(pico, session, ids, SamplingParams(), limit=40)
        assert ("".join(reply), reply.tokens, reply.finish_reason) == (sample.text, sample.tokens, sample.finish_reason)
        assert [one.token for one in sample.logprobs] == sample.tokens
        assert all(one.top[0] == (one.token, one.logprob) for one in sample.logprobs)


def test_the_prompt_is_prefilled_once(pico: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass over more than one token has one sequence; the samples only ever add a token each."""
    shapes: list[tuple[int, ...]] = []
    forward = Session._forward

    def counting(self: Session, tokens: torch.Tensor, logits: bool) -> torch.Tensor:
        shapes.append(tuple(tokens.shape))
        return forward(self, tokens, logits)

    monkeypatch.setattr(Session, "_forward", counting)
    ids = prompt(pico, "Tell me a story.")
    draw_samples(pico, Session(pico.runner, 64), ids, SamplingParams(1.0, seed=1), count=4, limit=5)
    assert shapes == [(1, len(ids))] + [(4, 1)] * 5


def test_samples_differ_end_alone_and_repeat_by_seed(pico: LoadedModel) -> None:
    ids = prompt(pico, "Tell me a story.")

    def draw(seed: int) -> list[tuple[str, str | None]]:
        samples = draw_samples(
            pico,
            Session(pico.runner, 256),
            ids,
            SamplingParams(1.0, seed=seed),
            count=4,
            limit=60,
            stops=("was", "had"),
            top=0,
        )
        for sample in samples:
            assert len(sample.logprobs) == len(sample.tokens) <= 60
            assert not ("was" in sample.text or "had" in sample.text)
        return [(sample.text, sample.finish_reason) for sample in samples]

    first = draw(5)
    assert first == draw(5) != draw(6)
    assert len({text for text, _ in first}) > 1


def test_constrained_samples_each_obey(pico: LoadedModel) -> None:
    grammar = Grammar.from_regex("(red|green|blue){1,3}", pico.tokenizer, pico.stop_ids)
    ids = prompt(pico, "Name a colour.")
    samples = draw_samples(
        pico, Session(pico.runner, 64), ids, SamplingParams(1.0, seed=2), count=5, limit=30, grammar=grammar
    )
    for sample in samples:
        rest = sample.text
        for word in ("red", "green", "blue"):
            rest = rest.replace(word, "")
        assert sample.finish_reason == "stop" and sample.text and not rest


def test_a_prompt_that_does_not_fit_is_refused(pico: LoadedModel) -> None:
    """F1."""
    with pytest.raises(UsageError, match="room for 4"):
        draw_samples(pico, Session(pico.runner, 4), prompt(pico, "Hello!"), SamplingParams(), count=2, limit=8)


def test_logprobs_are_of_the_model_before_settings() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5, -3.0], [0.0, 0.0, 0.0, 0.0]])
    recorder = LogprobRecorder(2, sequences=2)
    recorder.record(logits, torch.tensor([[0], [3]]))
    (first,), (second,) = recorder.rows
    total = sum(math.exp(value) for value in (1.0, 2.0, 0.5, -3.0))
    assert first.logprob == pytest.approx(math.log(math.exp(1.0) / total), abs=1e-6)
    assert [token for token, _ in first.top] == [1, 0] and first.top[0][1] == pytest.approx(
        2 - math.log(total), abs=1e-6
    )
    assert second.logprob == pytest.approx(math.log(1 / 4)) and len(second.top) == 2


@pytest.mark.parametrize("top", [-1, 21])
def test_logprobs_are_bounded(top: int) -> None:
    with pytest.raises(UsageError, match="likeliest tokens"):
        LogprobRecorder(top)
