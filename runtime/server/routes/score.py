"""POST /v1/score: the scores of pairs of texts, in the format of vLLM; `/v1/rerank` computes the same ones."""

import secrets
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.embedding import run_vectors
from mycli.runtime.server.http.api_error import ApiError, invalid_value
from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.requests.schemas import LongText
from mycli.runtime.server.routes.rerank import MAX_PAIRS, Pair, PairOptions, PairWork, prepare_pairs
from mycli.runtime.server.routes.wire import now
from mycli.runtime.server.service import Service
from mycli.runtime.server.streaming import read_request

ScoredTexts = LongText | Annotated[list[LongText], Field(min_length=1, max_length=MAX_PAIRS)]
# The names of both sides, the older ones first.
_SIDES = (("text_1", "data_1", "queries"), ("text_2", "data_2", "documents"))


class ScoreRequest(PairOptions):
    """The body of POST /v1/score: one text or as many on the left as on the right."""

    text_1: ScoredTexts | None = None
    text_2: ScoredTexts | None = None
    data_1: ScoredTexts | None = None
    data_2: ScoredTexts | None = None
    queries: ScoredTexts | None = None
    documents: ScoredTexts | None = None


async def score_pairs(service: Service, request: Request) -> Response:
    """Return the score of each pair of texts."""

    def prepare(body: ScoreRequest) -> PairWork:
        return prepare_pairs(service, body, _pairs(body))

    body, work = await read_request(service, request, ScoreRequest, prepare)
    scores = work.scores(await run_vectors(service, request, work.groups))
    tokens = sum(prepared.prompt_tokens for prepared in work.groups)
    return JsonResponse(
        {
            "id": f"score-{secrets.token_hex(12)}",
            "object": "list",
            "created": now(),
            "model": body.model or service.name,
            "data": [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }
    )


def _pairs(body: ScoreRequest) -> list[Pair]:
    left, right = (_side(body, names) for names in _SIDES)
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise invalid_value("text_1", f"must be one text or as many as text_2, which are {len(right)}")
    return list(zip(left, right, strict=True))


def _side(body: ScoreRequest, names: tuple[str, ...]) -> list[str]:
    texts: str | list[str] | None = next((value for name in names if (value := getattr(body, name)) is not None), None)
    if texts is None:
        raise ApiError(400, f"{names[0]}: is required", "missing_required_parameter", param=names[0])
    return [texts] if isinstance(texts, str) else texts
