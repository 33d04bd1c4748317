"""Test what a request for completions asks the engine for, and how the pieces of its replies are written."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.recording import ReplyIds
from mycli.runtime.server.routes.completions import TEXT, CompletionRequest, TextRendering
from mycli.runtime.server.service import Prepared, Service
from tests.support.served import unserved

CONTEXT = 64


@pytest.fixture(scope="module")
def service(loaded: LoadedModel) -> Iterator[Service]:
    service = unserved(loaded, context=CONTEXT)
    yield service
    service.close()


def prepared(service: Service, **fields: Any) -> Prepared:
    return TEXT.prepare(service, CompletionRequest.model_validate({"prompt": [5, 6, 7, 8], **fields}))


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 16),  # as OpenAI's
        ({"max_tokens": 5}, 5),
        ({"n_predict": 7}, 7),
        ({"max_tokens": 5, "n_predict": 7}, 5),
        ({"max_tokens": -1}, 61),
        ({"max_tokens": 61}, 61),
        ({"max_tokens": 0, "echo": True}, 0),
        ({"prompt": [5] * 60}, 5),
        ({"max_tokens": -1, "use_beam_search": True, "n": 2}, None),  # the search shares the room
        ({"max_tokens": 9, "use_beam_search": True, "n": 2}, 9),
    ],
)
def test_a_reply_has_the_limit_of_the_request_or_the_room(
    service: Service, fields: dict[str, Any], limit: int | None
) -> None:
    ((request, _),) = prepared(service, **fields).requests
    assert request.limit == limit


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 62}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[5], [6]], "n": 33}, "n"),
        ({"stream_options": {}}, "stream_options"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": "a", "suffix": "x", "echo": True}, "suffix"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(service: Service, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        prepared(service, **fields)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"truncate_prompt_tokens": 20, "max_tokens": 9}, 20),
        ({"truncate_prompt_tokens": -1, "max_tokens": 9}, CONTEXT + 1 - 9),
        ({"truncate_prompt_tokens": -1}, CONTEXT + 1 - 16),
        ({"truncate_prompt_tokens": -1, "max_tokens": -1}, CONTEXT),
    ],
)
def test_a_prompt_is_cut_to_leave_room_for_the_reply(service: Service, fields: dict[str, Any], length: int) -> None:
    ids = list(range(5, 105))
    (prompt,) = prepared(service, prompt=ids, **fields).prompts
    assert prompt == ids[-length:]


def test_equal_prompts_in_a_row_are_one_request_except_of_searches(service: Service) -> None:
    def shapes(**fields: Any) -> list[tuple[tuple[int, ...], list[int]]]:
        requests = prepared(service, prompt=[[5], [5], [6], [5]], **fields).requests
        return [(request.prompt, [reader.index for reader in readers]) for request, readers in requests]

    assert shapes() == [((5,), [0, 1]), ((6,), [2]), ((5,), [3])]
    assert shapes(n=2) == [((5,), [0, 1, 2, 3]), ((6,), [4, 5]), ((5,), [6, 7])]
    assert shapes(n=16)[-1] == ((5,), list(range(48, 64))), "64 replies are the limit of a request"
    searches = [((5,), [0, 1]), ((5,), [2, 3]), ((6,), [4, 5]), ((5,), [6, 7])]
    assert shapes(n=2, use_beam_search=True) == searches


@pytest.mark.parametrize(
    ("fields", "scored", "top"),
    [
        ({}, False, None),
        ({"echo": True}, False, None),
        ({"logprobs": 0}, False, 0),
        ({"logprobs": 2}, False, 2),
        ({"echo": True, "logprobs": 0}, True, 0),
        ({"prompt_logprobs": 0}, True, 0),
        ({"prompt_logprobs": 3, "logprobs": 2}, True, 3),
        ({"prompt_logprobs": 1, "logprobs": 2}, True, 2),
    ],
)
def test_the_prompt_is_scored_where_the_reply_shows_it(
    service: Service, fields: dict[str, Any], scored: bool, top: int | None
) -> None:
    ((request, _),) = prepared(service, **fields).requests
    assert (request.prompt_logprobs, request.logprobs) == (scored, top)


def rendering(service: Service, **fields: Any) -> tuple[TextRendering, list[int]]:
    """Return the rendering of replies to a prompt of two words, and the tokens of the prompt."""
    body = CompletionRequest.model_validate({"prompt": "Leo ran", **fields})
    request = TEXT.prepare(service, body)
    return TextRendering(service, request, body, ReplyIds("cmpl-1", 7)), list(request.prompts[0])


def events(written: TextRendering, *pieces: Piece) -> list[Any]:
    lines = b"".join(line for piece in pieces for line in written.add(piece)).decode().split("\n\n")
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line]


def test_an_echo_comes_with_the_first_piece_of_each_reply(service: Service) -> None:
    written, _ = rendering(service, echo=True, n=2, stream=True)
    pieces = [Piece(0, (" on",), tokens=(5,)), Piece(1, (" off",), tokens=(6,)), Piece(0, ("ly",), end="stop")]
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in events(written, *pieces)] == [
        (0, "Leo ran on", None),
        (1, "Leo ran off", None),
        (0, "ly", "stop"),
    ]


def test_tokens_without_text_are_an_event_where_their_ids_are_shown(service: Service) -> None:
    silent, last = Piece(tokens=(5,)), Piece(tokens=(6,), end="length")
    (choice,) = events(rendering(service, stream=True)[0], silent, last)
    assert (choice["text"], choice["finish_reason"]) == ("", "length") and "token_ids" not in choice
    written, prompt = rendering(service, stream=True, return_token_ids=True)
    shown = [(choice["token_ids"], choice["prompt_token_ids"]) for choice in events(written, silent, last)]
    assert shown == [([5], prompt), ([6], None)]


def test_offsets_of_tokens_count_the_text_before_them(service: Service) -> None:
    written, prompt = rendering(service, echo=True, logprobs=1, stream=True)
    scores = [TokenLogprob(token, -1.0, ()) for token in prompt[1:]]
    ids = service.tag_ids(" on")
    first = Piece(0, (" on",), tokens=tuple(ids), logprobs=tuple(TokenLogprob(token, -2.0, ()) for token in ids))
    choices = events(written, Piece(prompt_logprobs=tuple(scores)), first)
    text = "".join(choice["text"] for choice in choices)
    assert text == "Leo ran on" and choices[0]["logprobs"]["token_logprobs"][0] is None
    parts = [choice["logprobs"] for choice in choices]
    for token, offset in zip(
        (token for part in parts for token in part["tokens"]),
        (offset for part in parts for offset in part["text_offset"]),
        strict=True,
    ):
        assert text[offset : offset + len(token)] == token


def test_replies_to_equal_prompts_share_the_scores_of_the_prompt(service: Service) -> None:
    """The engine computes them once, with the first reply."""
    body = CompletionRequest.model_validate({"prompt": [[5, 6], [7, 8], [5, 6]], "prompt_logprobs": 0})
    request = TEXT.prepare(service, body)
    written = TextRendering(service, request, body, ReplyIds("cmpl-1", 7))
    scored = [Piece(index, prompt_logprobs=(TokenLogprob(6 + index, -1.0, ()),), end="stop") for index in (0, 1)]
    choices = written.whole([*scored, Piece(2, end="stop")])["choices"]
    tokens = [[list(entry) for entry in choice["prompt_logprobs"] if entry] for choice in choices]
    assert tokens == [[["6"]], [["7"]], [["6"]]] and [choice["index"] for choice in choices] == [0, 1, 2]
