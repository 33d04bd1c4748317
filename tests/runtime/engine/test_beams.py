"""Test beam search against transformers' `generate(num_beams=N)`, alone, batched, and when blocks run out."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.beams import BeamSearch, Continuation, beam_room, check_beams
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.sequence import BeamOptions, Request
from mycli.runtime.errors import UsageError
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.speculative.draft_length import FixedDraftLength
from mycli.runtime.speculative.lookup import PromptLookup
from mycli.runtime.speculative.speculator import ProposerSpeculator
from mycli.runtime.utils.dtypes import FLOATS
from tests.support.engines import drain
from tests.support.grids import chosen
from tests.support.paths import PICO

PROMPTS = ("Once upon a time", "The capital of Japan is", "Leo has a dog. His dog")
CASES: list[tuple[int, int, float, Any]] = [
    (width, limit, penalty, early)
    for width in (1, 2, 3, 5, 8)
    for limit in (1, 6, 24)
    for penalty in (1.0, 0.0, 2.0, -1.0)
    for early in (False, True, "never")
]
QUICK = [(2, 6, 1.0, False), (3, 24, 1.0, True), (5, 24, 2.0, "never"), (4, 12, 0.0, False), (3, 24, -1.0, False)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    folder = open_model_folder(PICO)
    return LoadedModel.load(folder, EngineConfig(device="cpu", dtype=FLOATS["fp32"]).place(folder.config))


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32)


def engine(loaded: LoadedModel, blocks: int = 64, running: int = 8, drafts: bool = False) -> Engine:
    speculator = ProposerSpeculator(PromptLookup(), lambda: FixedDraftLength(3)) if drafts else None
    shape = CacheShape.paged(128, blocks * 8, 8)
    return Engine(loaded.runner, shape, loaded.vocabulary_size, running=running, speculator=speculator)


def ids(loaded: LoadedModel, text: str) -> tuple[int, ...]:
    return tuple(loaded.tokenizer.encode(text, add_special=True))


def expected(
    reference: Any, loaded: LoadedModel, prompt: tuple[int, ...], case: tuple[int, int, float, Any]
) -> list[list[int]]:
    width, limit, penalty, early = case
    made = reference.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=limit,
        length_penalty=penalty,
        early_stopping=early,
        do_sample=False,
        eos_token_id=sorted(loaded.stop_ids),
        pad_token_id=3,
        temperature=None,
        top_p=None,
    )
    replies = []
    for row in made[:, len(prompt) :].tolist():
        end = next((at for at, token in enumerate(row) if token in loaded.stop_ids), len(row))
        replies.append(row[:end])
    return replies


def request(loaded: LoadedModel, prompt: tuple[int, ...], case: tuple[int, int, float, Any]) -> Request:
    width, limit, penalty, early = case
    return Request(prompt, limit=limit, stop_ids=loaded.stop_ids, beams=BeamOptions(width, penalty, early))


def searched(engine: Engine, requests: list[Request]) -> list[list[list[int]]]:
    groups = [engine.submit_replies(one, one.beams.width if one.beams else 1) for one in requests]
    outputs = drain(engine)
    assert not engine.scheduler.has_work and not engine.scheduler.running
    return [[[token for part in outputs[number] for token in part.tokens] for number in group] for group in groups]


@pytest.mark.parametrize(
    "case", chosen([(case,) for case in dict.fromkeys(CASES + QUICK)], quick=[(case,) for case in QUICK])
)
def test_replies_are_those_of_transformers(
    case: tuple[int, int, float, Any], loaded: LoadedModel, reference: Any
) -> None:
    machine = engine(loaded)
    for text in PROMPTS:
        prompt = ids(loaded, text)
        assert searched(machine, [request(loaded, prompt, case)])[0] == expected(reference, loaded, prompt, case)


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> list[tuple[Request, list[list[int]]]]:
    """Three beam searches and a sampled request, each with its replies in an engine of its own."""
    cases = [(4, 20, 1.0, False), (3, 24, 2.0, True), (5, 12, 0.0, "never")]
    requests = [request(loaded, ids(loaded, text), case) for text, case in zip(PROMPTS, cases, strict=True)]
    requests.insert(1, Request(requests[0].prompt, SamplingParams(temperature=0.8, seed=1), 30, loaded.stop_ids))
    return [(search, searched(engine(loaded), [search])[0]) for search in requests]


@pytest.mark.parametrize(("blocks", "running"), [(64, 8), (64, 32), (24, 8), (21, 5)])
def test_searches_beside_each_other_and_without_room_are_the_same(
    blocks: int, running: int, loaded: LoadedModel, alone: list[tuple[Request, list[list[int]]]]
) -> None:
    machine = engine(loaded, blocks, running, drafts=True)
    free = machine.scheduler.pool.available
    assert searched(machine, [search for search, _ in alone]) == [replies for _, replies in alone]
    assert machine.scheduler.pool.available == free
    if blocks == 21:
        assert machine.stats.preemptions


def test_beams_share_the_blocks_of_their_prompt(loaded: LoadedModel) -> None:
    machine = engine(loaded)
    prompt = ids(loaded, "Once upon a time there was a dog. " * 8)[:80]
    machine.submit(request(loaded, prompt, (4, 16, 1.0, False)))
    used = 0
    while machine.has_work:
        machine.step()
        used = max(used, machine.stats.cache_used)
    assert 10 < used <= 10 + 4 * 3  # ten for the prompt, and at most three per beam


def test_cancelling_one_reply_ends_its_search(loaded: LoadedModel) -> None:
    machine = engine(loaded)
    numbers = machine.submit_replies(request(loaded, ids(loaded, PROMPTS[0]), (4, 24, 1.0, False)), 2)
    for _ in range(3):
        machine.step()
    machine.cancel(numbers[1])
    outputs = drain(machine)
    assert [outputs[number][-1].finish_reason for number in numbers] == ["cancelled", "cancelled"]
    assert not machine.scheduler.running and not machine._states


@pytest.mark.parametrize(
    ("beams", "count", "limit", "cause"),
    [
        (BeamOptions(4), 5, 8, "5 replies need as many beams"),
        (BeamOptions(9), 1, 8, "at most 8 sequences"),
        (BeamOptions(8), 1, 100, "8 beams of 100 tokens"),
    ],
)
def test_beams_that_do_not_fit_are_refused(
    beams: BeamOptions, count: int, limit: int, cause: str, loaded: LoadedModel
) -> None:
    machine = engine(loaded)
    with pytest.raises(UsageError, match=cause):
        machine.submit_replies(Request(ids(loaded, PROMPTS[0]), limit=limit, beams=beams), count)
    assert not machine.has_work


@pytest.mark.parametrize("fields", [(0,), (65,), (2, float("nan")), (2, 11.0)])
def test_options_out_of_range_are_refused(fields: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError):
        BeamOptions(*fields)


STOP = frozenset((4,))
FIRST = torch.tensor([[-1.0, -2.0, -9.0, -9.0, -0.5]])


@pytest.mark.parametrize(("early", "ends"), [(True, True), (False, True), ("never", False)])
def test_a_search_ends_when_its_rule_says_so(early: Any, ends: bool) -> None:
    """Later beams are less likely, but with a penalty above 1 a long one may still become the best."""
    search = BeamSearch(BeamOptions(2, 2.0 if early == "never" else 1.0, early), 40, STOP)
    assert search.extend(FIRST) == [Continuation(0, 0), Continuation(0, 1)]
    assert [beam.tokens for beam in search.finished] == [(4,)]
    following = torch.full((2, 5), -5.0)
    following[:, 4] = -0.1
    assert (search.extend(following) == []) == ends
    best = [(0, 4), (4,)] if early == "never" else [(4,), (0, 4)]
    assert [beam.tokens for beam in search.finished] == best


def test_a_beam_that_cannot_be_replaced_is_not_scored_past_the_limit() -> None:
    search = BeamSearch(BeamOptions(2), 1, STOP)
    assert search.extend(FIRST) == [] and [beam.tokens for beam in search.finished] == [(4,), (0,)]


def test_beams_need_as_many_sequences_replies_and_tokens() -> None:
    check_beams(BeamOptions(4), 4, 4, 8, 1)
    check_beams(BeamOptions(4), 4, 4, 12, 2)
    for case, words in (
        ((5, 5, 8, 1), "5 replies need as many beams"),
        ((4, 3, 8, 1), "at most 3 sequences"),
        ((4, 4, 7, 1), "vocabulary of 7 tokens"),
        ((4, 4, 11, 2), "vocabulary of 11 tokens"),
    ):
        with pytest.raises(UsageError, match=words):
            check_beams(BeamOptions(4), *case)


def test_the_room_of_beams_is_what_is_left_of_the_cache_after_the_prompt() -> None:
    """The cache has 9 blocks of 4 tokens. The prompt of 10 fills 2 blocks, which both beams share.

    Each beam has 3 blocks of its own, and the last 2 tokens of the prompt are in the first of them.
    """
    prompt = tuple(range(10))
    assert beam_room(Request(prompt, limit=10), BeamOptions(2), 9, 4) == 10
    assert beam_room(Request(prompt), BeamOptions(2), 9, 4) == 10
    assert beam_room(Request(prompt[:1]), BeamOptions(4), 4, 2) == 1
    for request, blocks, cause in (
        (Request(prompt, limit=11), 9, "2 beams of 11 tokens after 10 prompt tokens do not fit the cache of 36 tokens"),
        (Request(prompt), 3, "2 beams of a token"),
    ):
        with pytest.raises(UsageError, match=cause):
            beam_room(request, BeamOptions(2), blocks, 4)


@pytest.mark.parametrize("early", [False, True, "never"])
def test_a_search_ends_at_the_deadline_with_the_beams_it_has(loaded: LoadedModel, early: Any) -> None:
    now = [0.0]
    prompt, shape = ids(loaded, PROMPTS[0]), CacheShape.paged(128, 512, 8)
    machine = Engine(loaded.runner, shape, loaded.vocabulary_size, running=8, clock=lambda: now[0])
    search = replace(request(loaded, prompt, (3, 40, 1.0, early)), deadline=9.0)
    numbers = machine.submit_replies(search, 2)
    for _ in range(5):
        assert all(output.finish_reason is None for output in machine.step())
    now[0] = 9.0
    outputs = {output.sequence: output for output in machine.step()}
    limited = searched(engine(loaded), [replace(search, limit=6, deadline=None)])[0][:2]
    assert [list(outputs[number].tokens) for number in numbers] == limited
    assert {outputs[number].finish_reason for number in numbers} == {"length"} and not machine.has_work


def test_a_search_that_waits_too_long_ends_without_a_token(loaded: LoadedModel) -> None:
    now = [0.0]
    shape = CacheShape.paged(128, 512, 8)
    machine = Engine(loaded.runner, shape, loaded.vocabulary_size, running=8, clock=lambda: now[0])
    search = replace(request(loaded, ids(loaded, PROMPTS[0]), (3, 8, 1.0, False)), deadline=2.0)
    numbers = machine.submit_replies(search, 3)
    now[0] = 2.0
    outputs = drain(machine)
    assert {number: [(part.finish_reason, part.tokens) for part in outputs[number]] for number in numbers} == {
        number: [("deadline", ())] for number in numbers
    }
