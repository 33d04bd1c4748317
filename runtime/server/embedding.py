"""Computes vectors of texts, and scores of query and document pairs, as sequences of the engine."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from starlette.requests import Request as HttpRequest
from torch import Tensor

from mycli.runtime.engine.replies.cross_encoder import CrossEncoder
from mycli.runtime.engine.replies.embedder import Embedder
from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.engine.sequence import Request, SequenceOutput
from mycli.runtime.server.http.api_error import ApiError, ContextError, invalid_value, unsupported_parameter
from mycli.runtime.server.requests.schemas import Strict, TokenLimit
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import running
from mycli.runtime.tokenizer.tokenizer import TextPair

# Texts of one request that are queued at a time. A request may have 2,048, and other clients' requests run in between.
TEXTS_TOGETHER = 32


class VectorReader:
    """Converts the hidden states of a sequence to a vector with `compute`, or returns its scores if that is None."""

    def __init__(self, index: int, compute: Callable[[Tensor], Tensor] | None = None) -> None:
        self.index, self._compute = index, compute

    def feed(self, output: SequenceOutput) -> Piece:
        """Return a piece without text; the last one has the vector."""
        if output.finish_reason is None:
            return Piece(self.index, cached_tokens=output.cached_tokens)
        vector: Tensor | None = output.scores
        if self._compute is not None and output.hidden is not None:
            vector = self._compute(output.hidden)
        problem = "" if output.error is None else output.error.message
        end = output.finish_reason
        return Piece(
            self.index,
            cached_tokens=output.cached_tokens,
            end="length" if end == "context" else end,
            problem=problem,
            vector=vector,
        )


def embedder_of(service: Service) -> Embedder:
    """Return the embedder of the model. Raises ApiError if it has none."""
    if service.loaded.embedder is None:
        why = "its folder has no modules.json of sentence-transformers"
        if service.loaded.cross_encoder is not None:
            why = "it is a reranker, for /v1/rerank"
        message = f"{service.name} computes no embeddings: {why}"
        raise ApiError(400, message, "not_an_embedding_model", param="model")
    return service.loaded.embedder


class Truncation(Strict):
    """The length to cut texts and pairs to, in the fields of vLLM. Nothing is cut without them."""

    truncate_prompt_tokens: TokenLimit | None = None  # -1: as many as the model can read
    truncation_side: Literal["left", "right"] | None = None

    def length(self, longest: int, others: int = 0) -> int | None:
        """Return the number of tokens to cut a text or pair to; None: do not cut. Raises ApiError.

        longest: that the model can read; others: tokens around the texts, which stay.
        """
        tokens = self.truncate_prompt_tokens
        if tokens is not None and self.truncation_side == "left":  # would cut the special tokens before the text
            raise unsupported_parameter("truncation_side", "'left' is not supported")
        if tokens is not None and not others < tokens <= longest and tokens != -1:
            raise invalid_value("truncate_prompt_tokens", f"must be -1 or {others + 1} to {longest}")
        return longest if tokens == -1 else tokens


def embedding_ids(service: Service, text: str, prompt: str, longest: int | None, place: str) -> list[int]:
    """Return the token ids of a text with its prompt, cut to `longest`. Raises ApiError if they do not fit."""
    ids = cut_ids([*service.text_prompt(prompt + text), *service.loaded.tokenizer.missing_eos], longest)
    check_text(service, ids, place)
    return ids


def cut_ids(ids: list[int], longest: int | None) -> list[int]:
    """Return at most `longest` of the tokens of a text, None for all."""
    # The last token stays: models that pool the last token are trained with the end token that the tokenizer adds.
    return ids if longest is None or len(ids) <= longest else [*ids[: longest - 1], ids[-1]]


def check_text(service: Service, ids: Sequence[int], place: str) -> None:
    """Raise ApiError, with the token counts, for a text that is empty or too long for the model."""
    service.check_fits(ids, None, place)
    longest = embedder_of(service).spec.longest(service.context)
    if len(ids) > longest:
        raise ContextError(len(ids), None, longest, param=place, room=0)


def vector_requests(embedder: Embedder, texts: Sequence[Sequence[int]], dimensions: int | None) -> list[Prepared]:
    """Return requests for the vectors of `texts`, which are token ids, in groups to run one after another."""
    if dimensions is not None and dimensions > embedder.size:
        raise invalid_value("dimensions", f"the vectors of this model have {embedder.size} values")
    states: Literal["all", "last"] = "all" if embedder.spec.needs_all else "last"
    requests = [Request(tuple(ids), limit=0, hidden_states=states) for ids in texts]
    return _grouped(requests, lambda states: embedder.vector(states, dimensions))


def score_requests(texts: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[Prepared]:
    """Return the requests for the logits of `tokens` after each of `texts`."""
    requests = [Request(tuple(ids), limit=0, scored_tokens=tuple(tokens)) for ids in texts]
    return _grouped(requests, None)


def pair_requests(encoder: CrossEncoder, pairs: Sequence[TextPair]) -> list[Prepared]:
    """Return the requests for the scores of `pairs`."""
    return _grouped([encoder.request(pair) for pair in pairs], encoder.score)


def _grouped(requests: Sequence[Request], compute: Callable[[Tensor], Tensor] | None) -> list[Prepared]:
    groups = [requests[start : start + TEXTS_TOGETHER] for start in range(0, len(requests), TEXTS_TOGETHER)]
    return [
        Prepared(
            [(request, [VectorReader(index, compute)]) for index, request in enumerate(group)],
            [request.prompt for request in group],
        )
        for group in groups
    ]


async def run_vectors(service: Service, request: HttpRequest, groups: Sequence[Prepared]) -> list[Tensor]:
    """Return the vectors of all requests, in order. Raises ApiError."""
    vectors: list[Tensor] = []
    for prepared in groups:
        by_index: dict[int, Tensor] = {}
        async with running(service, request, prepared) as pieces:
            async for batch in pieces:
                by_index |= {piece.index: piece.vector for piece in batch if piece.vector is not None}
        vectors += [by_index[index] for index in range(len(prepared.requests))]
    return vectors


def cosine(left: Tensor, right: Tensor) -> float:
    """Return the cosine similarity of two vectors."""
    return float(torch.nn.functional.cosine_similarity(left, right, dim=0))
