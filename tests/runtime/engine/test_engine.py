"""Test the engine on pico: a reply is the same whole, chunked, batched, preempted and after a prefix hit."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from unittest.mock import MagicMock

import pytest
import torch

from mycli.runtime.cache.kv_cache import cache_dtype
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.replies.completion import generate, stream
from mycli.runtime.engine.request_state import RequestState
from mycli.runtime.engine.sequence import ReplyStart, Request, SequenceOutput
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.models.config import KvDtype
from mycli.runtime.sampling.grammars.state import ReplyLimits
from mycli.runtime.sampling.params import SamplingParams
from tests.support.engines import cached_prefixes, contiguous_engine, drain, together, tokens_of, whole
from tests.support.paths import PICO
from tests.support.prefix_model import PrefixModel, random_function

KINDS: tuple[KvDtype, ...] = ("auto", "int8")
PROMPT = [1, 300, 301, 302, 5, 17, 400, 12, 800, 44, 2]
OTHER = PROMPT[:6] + [9, 9, 700]
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[*KINDS, pytest.param("int4", marks=pytest.mark.slow)])
def pico(request: pytest.FixtureRequest) -> ModelRunner:
    return load_model(open_model_folder(PICO), Placement(CPU, torch.float32, kv=request.param))


def paged(runner: ModelRunner, tokens: int, block_size: int = 4, running: int = 8, **options: int) -> Engine:
    shape = CacheShape.paged(64, tokens, block_size)
    return Engine(runner, shape, runner.config.vocab_size, running=running, **options)


@pytest.fixture(scope="module")
def expected(pico: ModelRunner) -> list[int]:
    tokens, kind = list(PROMPT), cache_dtype(pico.kv, torch.float32)
    for _ in range(12):
        tokens.append(int(whole(pico.model, torch.tensor([tokens]), kind=kind)[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("chunk", [1, 2, 5, 512])
@pytest.mark.parametrize("block_size", [64, 16, 3])
def test_chunks_and_blocks_change_no_token(pico: ModelRunner, expected: list[int], chunk: int, block_size: int) -> None:
    engine = paged(pico, 64, block_size, 1, chunk=chunk)
    assert tokens_of(engine, PROMPT) == expected


def test_a_prompt_that_begins_alike_is_read_from_where_it_differs(pico: ModelRunner) -> None:
    engine = contiguous_engine(pico, 64)
    first = tokens_of(engine, PROMPT)

    def cached(prompt: list[int]) -> tuple[list[int], int]:
        tokens, timing = generate(engine, Request(tuple(prompt), limit=12))
        return tokens, timing.cached

    assert cached(OTHER) == (tokens_of(contiguous_engine(pico, 64), OTHER), 6)
    assert cached(PROMPT) == (first, 6)
    assert cached(PROMPT) == (first, len(PROMPT) - 1), "the last token is run again for its logits"
    turn = [*PROMPT, *first, 7]
    assert cached(turn) == (tokens_of(contiguous_engine(pico, 64), turn), len(turn) - 2)
    assert engine.stats.prefix_queries == 4 * len(PROMPT) - 2 + len(turn) and engine.stats.prefix_hits > 0
    engine.forget()
    assert cached(PROMPT) == (first, 0)


def test_hidden_states_of_a_prompt_that_is_preempted_half_way_are_returned_once(pico: ModelRunner) -> None:
    asked = Request(tuple(range(300, 330)), limit=0, hidden_states="all")

    def hidden(engine: Engine, number: int) -> torch.Tensor | None:
        return drain(engine)[number][-1].hidden

    alone = paged(pico, 64, chunk=4)
    expected = hidden(alone, alone.submit(asked))
    engine = paged(pico, 40, chunk=4, running=2)
    engine.submit(Request((5, 6), limit=30))
    number = engine.submit(asked)
    actual = hidden(engine, number)
    assert engine.stats.preemptions == 1
    assert expected is not None and len(expected) == 30
    torch.testing.assert_close(actual, expected)


def test_a_consumer_that_leaves_keeps_the_cache_valid(pico: ModelRunner) -> None:
    engine = contiguous_engine(pico, 64)
    consumer: Iterator[int] = stream(engine, Request(tuple(PROMPT), limit=12))
    start = list(islice(consumer, 3))
    consumer.close()  # type: ignore[attr-defined]  # a generator
    assert cached_prefixes(engine) == [[*PROMPT, *start][:-1]]
    turn = [*PROMPT, *start, 55]
    assert tokens_of(engine, turn) == tokens_of(contiguous_engine(pico, 64), turn)


def test_stop_token_ends_and_is_not_told(pico: ModelRunner) -> None:
    reply = tokens_of(contiguous_engine(pico, 64), PROMPT)
    stop = reply[4]
    outputs = drain(
        submitted(contiguous_engine(pico, 64), Request(tuple(PROMPT), limit=12, stop_ids=frozenset((stop,))))
    )
    assert [token for one in outputs[0] for token in one.tokens] == reply[: reply.index(stop)]
    assert outputs[0][-1].finish_reason == "stop"


def submitted(engine: Engine, *requests: Request) -> Engine:
    for request in requests:
        engine.submit(request)
    return engine


def test_the_context_fills_to_its_last_position_and_ends(pico: ModelRunner) -> None:
    engine = contiguous_engine(pico, len(PROMPT) + 4)
    outputs = drain(submitted(engine, Request(tuple(PROMPT))))
    tokens = [token for one in outputs[0] for token in one.tokens]
    assert tokens == tokens_of(contiguous_engine(pico, 64), PROMPT, limit=5)
    assert outputs[0][-1].finish_reason == "context"
    assert cached_prefixes(engine) == [[*PROMPT, *tokens[:-1]]]


@pytest.mark.parametrize("limit", [0, 1, 3], ids=lambda limit: f"F4-{limit}")
def test_a_reply_has_as_many_tokens_as_its_limit(pico: ModelRunner, limit: int) -> None:
    outputs = drain(submitted(contiguous_engine(pico, 64), Request(tuple(PROMPT), limit=limit)))[0]
    assert sum(len(output.tokens) for output in outputs) == limit and outputs[-1].finish_reason == "length"


def test_the_progress_of_a_prompt_is_that_of_the_longest(pico: ModelRunner) -> None:
    engine = paged(pico, 256, chunk=8)
    assert engine.tokens_read == (0, 0)
    submitted(engine, Request(tuple(PROMPT), limit=2))
    engine.step()
    assert engine.tokens_read == (8, 0)
    drain(engine)
    submitted(engine, Request(tuple(PROMPT), limit=4))
    submitted(engine, Request((7,), limit=4))
    engine.step()
    assert engine.tokens_read == (11, 10), "all but the last token of the prompt was cached"


def test_what_can_never_be_answered_is_refused_with_the_numbers(pico: ModelRunner) -> None:
    """F1, F2, F3, F8."""
    engine = contiguous_engine(pico, 10)
    for request, words in (
        (Request(tuple(PROMPT)), "11 tokens.*room for 10"),
        (Request(()), "empty"),
        (Request((1, 2), limit=10), "2 prompt tokens and 10 more do not fit the context of 10"),
        (Request((1, 2), SamplingParams(logit_bias=((4096, 1.0),))), "no token 4096"),
    ):
        with pytest.raises(UsageError, match=words):
            engine.submit(request)
    assert not engine.has_work


MIXED = [
    Request(tuple(prompt), SamplingParams(temperature, seed=seed, repetition_penalty=penalty), limit)
    for seed, (prompt, temperature, penalty, limit) in enumerate(
        [
            (PROMPT, 0.0, 1.0, 14),
            (OTHER, 0.0, 1.0, 20),
            (PROMPT[:4], 0.9, 1.0, 11),
            (PROMPT, 0.9, 1.0, 16),
            ([*PROMPT, 7, 7], 1.2, 1.3, 9),
            (OTHER[:7], 0.0, 1.3, 20),
            (PROMPT, 0.9, 1.0, 1),
            ([5] * 30, 0.9, 1.0, 12),
        ]
    )
]


@pytest.fixture(scope="module")
def alone(pico: ModelRunner) -> list[list[int]]:
    return [tokens_of(contiguous_engine(pico, 64), one.prompt, one.limit, one.sampling) for one in MIXED]


@pytest.mark.parametrize("tokens, preempted", [(512, False), (68, True)], ids=["room", "preempted"])
def test_replies_together_are_the_replies_alone(
    pico: ModelRunner, alone: list[list[int]], tokens: int, preempted: bool
) -> None:
    """G22, G40, G43: greedy and seeded, with penalties, after prefix hits and preemptions."""
    engine = paged(pico, tokens)
    assert together(engine, MIXED) == alone
    assert together(engine, MIXED[::-1]) == alone[::-1]
    assert (engine.stats.preemptions > 0) == preempted and engine.stats.prefix_hits > 0
    assert (engine.stats.running, engine.stats.waiting, engine.stats.cache_used) == (0, 0, 0)


def test_what_others_left_in_a_block_is_read_by_nobody(pico: ModelRunner, alone: list[list[int]]) -> None:
    """G33: replies in blocks that hold stale data equal those in a new cache."""
    engine = paged(pico, 68)
    for layer in range(pico.config.layers):
        for stored in engine.cache.all(layer):
            stored.data.fill_(30_000 if stored.data.is_floating_point() else 0x5B)
            if stored.scales is not None:
                stored.scales.fill_(1e4)
    assert together(engine, MIXED) == alone


def test_cancelling_frees_within_a_step_and_others_go_on(pico: ModelRunner) -> None:
    """G19."""
    engine = paged(pico, 256)
    numbers = [engine.submit(request) for request in MIXED[:3]]
    engine.step()
    used = engine.stats.cache_used
    engine.cancel(numbers[1])
    assert engine.stats.cache_used < used
    outputs = engine.step()
    assert [one.finish_reason for one in outputs if one.sequence == numbers[1]] == ["cancelled"]
    rest = drain(engine)
    assert numbers[1] not in rest and {rest[number][-1].finish_reason for number in (numbers[0], numbers[2])} == {
        "length"
    }
    engine.cancel(numbers[0])  # already ended: no effect
    assert not engine.has_work


def test_waiting_ends_at_the_deadline(pico: ModelRunner) -> None:
    """G24."""
    now = [0.0]
    engine = Engine(pico, CacheShape.contiguous(64), 4096, clock=lambda: now[0])
    submitted(engine, MIXED[0])
    engine.step()
    submitted(engine, replace(MIXED[1], deadline=2.0))
    now[0] = 2.0
    assert [one.finish_reason for one in engine.step() if one.sequence == 1] == ["deadline"]
    assert drain(engine)[0][-1].finish_reason == "length"


def test_a_resumed_reply_that_waits_too_long_ends_without_a_new_token(pico: ModelRunner) -> None:
    now = [0.0]
    engine = Engine(pico, CacheShape.contiguous(64), 4096, clock=lambda: now[0])
    submitted(engine, MIXED[0])
    engine.step()
    number = engine.submit(Request(tuple(PROMPT), limit=30, deadline=2.0, start=ReplyStart(0, (5, 6), numbers=2)))
    now[0] = 2.0
    (ended,) = [output for output in engine.step() if output.sequence == number]
    assert (ended.finish_reason, ended.tokens) == ("deadline", ())


def test_a_preempted_reply_ends_at_the_deadline_with_the_tokens_it_has(pico: ModelRunner) -> None:
    now = [0.0]
    engine = Engine(pico, CacheShape(64, 6, 8), 4096, running=2, clock=lambda: now[0])
    first = engine.submit(Request(tuple(PROMPT), limit=30))
    second = engine.submit(Request(tuple(PROMPT[::-1]), limit=30, deadline=5.0))
    outputs: dict[int, list[SequenceOutput]] = {first: [], second: []}
    while not engine.stats.waiting or not engine.stats.preemptions:
        for output in engine.step():
            outputs[output.sequence].append(output)
    now[0] = 5.0
    (ended,) = [output for output in engine.step() if output.sequence == second]
    assert (ended.finish_reason, ended.tokens) == ("length", ())
    assert 1 < sum(len(output.tokens) for output in outputs[second]) < 30
    assert drain(engine)[first][-1].finish_reason == "length"


def test_all_replies_to_a_prompt_that_waited_too_long_end_without_a_token(pico: ModelRunner) -> None:
    now = [0.0]
    engine = Engine(pico, CacheShape.contiguous(64), 4096, clock=lambda: now[0])
    engine.submit_replies(Request(tuple(PROMPT), limit=4, deadline=2.0), 3)
    assert engine.stats.waiting == 3
    now[0] = 2.0
    outputs = [output for replies in drain(engine).values() for output in replies]
    assert [(output.finish_reason, output.tokens) for output in outputs] == [("deadline", ())] * 3


@pytest.mark.parametrize("deadline", [None, 5.0])
def test_a_grammar_ends_the_reply_by_the_deadline(deadline: float | None) -> None:
    def clock() -> float:
        return 100.0

    grammar = MagicMock(**{"start.return_value": None})
    RequestState.start(Request((1,), grammar=grammar, deadline=deadline), 4096, CPU, 30, clock)
    grammar.start.assert_called_once_with(ReplyLimits(30, None if deadline is None else 105.0, clock))


def test_forks_come_before_the_first_token(pico: ModelRunner) -> None:
    engine = paged(pico, 256)
    number = engine.submit(MIXED[0])
    engine.step()
    with pytest.raises(ValueError, match="has sampled"):
        engine.branch(number, 1)
    engine.cancel(number)
    with pytest.raises(ValueError, match="has ended"):
        engine.branch(number, 1)


@pytest.mark.parametrize("running", [2, 8])
def test_replies_to_one_prompt_count_the_same_cached_tokens(running: int, pico: ModelRunner) -> None:
    engine = paged(pico, 256, running=running)
    for cached in (0, len(PROMPT) - 1):  # each reply computes the last token again
        engine.submit_replies(Request(tuple(PROMPT), limit=3), 3)
        counts = {output.cached_tokens for outputs in drain(engine).values() for output in outputs}
        assert counts == {cached}


def test_a_fork_survives_the_reply_that_it_branched_from(pico: ModelRunner) -> None:
    engine = paged(pico, 256)
    number = engine.submit(MIXED[0])
    forks = engine.branch(number, 2)
    engine.cancel(number)
    outputs = drain(engine)
    expected = tokens_of(contiguous_engine(pico, 64), PROMPT, 14)
    assert [[token for one in outputs[fork] for token in one.tokens] for fork in forks] == [expected] * 2


@pytest.mark.parametrize("chunk", [3, 512])
def test_logprobs_of_a_prompt_are_those_of_the_whole_text(pico: ModelRunner, chunk: int) -> None:
    kind = cache_dtype(pico.kv, torch.float32)
    expected = whole(pico.model, torch.tensor([PROMPT]), kind=kind)[0].log_softmax(-1)
    engine = contiguous_engine(pico, 64, chunk=chunk)
    tokens_of(engine, PROMPT)  # cached tokens have no logits, so they are recomputed
    outputs = drain(submitted(engine, Request(tuple(PROMPT), limit=0, logprobs=2, prompt_logprobs=True)))[1]
    found = [one for output in outputs for one in output.prompt_logprobs]
    assert [one.token for one in found] == PROMPT[1:]
    for place, one in enumerate(found):
        assert one.logprob == pytest.approx(float(expected[place, one.token]), abs=1e-4)
        assert [token for token, _ in one.top] == expected[place].topk(2).indices.tolist()


def test_logits_that_are_no_numbers_end_one_reply_and_no_other() -> None:
    """F5: the cached tokens of the failed reply are not reused either."""
    random = random_function(0, 8)

    def function(text: tuple[int, ...]) -> torch.Tensor:
        return random(text) * (torch.nan if text[0] == 7 and len(text) == 6 else 1)

    model = PrefixModel(function, 8)
    engine = paged(ModelRunner(model), 64)
    outputs = drain(submitted(engine, Request((7, 1, 2), limit=9), Request((3, 1, 2), limit=9)))
    assert sum(len(one.tokens) for one in outputs[0]) == 3 and isinstance(outputs[0][-1].error, ModelError)
    assert outputs[0][-1].finish_reason == "error" and outputs[1][-1].finish_reason == "length"
    assert [text[0] for text in cached_prefixes(engine)] == [3]


def test_a_cache_of_its_own_size_is_taken_once(pico: ModelRunner) -> None:
    """F11: blocks are allocated with the engine, so memory cannot run out during a reply."""
    engine = contiguous_engine(pico, 64)

    def addresses() -> list[tuple[int, int]]:
        tensors = [*engine.cache._data, *engine.cache._scales]
        return [(tensor.data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors]

    before = addresses()
    assert sum(size for _, size in before) == engine.cache.nbytes
    tokens_of(engine, PROMPT, limit=None)
    assert addresses() == before


def test_timing_counts_what_happened(pico: ModelRunner) -> None:
    tokens, timing = generate(contiguous_engine(pico, 64), Request(tuple(PROMPT), limit=5))
    assert (timing.prompt, timing.generated, len(tokens)) == (len(PROMPT), 5, 5)
    assert timing.first_token_seconds > 0 and timing.tokens_per_second > 0
