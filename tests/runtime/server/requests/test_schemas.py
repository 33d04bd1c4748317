"""Test what fields of a request mean together: cut prompts, beams, budgets, and the names of mistakes."""

from typing import Any

import pytest

from mycli.runtime.engine.sequence import BeamOptions
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.requests.schemas import (
    BeamFields,
    PromptTruncation,
    Sampling,
    ThinkingBudget,
    validated,
)


@pytest.mark.parametrize(
    ("fields", "room", "left"),
    [
        ({}, 2, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": 3}, 2, [2, 3, 4]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, 2, [2, 3, 4]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, 2, [1, 2, 3]),
        ({"truncate_prompt_tokens": 1}, 2, [4]),
        ({"truncate_prompt_tokens": -1}, 2, [3, 4]),
        ({"truncate_prompt_tokens": -1}, 9, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": -1}, 0, [4]),  # refused later, with its limit
        ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, -3, [1]),
    ],
)
def test_a_prompt_is_cut_at_its_side_to_a_number_or_the_room(
    fields: dict[str, Any], room: int, left: list[int]
) -> None:
    assert PromptTruncation(**fields).cut([1, 2, 3, 4], room) == left


@pytest.mark.parametrize(
    ("fields", "replies", "options"),
    [
        ({}, 2, None),
        ({"best_of": 1}, 1, None),
        ({"best_of": 1}, 2, None),
        ({"best_of": 2}, 2, None),
        ({"use_beam_search": True}, 3, BeamOptions(3)),
        ({"use_beam_search": True, "best_of": 3}, 3, BeamOptions(3)),
        ({"use_beam_search": True, "best_of": 4}, 3, BeamOptions(4)),
        ({"use_beam_search": True, "length_penalty": 0.0, "early_stopping": True}, 1, BeamOptions(1, 0.0, True)),
        ({"use_beam_search": True, "early_stopping": "never"}, 1, BeamOptions(1, 1.0, "never")),
    ],
)
def test_a_search_has_as_many_beams_as_the_request_compares(
    fields: dict[str, Any], replies: int, options: BeamOptions | None
) -> None:
    assert BeamFields(**fields).beams(replies) == options


@pytest.mark.parametrize(("fields", "replies"), [({"best_of": 3}, 2), ({"use_beam_search": True, "best_of": 2}, 3)])
def test_a_choice_among_replies_needs_a_search_as_wide_as_them(fields: dict[str, Any], replies: int) -> None:
    with pytest.raises(ApiError) as error:
        BeamFields(**fields).beams(replies)
    assert error.value.param == "best_of"


@pytest.mark.parametrize(
    ("fields", "also", "budget"),
    [
        ({}, None, None),
        ({}, 5, 5),
        ({"thinking_budget_tokens": 0}, 5, 0),
        ({"thinking_budget_tokens": 3, "reasoning_budget_tokens": 2}, 5, 2),
        ({"thinking_token_budget": 1, "reasoning_budget_tokens": 2}, None, 1),
        ({"thinking_token_budget": -1, "reasoning_budget_tokens": 2}, 5, None),
        ({}, -1, None),
    ],
)
def test_the_first_budget_that_is_set_counts(fields: dict[str, Any], also: int | None, budget: int | None) -> None:
    assert ThinkingBudget(**fields).thinking_budget(also) == budget


def test_rules_of_the_text_have_the_minimum_and_the_stop_strings() -> None:
    rules = Sampling(stop="a").text_rules
    assert (rules.stops, rules.min_tokens, rules.include_stop, rules.show_control) == (["a"], 0, False, False)
    body = Sampling(stop=["a", "b"], min_tokens=3, include_stop_str_in_output=True, skip_special_tokens=False)
    rules = body.text_rules
    assert (rules.stops, rules.min_tokens, rules.include_stop, rules.show_control) == (["a", "b"], 3, True, True)
    assert not Sampling(skip_special_tokens=True).text_rules.show_control and Sampling().stops == []


def test_whole_numbers_are_integers_in_any_spelling() -> None:
    assert validated(Sampling, {"top_k": 8.0, "logit_bias": {"3": 1}}).top_k == 8
    with pytest.raises(ApiError, match=r"top_k: must be an integer") as error:
        validated(Sampling, {"top_k": 8.5})
    assert error.value.param == "top_k" and error.value.code == "invalid_value"


def test_a_list_that_is_too_long_is_the_mistake_among_others() -> None:
    with pytest.raises(ApiError, match="stop: must have at most") as error:
        validated(Sampling, {"stop": ["a"] * 1000})
    assert error.value.param == "stop"
    with pytest.raises(ApiError, match="the body must be an object, not list"):
        validated(Sampling, [])
