"""Test the parameters of a request: their ranges, what a model recommends, and the seeds of several replies."""

import math

import pytest

from mycli.runtime.errors import UsageError
from mycli.runtime.models.generation_config import GenerationDefaults
from mycli.runtime.sampling.params import GREEDY_BELOW, MAX_BIASES, SamplingParams, recommended

LARGEST, SMALLEST = (1 << 63) - 1, -(1 << 63)
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 1 << 31),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (SMALLEST, LARGEST),
}


@pytest.mark.parametrize("name", RANGES, ids=lambda name: f"F6-{name}")
def test_a_range_ends_with_its_bounds(name: str) -> None:
    low, high = RANGES[name]
    step = 1 if isinstance(high, int) else 0.001
    for value in (low, high):
        assert getattr(SamplingParams().with_overrides({name: value}), name) == value
    for value in (low - step, high + step, math.nan, math.inf):
        with pytest.raises(UsageError, match=name):
            SamplingParams().with_overrides({name: value})


def test_biases_are_limited_in_size_and_number() -> None:
    for biases in (((0, 100), (1, -100)), ((5, 1.0),) * MAX_BIASES):
        assert SamplingParams(logit_bias=biases).logit_bias == biases
    for biases in (((0, -100.1),), ((5, 1.0),) * (MAX_BIASES + 1)):
        with pytest.raises(UsageError, match="logit_bias"):
            SamplingParams(logit_bias=biases)


def test_what_a_model_recommends_is_replaced_by_the_settings_of_a_request() -> None:
    chosen = recommended(GenerationDefaults(temperature=0.7, top_p=0.9, do_sample=True))
    assert (chosen.temperature, chosen.top_p) == (0.7, 0.9)
    assert chosen.with_overrides({"temperature": 0.0, "top_p": None}) == SamplingParams(top_p=0.9)
    assert recommended(GenerationDefaults(temperature=0.7, do_sample=False)) == SamplingParams()
    assert recommended(GenerationDefaults(top_k=5)).temperature == 0.0
    assert recommended(GenerationDefaults(top_k=5, do_sample=True)).temperature == 1.0


def test_the_smallest_temperature_that_samples_divides_logits() -> None:
    assert not SamplingParams(temperature=GREEDY_BELOW).greedy
    assert SamplingParams(temperature=math.nextafter(GREEDY_BELOW, 0)).greedy


def test_the_seeds_of_replies_follow_each_other_and_wrap_around() -> None:
    assert [SamplingParams(seed=5).for_reply(index).seed for index in range(3)] == [5, 6, 7]
    assert SamplingParams(seed=LARGEST).for_reply(1).seed == SMALLEST
    assert SamplingParams(seed=SMALLEST).for_reply(0).seed == SMALLEST
    assert SamplingParams().for_reply(3) == SamplingParams()
