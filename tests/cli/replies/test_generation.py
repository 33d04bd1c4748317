"""Test the limits of replies of `mycli run`."""

from typing import cast

from mycli.cli.replies.generation import Generator
from mycli.runtime.engine.replies.opened_model import OpenedModel
from mycli.runtime.sampling.params import SamplingParams


def test_minus_one_token_is_as_many_as_the_context_has_room_for() -> None:
    unused = cast(OpenedModel, None)  # a limit that was typed does not depend on the model
    assert Generator(unused, SamplingParams(), limit=-1).room([1, 2]) is None
    assert Generator(unused, SamplingParams(), limit=0).room([1, 2]) == 0
