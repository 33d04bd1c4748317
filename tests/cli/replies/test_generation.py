"""Test the limits of replies of `mycli run`, and replies as JSON objects."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mycli.cli.replies.generation import Generator, describe, token_fields
from mycli.runtime.engine.replies.opened_model import DEFAULT_MAX_TOKENS, OpenedModel
from mycli.runtime.engine.stats import SpeculationStats, Timing
from mycli.runtime.sampling.params import SamplingParams


def test_minus_one_token_is_as_many_as_the_context_has_room_for() -> None:
    unused = cast(OpenedModel, None)  # a limit that was typed does not depend on the model
    assert Generator(unused, SamplingParams(), limit=-1).room([1, 2]) is None
    assert Generator(unused, SamplingParams(), limit=0).room([1, 2]) == 0


@pytest.mark.parametrize(
    ("values", "limit"), [(None, DEFAULT_MAX_TOKENS), (1, 60), (2, 60), (3, 90), (100, DEFAULT_MAX_TOKENS)]
)
def test_a_format_of_few_values_ends_sooner(values: int | None, limit: int) -> None:
    opened: Any = SimpleNamespace(engine=SimpleNamespace(context=4096))
    grammar: Any = SimpleNamespace(values=values)
    assert Generator(opened, SamplingParams(), grammar=grammar).room([1, 2]) == limit
    opened.engine.context = 60
    assert Generator(opened, SamplingParams(), grammar=grammar).room([1, 2]) is None, "the context ends sooner"


def test_the_numbers_of_a_reply_are_rounded() -> None:
    timing = Timing(prompt=7, cached=4, token_seconds=[0.1234567, 0.3])
    reply: Any = SimpleNamespace(text="Hi", finish_reason="stop", tokens=[1, 2], timing=timing)
    plain = {
        "text": "Hi",
        "finish_reason": "stop",
        "completion_tokens": 2,
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "first_token_seconds": 0.12346,
        "tokens_per_second": 3.33,
    }
    assert describe(reply) == plain
    draft = {"passes": 3, "drafted": 12, "kept": 5, "acceptance": 0.5556, "mean_length": 2.667, "speedup": 2.333}
    for step, speedup in ((0.7, 2.333), (None, None)):
        timing.record = SpeculationStats(passes=3, drafted=12, compared=9, accepted=5, step_seconds=step)
        assert describe(reply) == {**plain, "draft": {**draft, "speedup": speedup}}


def test_a_token_that_is_a_part_of_a_character_has_its_bytes() -> None:
    tokenizer: Any = SimpleNamespace(token_bytes=lambda token: b"\xe6\x97")
    fields = token_fields(tokenizer, 5, -0.1234567)
    assert fields == {"id": 5, "token": "\ufffd", "bytes": [0xE6, 0x97], "logprob": -0.12346}
