"""The generator on pico: prefix reuse, chunks, batches, stopping early and full contexts change no token."""

from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.generate import Session
from mycli.runtime.engine.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.errors import UsageError
from mycli.runtime.models.config import Kv
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from tests.support.paths import PICO

KINDS: tuple[Kv, ...] = ("auto", "int8")
PROMPT = [1, 300, 301, 302, 5, 17, 400, 12, 800, 44, 2]
OTHER = PROMPT[:6] + [9, 9, 700]


@pytest.fixture(scope="module", params=KINDS)
def pico(request: pytest.FixtureRequest) -> ModelRunner:
    return load_model(ModelFolder.open(PICO), Placement(torch.device("cpu"), torch.float32, kv=request.param))


def greedy(session: Session, prompt: list[int], limit: int = 12) -> list[int]:
    sampler = Sampler(SamplingParams(), session.runner.config.vocab_size, session.device)
    return [tokens[0] for tokens in session.generate(prompt, sampler, limit)]


def slow(runner: ModelRunner, prompt: list[int], limit: int = 12) -> list[int]:
    """Without a cache: the whole sequence again for every token."""
    tokens = list(prompt)
    for _ in range(limit):
        logits = Session(runner, 64).prefill(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("chunk", [1, 2, 5, 512])
def test_chunks_and_cache_change_no_token(pico: ModelRunner, chunk: int) -> None:
    assert greedy(Session(pico, 64, chunk=chunk), PROMPT) == slow(pico, PROMPT)


def test_a_prompt_that_begins_alike_is_prefilled_from_where_it_differs(pico: ModelRunner) -> None:
    session = Session(pico, 64)
    first = greedy(session, PROMPT)
    assert session.timing.cached == 0
    assert greedy(session, OTHER) == greedy(Session(pico, 64), OTHER)
    assert (session.timing.prompt, session.timing.cached) == (len(OTHER), 6)
    assert greedy(session, PROMPT) == first
    assert greedy(session, PROMPT) == first
    assert session.timing.cached == len(PROMPT) - 1, "the last token is run again for its logits"
    turn = PROMPT + first
    assert greedy(session, [*turn, 7]) == greedy(Session(pico, 64), [*turn, 7])


def test_a_consumer_that_stops_early_leaves_a_valid_cache(pico: ModelRunner) -> None:
    session = Session(pico, 64)
    sampler = Sampler(SamplingParams(), pico.config.vocab_size, pico.device)
    stream: Iterator[list[int]] = session.generate(PROMPT, sampler, 12)
    start = [tokens[0] for tokens in islice(stream, 3)]
    assert greedy(session, [*PROMPT, *start, 55]) == greedy(Session(pico, 64), [*PROMPT, *start, 55])


def test_sequences_of_a_batch_equal_one_alone(pico: ModelRunner) -> None:
    session = Session(pico, 64, sequences=3)
    sampler = Sampler(SamplingParams(), pico.config.vocab_size, pico.device, sequences=3)
    drawn = list(session.generate(PROMPT, sampler, 12))
    assert drawn == [[token] * 3 for token in greedy(Session(pico, 64), PROMPT)]


def test_stop_token_ends_and_is_not_yielded(pico: ModelRunner) -> None:
    reply = greedy(Session(pico, 64), PROMPT)
    sampler = Sampler(SamplingParams(), pico.config.vocab_size, pico.device)
    stop = reply[4]
    got = [t[0] for t in Session(pico, 64).generate(PROMPT, sampler, 12, stop=frozenset((stop,)))]
    assert got == reply[: reply.index(stop)]


def test_the_context_fills_to_its_last_position_and_ends(pico: ModelRunner) -> None:
    session = Session(pico, len(PROMPT) + 4)
    assert greedy(session, PROMPT, limit=99) == greedy(Session(pico, 64), PROMPT, limit=5)
    assert session.cache.length == session.context


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(pico: ModelRunner) -> None:
    with pytest.raises(UsageError, match="11 tokens.*room for 10"):
        greedy(Session(pico, 10), PROMPT)


def test_an_empty_prompt_is_refused(pico: ModelRunner) -> None:
    with pytest.raises(UsageError, match="empty"):
        greedy(Session(pico, 10), [])


def test_timing_counts_what_happened(pico: ModelRunner) -> None:
    session = Session(pico, 64)
    greedy(session, PROMPT, limit=5)
    assert (session.timing.prompt, session.timing.generated) == (len(PROMPT), 5)
    assert session.timing.first_token_seconds > 0 and session.timing.tokens_per_second > 0


def test_decoding_takes_no_memory_for_the_cache(pico: ModelRunner) -> None:
    """F11: the pool is taken when the session begins, so a reply cannot run out of it half way."""
    session = Session(pico, 64)

    def addresses() -> set[tuple[int, int]]:
        found = (value for value in vars(session.cache).values() if isinstance(value, torch.Tensor))
        return {(tensor.data_ptr(), tensor.untyped_storage().nbytes()) for tensor in found}

    before, held = addresses(), session.cache.nbytes
    assert sum(size for _, size in before) == held
    greedy(session, PROMPT, limit=99)
    assert session.cache.length == session.context
    assert addresses() == before and session.cache.nbytes == held
