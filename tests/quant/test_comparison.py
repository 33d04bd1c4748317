"""Test two models on the same prompts: the divergence is that of their logits, and differing replies are named."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from mycli.quant import comparison
from mycli.quant.comparison import (
    Calls,
    ComparedPrompt,
    ComparedReply,
    Interval,
    ModelReplies,
    as_prompts,
    compare_replies,
    measure_divergence,
    read_reply,
    reply_to_all,
)
from mycli.quant.layer_streaming import StreamedModel
from mycli.runtime.cache.batch import Chunk
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.replies.opened_model import OpenedModel
from mycli.runtime.errors import UsageError
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.open import open_model
from mycli.runtime.tokenizer.chat_template import Tool
from mycli.runtime.tokenizer.parsing.tool_formats import HERMES
from tests.support.models import CPU, random_model
from tests.support.paths import PICO

PROMPTS = as_prompts([("a", "What is the capital of Japan?", []), ("b", "Tell me a story about a boat.", [])])
DRAFT = PICO.parent / "pico-draft"
EXACT = EngineConfig(device="cpu", dtype="float32", context=256)


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[OpenedModel, OpenedModel]]:
    with open_model("pico", EXACT, offline=True) as first, open_model("pico-draft", EXACT, offline=True) as second:
        yield first, second


def streamed(*names: str) -> list[StreamedModel]:
    return [StreamedModel(open_model_folder(PICO.parent / name), CPU) for name in names]


def logits(opened: OpenedModel, tokens: list[int]) -> torch.Tensor:
    runner = opened.model.runner
    cache = runner.make_cache(CacheShape.contiguous(len(tokens)))
    return runner.run([Chunk(tokens, 0, (0,), len(tokens))], cache).double().log_softmax(1)


def test_the_divergence_is_that_of_the_logits_of_both_engines(models: tuple[OpenedModel, OpenedModel]) -> None:
    """Prompts of different lengths in one batch; an ended reply counts its end token, another does not."""
    replies = reply_to_all(models[0], PROMPTS, 12).replies
    assert [reply.ended for reply in replies] == [True, False] and len(replies[1].tokens) == 12
    measured = measure_divergence(*streamed("pico", "pico-draft"), replies)
    for reply, (kl, same) in zip(replies, measured, strict=True):
        text = [*reply.prompt, *reply.tokens]
        reference, candidate = (logits(opened, text)[len(reply.prompt) - 1 :] for opened in models)
        expected = (reference.exp() * (reference - candidate)).sum(1)[: len(reply.tokens) + reply.ended]
        assert torch.allclose(kl.double(), expected, rtol=1e-3, atol=1e-5)
        assert torch.equal(same.bool(), (reference.argmax(1) == candidate.argmax(1))[: len(kl)])


def test_the_divergence_is_the_same_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five replies of different lengths: the longest alone, then two and two."""
    lengths = (3, 9, 5, 2, 7)
    replies = [ComparedReply((5, 6), tuple(range(9, 9 + length)), "", length % 2 == 0, ()) for length in lengths]
    pair = streamed("pico", "pico-draft")
    whole = measure_divergence(*pair, replies)
    batches: list[tuple[int, ...]] = []
    hidden = StreamedModel.hidden

    def recorded(self: StreamedModel, tokens: torch.Tensor, progress: Any) -> torch.Tensor:
        batches.append(tuple(tokens.shape))
        return hidden(self, tokens, progress)

    monkeypatch.setattr(StreamedModel, "hidden", recorded)
    row = 4 * sum(model.config.stream_width for model in pair)
    monkeypatch.setattr(comparison, "STREAM_BYTES", row * 14)
    parts = measure_divergence(*pair, replies)
    assert batches[::2] == batches[1::2] == [(1, 11), (1, 9), (2, 7), (1, 4)]
    for (kl, same), (expected, agreed) in zip(parts, whole, strict=True):
        assert torch.allclose(kl, expected, atol=1e-5) and torch.equal(same, agreed)


def test_a_model_is_its_own_equal(models: tuple[OpenedModel, OpenedModel]) -> None:
    replies = [reply_to_all(models[0], PROMPTS, 8) for _ in range(2)]
    result = compare_replies(PROMPTS, *replies, measure_divergence(*streamed("pico", "pico"), replies[0].replies))
    assert (result.changed_replies, result.changed_answers, result.changed_calls) == (0, 0, 0)
    assert result.kl.value == result.kl.high == 0 and result.same_top1 == 1


def reply(tokens: tuple[int, ...], text: str = "", calls: tuple[tuple[str, str], ...] = ()) -> ComparedReply:
    return ComparedReply((1, 2), tokens, text, True, calls)


@pytest.mark.parametrize(
    ("ours", "theirs", "divergence", "same_answer", "calls"),
    [
        (reply((1, 2, 3), "Yes"), reply((1, 2, 3), "Yes"), None, True, "none"),
        (reply((1, 2, 3), "Yes"), reply((1, 5, 3), " yes\n"), 1, True, "none"),
        (reply((1, 2), "No"), reply((1, 2, 3), "No, no"), 2, False, "none"),
        (reply((1,), "", (("f", "{}"),)), reply((1,), "", (("f", "{}"),)), None, True, "same"),
        (reply((1,), "", (("f", "{}"),)), reply((2,), "", (("g", "{}"),)), 0, True, "changed"),
        (reply((1,), "", (("f", "{}"),)), reply((2,)), 0, True, "lost"),
        (reply((1,)), reply((2,), "", (("f", "{}"),)), 0, True, "new"),
    ],
    ids=["same", "case", "longer", "call", "other-call", "lost-call", "new-call"],
)
def test_differences_are_named(
    ours: ComparedReply, theirs: ComparedReply, divergence: int | None, same_answer: bool, calls: str
) -> None:
    divergences = [(torch.tensor([0.25, 0.75]), torch.tensor([1.0, 0.0]))]
    sides = [ModelReplies((side,), (seconds,), 1) for side, seconds in ((ours, 0.4), (theirs, 0.2))]
    (row,) = (result := compare_replies(PROMPTS[:1], *sides, divergences)).prompts
    assert (row.divergence, row.same_answer, row.calls) == (divergence, same_answer, calls)
    assert (row.kl, row.same_top1, result.speed.value) == (0.5, 0.5, pytest.approx(2.0))
    assert result.changed_calls == (calls in ("changed", "lost", "new"))


def test_the_interval_holds_the_mean_of_the_prompts() -> None:
    sides = [ModelReplies(tuple(reply((1,)) for _ in range(40)), (1.0,) * 40, 1)] * 2
    values = [0.01 * (index % 5) for index in range(40)]
    divergences = [(torch.tensor([value]), torch.tensor([1.0])) for value in values]
    kl = compare_replies([PROMPTS[0]] * 40, *sides, divergences).kl
    assert kl.value == pytest.approx(0.02) and kl.low == pytest.approx(0.0156, abs=0.002)
    assert kl.high == pytest.approx(0.0244, abs=0.002)


def test_twice_and_half_as_fast_is_as_fast() -> None:
    sides = [ModelReplies((reply((1,)),) * 2, seconds, 1) for seconds in ((1.0, 1.0), (0.5, 2.0))]
    divergence = torch.tensor([0.0]), torch.tensor([1.0])
    speed = compare_replies([PROMPTS[0]] * 2, *sides, [divergence] * 2).speed
    assert (speed.low, speed.value, speed.high) == pytest.approx((0.5, 1.0, 2.0))


def test_a_single_prompt_has_no_interval() -> None:
    sides = [ModelReplies((reply((1,)),), (1.0,), 1)] * 2
    result = compare_replies(PROMPTS[:1], *sides, [(torch.tensor([0.01]), torch.tensor([1.0]))])
    assert (result.kl.low, result.kl.high, result.speed) == (None, None, Interval(1.0, None, None))


TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}},)


def test_calls_are_read_by_name_and_value_and_reasoning_is_no_answer(models: tuple[OpenedModel, OpenedModel]) -> None:
    tokenizer = models[0].tokenizer
    call = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
    same = '<tool_call>\n{"arguments": {"a": 1, "b": 2}, "name": "add"}\n</tool_call>'

    def read(text: str, tools: Sequence[Tool] = TOOLS) -> tuple[str, Calls]:
        return read_reply(tokenizer, [1, 2], tokenizer.encode(text, add_special=False), tools, HERMES)

    expected = (("add", '{"a": 1, "b": 2}'),)
    assert read(call)[1] == read(same)[1] == expected
    assert read("<think>a or b</think>\nFour.") == ("Four.", ()) and read(call, ())[1] == ()


def test_tools_reach_the_prompt(models: tuple[OpenedModel, OpenedModel]) -> None:
    plain = PROMPTS[0]
    with_tools = ComparedPrompt(plain.name, plain.messages, TOOLS)
    tokenizer = models[0].tokenizer
    assert '"add"' in tokenizer.decode(with_tools.encode(tokenizer)) and plain.encode(tokenizer) != with_tools.encode(
        tokenizer
    )


def test_other_vocabularies_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = random_model(tmp_path_factory.mktemp("model") / "m", vocab_size=5000)
    other = StreamedModel(open_model_folder(folder), CPU)
    with pytest.raises(UsageError, match="vocabularies of"):
        measure_divergence(streamed("pico")[0], other, [reply((1,))])
