"""`prompt_logprobs` of vLLM: log-probabilities of the prompt's tokens, in replies that are not streamed."""

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.server.http.api_error import unsupported_parameter
from mycli.runtime.server.requests.schemas import Strict
from mycli.runtime.server.routes.wire import logprob_fields
from mycli.runtime.tokenizer.tokenizer import Tokenizer


class PromptLogprobs(Strict):
    """The number of likeliest tokens at each token of the prompt; None: no log-probabilities."""

    prompt_logprobs: int | None = Field(None, ge=0, le=20)

    def most_logprobs(self, top: int | None, stream: bool | None) -> int | None:
        """Return the number of likeliest tokens to compute; top: those of the reply. Raises ApiError."""
        if self.prompt_logprobs is None:
            return top
        if stream:  # as in vLLM
            raise unsupported_parameter("prompt_logprobs", "cannot be combined with stream")
        return max(top or 0, self.prompt_logprobs)


def prompt_logprobs(tokenizer: Tokenizer, replies: Iterable[Piece], top: int) -> list[dict[str, Any] | None]:
    """Return null for the first token, and for each other one itself and the `top` likeliest; by id, as in vLLM.

    replies: to one prompt; the first one that was computed has the log-probabilities.
    """
    entries: list[dict[str, Any] | None] = [None]
    for item in next((reply.prompt_logprobs for reply in replies if reply.prompt_logprobs), ()):
        likeliest = [(token, logprob, rank) for rank, (token, logprob) in enumerate(item.top[:top], 1)]
        entry: dict[str, Any] = {}
        for token, logprob, rank in [(item.token, item.logprob, item.rank), *likeliest]:
            fields = logprob_fields(tokenizer, token, logprob)
            value = {"logprob": fields["logprob"], "rank": rank, "decoded_token": fields["token"]}
            entry.setdefault(str(token), value)
        entries.append(entry)
    return entries
