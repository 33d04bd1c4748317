"""Test speculation on real weights: greedy tokens and sampled distribution of pico with pico-draft and lookup.

The complete versions take minutes: `pytest -m slow tests/runtime/speculative/test_decode_pico.py`.
"""

from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.diagnostics.speculation_check import PrefixLogits
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import UsageError
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.models.config import KvDtype
from mycli.runtime.sampling.logits_processors import distribution
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.draft_length import FixedDraftLength
from mycli.runtime.speculative.lookup import PromptLookup
from mycli.runtime.speculative.proposers import DraftModel, Proposer
from mycli.runtime.speculative.speculator import ProposerSpeculator
from mycli.runtime.tokenizer.chat_template import Message
from tests.support.engines import drain, tokens_of
from tests.support.grids import chosen
from tests.support.paths import PICO
from tests.support.prefix_model import CPU, PrefixModel

CAPACITY = 256
SHAPE = CacheShape.contiguous(CAPACITY)
LIMIT = 24
NAMES = ("Japan", "France", "Egypt", "Peru", "Kenya", "Norway", "India", "Cuba", "Spain", "Chile")


@cache
def loaded(name: str, kv: KvDtype = "auto") -> LoadedModel:
    return LoadedModel.load(open_model_folder(PICO.parent / name), Placement(CPU, torch.float32, kv=kv))


def prompts(count: int) -> list[list[int]]:
    tokenizer = loaded("pico").tokenizer
    book = (PICO.parent / "held-out.txt").read_text(encoding="utf-8")
    made = []
    for index in range(count):
        kind, number = index % 4, index // 4
        if kind == 0:
            questions = (f"What is the capital of {NAMES[number % 10]}?", f"Count to {number}.", "Who are you?")
            made.append(tokenizer.apply_chat_template([Message("user", questions[number % 3])]))
        elif kind == 1:
            made.append(
                tokenizer.apply_chat_template(
                    [Message("user", f"Tell me a story about {NAMES[number % 10]} {number}.")]
                )
            )
        elif kind == 2:
            made.append(tokenizer.encode(book[number * 1500 : number * 1500 + 400], add_special=True)[:120])
        else:
            made.append(tokenizer.encode(f"{book[number * 900 : number * 900 + 60]} " * 4, add_special=True)[:160])
    return made


def proposer(kind: str, kv: KvDtype = "auto") -> Proposer:
    target, draft = loaded("pico").runner, loaded("pico-draft", kv).runner
    return PromptLookup() if kind == "ngram" else DraftModel(draft, SHAPE, target.nbytes)


def engine(runner: ModelRunner, guess: Proposer | None = None, length: int = 0) -> Engine:
    speculator = None if guess is None else ProposerSpeculator(guess, lambda: FixedDraftLength(length))
    return Engine(runner, SHAPE, loaded("pico").vocabulary_size, speculator=speculator)


def differences(count: int, kind: str, lengths: range, kv: KvDtype = "auto") -> list[tuple[int, int]]:
    """Return prompt and length of every reply that differs from the one without speculation."""
    runner = loaded("pico", kv).runner
    plain = engine(runner)
    wanted = [tokens_of(plain, prompt, LIMIT) for prompt in prompts(count)]
    found = []
    for length in lengths:
        drafting = engine(runner, proposer(kind, kv), length)
        replies = [tokens_of(drafting, prompt, LIMIT) for prompt in prompts(count)]
        found += [(index, length) for index in range(count) if replies[index] != wanted[index]]
    return found


GREEDY = list(product(("draft", "ngram"), ("auto", "int8", "int4")))


@pytest.mark.parametrize(("kind", "kv"), chosen(GREEDY, [("draft", "int8"), ("ngram", "auto")]))
def test_greedy_tokens_are_the_same(kind: str, kv: KvDtype) -> None:
    """F16."""
    assert differences(4, kind, range(2, 9, 5), kv) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft", "ngram"])
def test_greedy_tokens_are_the_same_for_200_prompts_and_every_length(kind: str) -> None:
    assert differences(200, kind, range(1, 9)) == []


def test_prefixes_have_logits_up_to_the_context() -> None:
    runner = loaded("pico").runner
    prefix = PrefixLogits(runner, 8)
    for count in (1, 8):
        assert prefix.logits([5] * count).shape == (runner.config.vocab_size,)
    for count in (0, 9):
        with pytest.raises(UsageError, match=f"{count} tokens: the context holds 1 to 8"):
            prefix.logits([5] * count)


@cache
def remembered(name: str) -> PrefixModel:
    """Return the model with its outputs cached per sequence, so that hundreds of thousands of draws take seconds."""
    runner = loaded(name).runner
    prefix = PrefixLogits(runner, CAPACITY)

    def function(text: tuple[int, ...]) -> Tensor:
        return prefix.logits(text).clone()

    return PrefixModel(function, runner.config.vocab_size, CAPACITY)


def p_value(draws: int, kind: str, sampling: SamplingParams, length: int = 4) -> float:
    """Return the chi-squared p-value of `draws` replies of `length` tokens against the target's joint distribution."""
    target, size = remembered("pico"), loaded("pico").vocabulary_size
    prompt = loaded("pico").tokenizer.encode(BEGINNINGS[kind], add_special=True)

    def following(text: tuple[int, ...]) -> dict[int, float]:
        seen = torch.zeros(1, size, dtype=torch.bool)
        seen[0, list(text)] = True
        row = distribution(target.logits(text)[None, :size].double(), sampling, seen)[0]
        return {int(token): float(row[token]) for token in row.nonzero()[:, 0]}

    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        expected = {
            (*text, token): before * chance
            for text, before in expected.items()
            for token, chance in following((*prompt, *text)).items()
        }
    guess: Proposer = PromptLookup() if kind == "ngram" else DraftModel(ModelRunner(remembered("pico-draft")), SHAPE, 1)
    drafting = engine(ModelRunner(target), guess, length)
    counts: Counter[tuple[int, ...]] = Counter()
    compared = 0
    for seed in range(draws):
        number = drafting.submit(Request(tuple(prompt), sampling, length))
        drafting._states[number].sampler.numbers.generator.manual_seed(seed)  # not reproducible by seed
        outputs = drain(drafting)[number]
        counts[tuple(token for output in outputs for token in output.tokens)] += 1
        compared += sum(min(output.accepted + 1, output.drafted) for output in outputs)
    assert compared > draws / 10, "drafts were compared"
    if not set(counts) <= set(expected):  # an impossible reply
        return 0.0
    statistic, cells, rare, rare_expected = 0.0, -1, 0, 0.0
    for text, probability in expected.items():
        wanted = probability * draws
        if wanted < 5:
            rare, rare_expected = rare + counts[text], rare_expected + wanted
        else:
            statistic, cells = statistic + (counts[text] - wanted) ** 2 / wanted, cells + 1
    if rare_expected >= 5:
        statistic, cells = statistic + (rare - rare_expected) ** 2 / rare_expected, cells + 1
    return float(chi2.sf(statistic, cells))


BEGINNINGS = {
    "draft": "The old man looked at her and said that",  # many possible continuations, on which the models disagree
    "ngram": "The capital of Japan is Tokyo. The capital of Japan is",
}
SAMPLINGS = {
    "temperature": SamplingParams(temperature=1.3, top_k=3),
    "all": SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.03, repetition_penalty=1.2),
}


@pytest.mark.parametrize("kind", chosen(["draft", "ngram"], quick=["ngram"]))
def test_draws_follow_the_target(kind: str) -> None:
    assert p_value(2000, kind, SAMPLINGS["temperature"]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft", "ngram"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_200000_draws_follow_the_target(name: str, kind: str) -> None:
    assert p_value(200_000, kind, SAMPLINGS[name]) > 1e-3


@pytest.mark.slow
def test_the_test_sees_a_wrong_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "accept", lambda sampler, chances: len(chances))
    assert p_value(2000, "draft", SAMPLINGS["temperature"]) < 1e-3
