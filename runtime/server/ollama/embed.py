"""POST /api/embed and the older /api/embeddings: the vectors of texts, in Ollama's form."""

import time
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.embedding import embedder_of, embedding_ids, run_vectors, vector_requests
from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.ollama.request import KeepAlive, shown_name
from mycli.runtime.server.requests.schemas import ForModel, LongText
from mycli.runtime.server.routes.embeddings import MAX_INPUTS, prompt_text
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import read_request


class OllamaEmbedRequest(ForModel):
    """The body of POST /api/embed."""

    input: LongText | Annotated[list[LongText], Field(max_length=MAX_INPUTS)] = ""  # empty: to load the model
    truncate: bool | None = None
    dimensions: int | None = Field(None, ge=1, le=1 << 20)
    options: dict[str, Any] | None = Field(None, max_length=64)  # all of placement and sampling
    keep_alive: KeepAlive = None


class OllamaEmbeddingsRequest(ForModel):
    """The body of POST /api/embeddings."""

    prompt: LongText = ""  # empty: to load the model
    options: dict[str, Any] | None = Field(None, max_length=64)
    keep_alive: KeepAlive = None


def _groups(service: Service, texts: list[str], truncate: bool, dimensions: int | None, place: str) -> list[Prepared]:
    embedder, prompt = embedder_of(service), prompt_text(service, None)
    longest = embedder.spec.longest(service.context) if truncate else None
    ids = [embedding_ids(service, text, prompt, longest, place) for text in texts]
    return vector_requests(embedder, ids, dimensions)


async def ollama_embed(service: Service, request: Request) -> Response:
    """Return the vectors of texts, in Ollama's form."""
    began = time.perf_counter_ns()

    def prepare(body: OllamaEmbedRequest) -> list[Prepared]:
        texts = [text for text in (body.input,) if text] if isinstance(body.input, str) else body.input
        return _groups(service, texts, body.truncate is not False, body.dimensions, "input")

    body, groups = await read_request(service, request, OllamaEmbedRequest, prepare)
    vectors = await run_vectors(service, request, groups)
    return JsonResponse(
        {
            "model": shown_name(body, service),
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": time.perf_counter_ns() - began,
            "load_duration": 0,
            "prompt_eval_count": sum(prepared.prompt_tokens for prepared in groups),
        }
    )


async def ollama_embeddings(service: Service, request: Request) -> Response:
    """Return the vector of one text, in Ollama's older form."""

    def prepare(body: OllamaEmbeddingsRequest) -> list[Prepared]:
        return _groups(service, [text for text in (body.prompt,) if text], True, None, "prompt")

    _, groups = await read_request(service, request, OllamaEmbeddingsRequest, prepare)
    vectors = await run_vectors(service, request, groups)
    return JsonResponse({"embedding": vectors[0].tolist() if vectors else []})
