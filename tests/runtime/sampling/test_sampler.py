"""Test sampling: the distribution against transformers' processors, and draws against the distribution."""

import math
import resource
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor
from transformers.generation import logits_process as reference

from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.sampling.logits_processors import distribution
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.random_numbers import RandomNumbers
from mycli.runtime.sampling.sampler import DeviceSampling, Sampler, sample_rows
from tests.support.grids import examples

VOCAB = 50
DRAWS = examples(50_000, 200_000)

SETTINGS = {
    "plain": SamplingParams(temperature=1.0),
    "cool": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=2.0),
    "top-k": SamplingParams(temperature=1.0, top_k=7),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.1),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "bias": SamplingParams(temperature=1.0, logit_bias=((3, 4.0), (40, -100.0), (41, 1.5))),
    "all": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
}
SEEN = torch.tensor([[3, 5, 5, 8, 13, 21, 34]])


def random_logits(seed: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.5


def expected(logits: Tensor, sampling: SamplingParams) -> Tensor:
    processors: list[Any] = []
    if sampling.logit_bias:
        biases = {(token,): bias for token, bias in sampling.logit_bias}
        processors.append(reference.SequenceBiasLogitsProcessor(biases))
    if sampling.repetition_penalty != 1:
        processors.append(reference.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(reference.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(reference.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(reference.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(reference.MinPLogitsWarper(sampling.min_p))
    for processor in processors:
        logits = processor(SEEN, logits)
    return logits.softmax(-1)


def mask_of(tokens: Tensor) -> Tensor:
    return torch.zeros(1, VOCAB, dtype=torch.bool).scatter(1, tokens, True)


@pytest.mark.parametrize("name", SETTINGS)
def test_distribution_equals_transformers(name: str) -> None:
    for seed in range(20):
        logits = random_logits(seed)
        actual = distribution(logits, SETTINGS[name], mask_of(SEEN))
        assert torch.allclose(actual, expected(logits, SETTINGS[name]), atol=1e-6), seed


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_distribution(name: str) -> None:
    logits = random_logits(7)
    sampler = Sampler(SamplingParams(**{**vars(SETTINGS[name]), "seed": 11}), VOCAB, torch.device("cpu"))
    sampler.seen.observe_prompt(SEEN[0].tolist())
    weights = sampler.probabilities(logits).expand(DRAWS, -1)
    counts = torch.bincount(sampler.draw(weights)[:, 0], minlength=VOCAB).double()
    probabilities = expected(logits.double(), SETTINGS[name])[0]
    allowed = probabilities > 0
    assert counts[~allowed].sum() == 0, "a token that was filtered out was drawn"
    frequent = allowed & (probabilities * DRAWS >= 5)
    observed = torch.cat((counts[frequent], counts[allowed & ~frequent].sum()[None]))
    wanted = torch.cat((probabilities[frequent], probabilities[allowed & ~frequent].sum()[None])) * DRAWS
    keep = wanted > 0
    assert chisquare(observed[keep], wanted[keep] * observed.sum() / wanted.sum()).pvalue > 1e-4


def test_seed_reproduces_and_no_seed_varies() -> None:
    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), VOCAB, torch.device("cpu"))
        return [int(sampler.sample(random_logits(step))) for step in range(40)]

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(None) != tokens(None)
    assert tokens(-1) == tokens(-1)


def test_equal_logits_stay_or_go_together() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    for sampling in (SamplingParams(temperature=1.0, top_p=0.3), SamplingParams(temperature=1.0, top_k=1)):
        assert torch.equal(distribution(logits, sampling) > 0, torch.tensor([[False, True, True, True, False]]))


def test_a_device_can_draw_where_a_token_depends_on_its_logits_alone() -> None:
    def choice(sampling: SamplingParams, **options: Any) -> DeviceSampling | None:
        return Sampler(sampling, VOCAB, torch.device("cpu"), **options).device_sampling()

    assert choice(SamplingParams(temperature=0.7, seed=-3)) == DeviceSampling(VOCAB, 0.7)
    assert choice(SamplingParams(top_k=3, top_p=0.5, min_p=0.1)) == DeviceSampling(VOCAB)
    assert choice(SamplingParams(temperature=1e-9)) == DeviceSampling(VOCAB)
    cut = SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, seed=0, presence_penalty=0.5)
    assert choice(cut) == DeviceSampling(VOCAB, 1.0, 3, 0.5, 0.1, presence=0.5)
    penalized = choice(SamplingParams(repetition_penalty=1.1))
    assert penalized is not None and penalized.seen is not None and not penalized.plain_greedy
    everything = choice(SamplingParams(temperature=1.0, top_k=VOCAB))
    assert everything is not None and everything.top_k == 0
    biased, twice = SETTINGS["bias"], SamplingParams(logit_bias=((3, 4.0), (3, 1.0)))
    assert getattr(choice(biased), "biases", None) == biased.logit_bias and choice(twice) is None
    alone = choice(SamplingParams(logit_bias=biased.logit_bias))
    assert alone is not None and not alone.plain_greedy
    for option in ("constraint", "recorder"):
        assert choice(SamplingParams(), **{option: object()}) is None, option
        assert not Sampler(SamplingParams(), VOCAB, torch.device("cpu"), **{option: object()}).plain
    for temperature in (0.0, 0.7):
        plain = choice(SamplingParams(temperature=temperature))
        assert plain is not None and plain.plain_greedy == (not temperature)


def test_probabilities_do_not_depend_on_the_functions_of_fp32() -> None:
    """The last bits of fp32 functions differ between instruction sets, so draws by them could differ too."""
    logits = random_logits(3) * 4
    assert torch.equal(distribution(logits, SamplingParams(temperature=1.0)), logits.double().softmax(-1).float())


@pytest.mark.parametrize("temperature", [0.0, 1e-9], ids=["zero", "F6-1e-9"])
def test_greedy_takes_the_first_of_the_likeliest(temperature: float) -> None:
    logits = random_logits(3)
    logits[0, [17, 31]] = 99.0
    sampler = Sampler(SamplingParams(temperature=temperature), VOCAB, torch.device("cpu"))
    assert int(sampler.sample(logits)) == 17
    assert distribution(logits, SamplingParams(temperature=temperature))[0, 17] == 1


def test_penalty_applies_to_greedy_and_counts_what_was_drawn() -> None:
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, 4], logits[0, 9] = 10.0, 6.0
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), VOCAB, torch.device("cpu"))
    assert [int(sampler.sample(logits)) for _ in range(3)] == [4, 9, 4]


@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 3, 1 << 31]),
    top_p=st.sampled_from([0.0, 1e-9, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.3, 1.0]),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
)
@settings(max_examples=100, deadline=None)
def test_at_least_one_token_always_stays(seed: int, top_k: int, top_p: float, min_p: float, scale: float) -> None:
    """F7: top_p 0, top_k 0, min_p 1, all equal logits, extreme logits."""
    sampling = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities = distribution(random_logits(seed) * scale, sampling)
    assert probabilities.isfinite().all()
    assert math.isclose(float(probabilities.sum()), 1.0, abs_tol=1e-5)
    if top_k:
        assert int((probabilities > 0).sum()) <= max(top_k, int((probabilities == probabilities.max()).sum()))


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["F5-nan", "F5-inf"])
@pytest.mark.parametrize("name", ["greedy", "plain", "all"])
def test_logits_that_are_no_numbers_end_the_request(bad: float, name: str) -> None:
    logits = random_logits(1)
    logits[0, 20] = bad
    sampler = Sampler(SETTINGS.get(name, SamplingParams()), VOCAB, torch.device("cpu"))
    assert distribution(logits, sampler.sampling).isnan().all(), "drafts rely on it"
    with pytest.raises(ModelError, match="not a number"):
        sampler.sample(logits)


def test_rows_that_pad_the_head_are_never_drawn() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 40:] = 100.0
    sampler = Sampler(SamplingParams(temperature=2.0, seed=0), 40, torch.device("cpu"))
    assert all(int(sampler.sample(logits)) < 40 for _ in range(200))
    assert int(Sampler(SamplingParams(), 40, torch.device("cpu")).sample(logits)) == 0


def test_a_bias_holds_for_greedy() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 9] = 10.0, 6.0
    for biases, best in ((((4, -5.0),), 9), (((4, -5.0), (4, 2.0)), 4), (((0, 100.0), (9, 90.0)), 0)):
        assert int(Sampler(SamplingParams(logit_bias=biases), VOCAB, torch.device("cpu")).sample(logits)) == best


@pytest.mark.parametrize(
    "biases",
    [((VOCAB, 1.0),), ((-1, 1.0),), ((0, math.inf),), ((0, math.nan),), ((0, 101.0),), ((0, 1.0),) * 100_000],
    ids=["F8-unknown-id", "F8-negative-id", "F8-inf", "F8-nan", "F8-too-large", "F8-100000-entries"],
)
def test_a_bias_is_bounded(biases: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(UsageError, match="logit_bias"):
        Sampler(SamplingParams(logit_bias=biases), VOCAB, torch.device("cpu"))


@given(
    vocab=st.sampled_from([1, 2, 127, 128, 129, 300, 4096]),
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.003, 0.1, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_only_tokens_of_some_weight_are_drawn(vocab: int, seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(64, vocab, generator=generator) ** 8
    weights *= torch.rand(64, vocab, generator=generator) < share
    weights[torch.arange(64), torch.randint(0, vocab, (64,), generator=generator)] = 1e-30
    sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), vocab, torch.device("cpu"))
    assert (weights.gather(1, sampler.draw(weights)) > 0).all()


def test_a_draw_at_the_very_end_takes_the_last_token_of_any_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda size, **_: torch.ones(size, dtype=torch.float64))
    weights = torch.zeros(2, 300)
    weights[0, [5, 131]], weights[1, 0] = torch.tensor([1.0, 1e-20]), 0.3
    sampler = Sampler(SamplingParams(temperature=1.0), 300, torch.device("cpu"))
    assert sampler.draw(weights)[:, 0].tolist() == [5, 0], "1 + 1e-20 is 1"


@pytest.mark.parametrize("weight", [0.0, math.nan])
def test_no_weights_draw_no_token(weight: float) -> None:
    weights = torch.ones(2, 300)
    weights[1] = weight
    drawn = Sampler(SamplingParams(temperature=1.0), 300, torch.device("cpu")).draw(weights)
    assert drawn[0] < 300 and drawn[1] == 300


def test_a_request_without_a_seed_opens_no_file() -> None:
    """A server with as many connections as open files are allowed still samples."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        first, second = RandomNumbers(None).take(4), RandomNumbers(None).take(4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert first != second


def test_every_token_takes_one_number_of_the_stream() -> None:
    """Draw alone, in a batch with equal settings, and as an unseeded draft; seeds would not reproduce otherwise."""
    logits, params = random_logits(3, 2), SamplingParams(temperature=1.0, seed=5)
    alone = Sampler(params, VOCAB, torch.device("cpu"))
    expected = [int(alone.sample(logits[:1])) for _ in range(8)]
    pair = [alone, Sampler(replace(params, seed=6), VOCAB, torch.device("cpu"))]
    pair[0] = Sampler(params, VOCAB, torch.device("cpu"))
    assert [sample_rows(logits, pair)[0] for _ in range(8)] == expected
    draft = Sampler(replace(params, seed=None), VOCAB, torch.device("cpu"))
    draft.numbers = RandomNumbers(5)
    out = draft.probability_rows(1, torch.float32)
    assert [draft.sample_draft(logits[:1], (), out) for _ in range(8)] == expected
    ninth = RandomNumbers(5).take(9)[8:]
    assert [sampler.numbers.take(1) for sampler in (alone, pair[0], draft)] == [ninth] * 3


def test_numbers_of_tokens_drawn_elsewhere_are_not_drawn_again() -> None:
    sampling = SamplingParams(temperature=1.0, seed=5, frequency_penalty=0.5)
    rows = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(0))
    ours, theirs = (Sampler(sampling, VOCAB, torch.device("cpu")) for _ in range(2))
    expected = [int(theirs.sample(row[None])) for row in rows]
    assert ours.numbers.peek(2, 3) == Sampler(sampling, VOCAB, torch.device("cpu")).numbers.take(5)[3:]
    ours.follow(expected[:4])
    assert ours.numbers.taken == 4
    assert [int(ours.sample(row[None])) for row in rows[4:]] == expected[4:]


@pytest.mark.parametrize("taken", [0, 1, 255, 256, 257, 600])
def test_a_resumed_reply_goes_on_with_the_numbers_after_those_it_took(taken: int) -> None:
    whole, resumed = RandomNumbers(5), RandomNumbers(5, taken)
    assert whole.take(taken + 300)[taken:] == [*resumed.take(3), *resumed.take(297)]
    assert resumed.taken == whole.taken


def test_an_id_beyond_the_vocabulary_counts_as_its_last_token() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, VOCAB - 1] = 1.0
    for sampling in (
        SamplingParams(repetition_penalty=2.0, presence_penalty=0.6),
        SamplingParams(frequency_penalty=2.0),
    ):
        sampler = Sampler(sampling, VOCAB, torch.device("cpu"))
        assert int(sampler.sample(logits)) == VOCAB - 1
        padded = Sampler(sampling, VOCAB, torch.device("cpu"))
        padded.resume([VOCAB + 3], False)
        assert int(padded.sample(logits)) == int(sampler.sample(logits)) == 0


def test_a_draft_token_is_accepted_for_numbers_below_its_chance() -> None:
    """A number may be 0, and a token with chance 0 is never accepted."""
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), VOCAB, torch.device("cpu"))
    numbers = torch.tensor(sampler.numbers.peek(4), dtype=torch.float64)
    assert sampler.accept(numbers[:1]) == 0
    assert sampler.accept(numbers[1:].nextafter(torch.ones(3, dtype=torch.float64))) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_stop_tokens_have_no_probability_before_the_minimum(temperature: float) -> None:
    """The rows of a draft are successive positions: the first `min_tokens` positions have no stop token."""
    logits = torch.zeros(5, VOCAB)
    logits[:, 7] = 9.0
    sampling = SamplingParams(temperature, logit_bias=((8, 5.0),))
    sampler = Sampler(sampling, VOCAB, logits.device, stop_ids=(7, VOCAB + 1), min_tokens=4)
    assert sampler.masks_stops and not sampler.plain_greedy
    assert (sampler.probabilities(logits, [1, 2, 3, 4])[:, 7] > 0).tolist() == [False] * 4 + [True]
    assert (sampler.probabilities(logits[:2], [1, 2, 3, 4])[:, 7] > 0).tolist() == [False, True]
    out = torch.empty(1, VOCAB)
    shares = []
    for count in (3, 4):
        sampler.sample_draft(logits[:1], [1] * count, out)
        shares.append(float(out[0, 7]))
    assert shares[0] == 0 and shares[1] > 0.9
    assert int(sampler.sample(logits[:1])) != 7
    sampler.commit(logits[:2], [1, 2])
    assert sampler.masks_stops and int(sampler.sample(logits[:1])) != 7
    assert not sampler.masks_stops and float(sampler.probabilities(logits[:1])[0, 7]) > 0.9
    resumed = Sampler(sampling, VOCAB, logits.device, stop_ids=(7,), min_tokens=4)
    resumed.resume([1, 2, 3], shortened=False)
    assert resumed.masks_stops
    resumed.resume([1], shortened=False)
    assert not resumed.masks_stops
    assert not Sampler(sampling, VOCAB, logits.device, min_tokens=4).masks_stops
    assert not Sampler(sampling, VOCAB, logits.device, stop_ids=(7,)).masks_stops


class Ending:
    """Allows the tokens 7 and 8, then only 7."""

    may_be_cut = shortened = False

    def __init__(self) -> None:
        self.allowed = [7, 8]

    def resume(self, tokens: Any, shortened: bool) -> None: ...

    def apply(self, logits: Tensor) -> Tensor:
        masked = torch.full_like(logits, -math.inf)
        masked[:, self.allowed] = logits[:, self.allowed]
        return masked

    def accept(self, token: int) -> int:
        self.allowed = [7]
        return token


def test_a_format_that_allows_only_the_end_ends_before_the_minimum() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[:, 7] = 9.0
    sampler = Sampler(SamplingParams(), VOCAB, logits.device, constraint=Ending(), stop_ids=(7,), min_tokens=4)
    assert [int(sampler.sample(logits)) for _ in range(2)] == [8, 7]


def test_stop_tokens_beyond_the_vocabulary_are_never_drawn_and_not_masked() -> None:
    sampler = Sampler(SamplingParams(), VOCAB, torch.device("cpu"), stop_ids=(VOCAB,), min_tokens=1)
    assert not sampler.masks_stops and int(sampler.sample(random_logits(1))) < VOCAB


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_drawn_tokens_of_a_seeded_request_can_be_repeated(temperature: float, seed: int | None) -> None:
    sampler = Sampler(SamplingParams(temperature, seed=seed), VOCAB, torch.device("cpu"))
    assert sampler.repeatable == (temperature == 1.0 and seed == 3)


def test_a_reply_may_end_at_any_token_unless_its_grammar_says_otherwise() -> None:
    free = Sampler(SamplingParams(), VOCAB, torch.device("cpu"))
    assert free.may_be_cut and not free.constrained and not free.shortened
    for value in (False, True):
        state: Any = SimpleNamespace(may_be_cut=value, shortened=value)
        bound = Sampler(SamplingParams(), VOCAB, torch.device("cpu"), constraint=state)
        assert bound.constrained and bound.may_be_cut == bound.shortened == value


def test_a_greedy_reply_alone_and_among_sampled_ones_gets_its_likeliest_token() -> None:
    logits = random_logits(11)
    greedy = Sampler(SamplingParams(), VOCAB, logits.device)
    sampled = [Sampler(SETTINGS["all"], VOCAB, logits.device) for _ in range(2)]
    (best,) = sample_rows(logits, [greedy])
    assert best == int(logits.argmax())
    assert sample_rows(logits.expand(3, -1), [sampled[0], greedy, sampled[1]])[1] == best
