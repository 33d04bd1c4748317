"""Test how texts become requests for vectors and scores, and what their readers return."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mycli.runtime.engine.replies.embedder import Embedder
from mycli.runtime.engine.sequence import SequenceOutput
from mycli.runtime.errors import UsageError
from mycli.runtime.server.embedding import (
    Truncation,
    VectorReader,
    cosine,
    cut_ids,
    embedder_of,
    score_requests,
    vector_requests,
)
from mycli.runtime.server.http.api_error import ApiError


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({}, None),
        ({"truncation_side": "left"}, None),  # nothing is cut
        ({"truncate_prompt_tokens": -1}, 9),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, 4),
        ({"truncate_prompt_tokens": 9}, 9),
    ],
)
def test_texts_are_cut_to_the_length_of_the_request(fields: dict[str, Any], length: int | None) -> None:
    assert Truncation(**fields).length(9, others=3) == length


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),  # no room for a token of the text
        ({"truncate_prompt_tokens": 10}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -1, "truncation_side": "left"}, "truncation_side"),
    ],
)
def test_a_length_that_leaves_nothing_or_exceeds_the_model_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        Truncation(**fields).length(9, others=3)
    assert error.value.param == param
    assert Truncation(truncate_prompt_tokens=1).length(9) == 1


@pytest.mark.parametrize(
    ("longest", "left"),
    [(None, [1, 2, 3, 4]), (5, [1, 2, 3, 4]), (4, [1, 2, 3, 4]), (3, [1, 2, 4]), (2, [1, 4]), (1, [4])],
)
def test_a_text_that_is_cut_ends_with_its_last_token(longest: int | None, left: list[int]) -> None:
    assert cut_ids([1, 2, 3, 4], longest) == left


def test_the_last_piece_has_the_vector_or_the_scores() -> None:
    hidden, scores = torch.ones(2, 3), torch.tensor([0.5])
    vectors, plain = VectorReader(4, lambda states: states.sum(dim=0)), VectorReader(5)
    begun = vectors.feed(SequenceOutput(1, cached_tokens=7))
    assert (begun.index, begun.cached_tokens, begun.end, begun.vector) == (4, 7, None, None)
    last = vectors.feed(SequenceOutput(1, finish_reason="context", cached_tokens=7, hidden=hidden))
    assert (last.index, last.cached_tokens, last.end, last.problem) == (4, 7, "length", "")
    assert last.vector is not None and last.vector.tolist() == [2, 2, 2]
    scored = plain.feed(SequenceOutput(1, finish_reason="length", hidden=hidden, scores=scores))
    assert scored.vector is scores and scored.end == "length"
    failed = vectors.feed(SequenceOutput(1, finish_reason="error", error=UsageError("too long", "cut it")))
    assert (failed.end, failed.problem, failed.vector) == ("error", "too long", None)


def test_texts_of_a_request_run_in_groups_of_32() -> None:
    groups = score_requests([[number] for number in range(65)], [8, 9])
    assert [group.replies for group in groups] == [32, 32, 1]
    assert [prompt for group in groups for prompt in group.prompts] == [(number,) for number in range(65)]
    readers = [reader.index for group in groups for _, readers in group.requests for reader in readers]
    assert readers == [*range(32), *range(32), 0]
    assert {request.scored_tokens for group in groups for request, _ in group.requests} == {(8, 9)}
    assert score_requests([], [8]) == []


@pytest.mark.parametrize(("needs_all", "states"), [(True, "all"), (False, "last")])
def test_vectors_have_at_most_the_dimensions_of_the_model(needs_all: bool, states: str) -> None:
    embedder = cast(Embedder, SimpleNamespace(size=8, spec=SimpleNamespace(needs_all=needs_all)))
    for dimensions in (None, 1, 8):
        (group,) = vector_requests(embedder, [[1, 2]], dimensions)
        ((request, _),) = group.requests
        assert (request.prompt, request.limit, request.hidden_states) == ((1, 2), 0, states)
    with pytest.raises(ApiError, match="have 8 values"):
        vector_requests(embedder, [[1, 2]], 9)


def test_the_similarity_is_of_directions() -> None:
    east, north = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    assert [cosine(east, other) for other in (east * 4, north, -east)] == [1, 0, -1]


@pytest.mark.parametrize(
    ("encoder", "why"), [(None, "has no modules.json"), (object(), "it is a reranker, for /v1/rerank")]
)
def test_a_model_without_vectors_is_refused_with_the_reason(encoder: object, why: str) -> None:
    service: Any = SimpleNamespace(name="pico", loaded=SimpleNamespace(embedder=None, cross_encoder=encoder))
    with pytest.raises(ApiError, match=why) as error:
        embedder_of(service)
    assert (error.value.status, error.value.code) == (400, "not_an_embedding_model")
