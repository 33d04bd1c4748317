"""POST /v1/embeddings: vectors of texts, in OpenAI's format."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from mycli.runtime.server.embedding import (
    Truncation,
    check_text,
    cut_ids,
    embedder_of,
    embedding_ids,
    run_vectors,
    vector_requests,
)
from mycli.runtime.server.http.api_error import invalid_value
from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.requests.schemas import MAX_IDS, ForModel, LongText, TokenId
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import off_loop, read_request

MAX_INPUTS = 2048
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS)]


class EmbeddingsRequest(ForModel, Truncation):
    """The body of POST /v1/embeddings."""

    input: (
        LongText
        | Ids
        | Annotated[list[LongText], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=1 << 20)
    prompt_name: Annotated[str, Field(max_length=256)] | None = None  # of sentence-transformers
    input_type: Literal["query", "document", "passage"] | None = None  # of Cohere and others: the same prompts


async def embeddings(service: Service, request: Request) -> Response:
    """Return the vectors of texts."""

    def prepare(body: EmbeddingsRequest) -> list[Prepared]:
        embedder = embedder_of(service)
        return vector_requests(embedder, _texts(service, body), body.dimensions)

    body, groups = await read_request(service, request, EmbeddingsRequest, prepare)
    vectors = await run_vectors(service, request, groups)
    tokens = sum(prepared.prompt_tokens for prepared in groups)
    return await off_loop(service, lambda: _response(service, body, vectors, tokens))


def _texts(service: Service, body: EmbeddingsRequest) -> list[Sequence[int]]:
    prompt = prompt_text(service, body.prompt_name, body.input_type)
    items: list[Any] = [body.input] if isinstance(body.input, str) or isinstance(body.input[0], int) else [*body.input]
    longest = body.length(embedder_of(service).spec.longest(service.context))
    texts: list[Sequence[int]] = []
    for item in items:
        if isinstance(item, str):
            texts.append(embedding_ids(service, item, prompt, longest, "input"))
        else:
            service.check_ids(item, "input")
            ids = cut_ids(item, longest)
            check_text(service, ids, "input")
            texts.append(ids)
    return texts


def prompt_text(service: Service, name: str | None, input_type: str | None = None) -> str:
    """Return the prompt before an input, by name or else by `input_type` if the model has one. Raises ApiError."""
    embedder = embedder_of(service)
    if name is None and input_type is not None:
        names = ("document", "passage") if input_type != "query" else ("query",)
        name = next((name for name in names if name in embedder.spec.prompts), None)
    try:
        return embedder.prompt(name)
    except KeyError:
        known = ", ".join(embedder.spec.prompts) or "none"
        raise invalid_value("prompt_name", f"the model has no prompt {name!r:.60}; it has: {known:.300}") from None


def _response(service: Service, body: EmbeddingsRequest, vectors: Sequence[Tensor], tokens: int) -> Response:
    def encoded(vector: Tensor) -> list[float] | str:
        if body.encoding_format == "base64":
            return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
        return vector.tolist()

    data = [{"object": "embedding", "index": i, "embedding": encoded(vector)} for i, vector in enumerate(vectors)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JsonResponse({"object": "list", "data": data, "model": body.model or service.name, "usage": usage})
