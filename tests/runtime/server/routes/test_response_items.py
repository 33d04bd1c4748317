"""Test that log-probabilities of a response are those of its text, however its tokens come."""

from collections.abc import Sequence
from typing import Any

import pytest

from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.server.recording import ReplyIds
from mycli.runtime.server.routes.response_items import OutputItems
from mycli.runtime.server.streaming import merged

# Two tokens of reasoning and its closing tag, then two of text.
PIECES = [
    Piece(reasoning="Hm. ", tokens=(1,), reasoning_tokens=1),
    Piece(reasoning="Yes.", tokens=(2,), reasoning_tokens=1),
    Piece(tokens=(3,), reasoning_tokens=1),
    Piece(parts=("Four",), tokens=(4,)),
    Piece(parts=(".",), tokens=(5,), end="stop"),
]


def _with_logprobs(piece: Piece) -> Piece:
    logprobs = tuple(TokenLogprob(token, -1.0, ()) for token in piece.tokens)
    return Piece(
        0, piece.parts, piece.reasoning, piece.tokens, logprobs, end=piece.end, reasoning_tokens=piece.reasoning_tokens
    )


@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "whole"])
@pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])
def test_reasoning_has_no_logprobs(whole: bool, hidden: bool) -> None:
    def logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [{"token": entry.token} for entry in tokens]

    items = OutputItems({}, logprobs, ReplyIds.random("resp_"))
    pieces = [_with_logprobs(piece) for piece in PIECES]
    for piece in merged(pieces) if whole else pieces:
        list(items.add(Piece(**{**vars(piece), "reasoning": "" if hidden else piece.reasoning})))
    list(items.close())
    *_, message = items.all()
    assert message["content"][0]["text"] == "Four."
    assert message["content"][0]["logprobs"] == [{"token": 4}, {"token": 5}]
