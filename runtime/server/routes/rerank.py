"""POST /v1/rerank: the relevance of documents to a query, in the format of Jina and Cohere.

With a reranker that has a head of its own the score is that of sentence-transformers' CrossEncoder; with an embedding
model, the cosine similarity of the vectors; with a generative model such as Qwen3-Reranker, the probability of "yes"
against "no" after a prompt with query and document.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from mycli.runtime.engine.replies.cross_encoder import CrossEncoder
from mycli.runtime.engine.replies.embedder import Embedder
from mycli.runtime.server.embedding import (
    Truncation,
    cosine,
    embedding_ids,
    pair_requests,
    run_vectors,
    score_requests,
    vector_requests,
)
from mycli.runtime.server.http.api_error import ApiError, ContextError, as_api_errors
from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.requests.schemas import MAX_IDS, ForModel, LongText, Strict
from mycli.runtime.server.routes.embeddings import prompt_text
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import read_request

# The prompt of Qwen3-Reranker's model card, word for word: the model was trained with it.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


MAX_PAIRS = 1024
Pair = tuple[str, str]  # query and document


class RankedText(Strict):
    """A document as an object."""

    text: LongText


class PairOptions(ForModel, Truncation):
    """The options of scored pairs."""

    instruction: Annotated[str, Field(max_length=4096)] | None = None
    instruct: Annotated[str, Field(max_length=4096)] | None = None  # the same in SGLang
    max_tokens_per_query: int | None = Field(None, ge=0, le=MAX_IDS)  # of vLLM; nothing is cut without it
    max_tokens_per_doc: int | None = Field(None, ge=0, le=MAX_IDS)  # of Cohere and vLLM, likewise

    @model_validator(mode="after")
    def _one_instruction(self) -> Self:
        self.instruction = self.instruct if self.instruction is None else self.instruction
        return self


class RerankRequest(PairOptions):
    """The body of POST /v1/rerank."""

    query: LongText
    documents: list[LongText | RankedText] = Field(min_length=1, max_length=MAX_PAIRS)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None


@dataclass(frozen=True)
class PairWork:
    """Requests, and how the scores follow from their vectors."""

    groups: Sequence[Prepared]
    scores: Callable[[Sequence[Tensor]], list[float]]


async def rerank(service: Service, request: Request) -> Response:
    """Return documents in the order of their relevance to a query."""

    def prepare(body: RerankRequest) -> PairWork:
        return prepare_pairs(service, body, [(body.query, _text(item)) for item in body.documents])

    body, work = await read_request(service, request, RerankRequest, prepare)
    scores = work.scores(await run_vectors(service, request, work.groups))
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results: list[dict[str, Any]] = []
    for index in order:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents:
            result["document"] = {"text": _text(body.documents[index])}
        results.append(result)
    tokens = sum(prepared.prompt_tokens for prepared in work.groups)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JsonResponse({"object": "list", "model": body.model or service.name, "results": results, "usage": usage})


def prepare_pairs(service: Service, body: PairOptions, pairs: Sequence[Pair]) -> PairWork:
    """Return the requests for the scores of pairs of query and document. Raises ApiError."""
    queries = {query: service.beginning(query, body.max_tokens_per_query, "query") for query, _ in pairs}
    cut = [(queries[query], service.beginning(text, body.max_tokens_per_doc, "documents")) for query, text in pairs]
    if service.loaded.cross_encoder is not None:
        return _pair_work(service, body, cut, service.loaded.cross_encoder)
    if service.loaded.embedder is not None:
        return _vector_work(service, body, cut, service.loaded.embedder)
    return _answer_work(service, body, cut)


def _text(document: LongText | RankedText) -> str:
    return document if isinstance(document, str) else document.text


def _pair_work(service: Service, body: PairOptions, pairs: Sequence[Pair], encoder: CrossEncoder) -> PairWork:
    longest = min(service.context, encoder.spec.max_tokens or service.context)
    encode = service.loaded.tokenizer.encode_pair
    special = () if body.truncate_prompt_tokens is None else encode("", "").ids
    cut = body.length(longest, len(special))
    prompt = encoder.spec.prompt if body.instruction is None else body.instruction
    texts = []
    for query, document in pairs:
        with as_api_errors("documents"):
            text = encode(prompt + query, document, cut)
        if len(text.ids) > longest:
            raise ContextError(len(text.ids), None, longest, param="documents", room=0)
        texts.append(text)
    return PairWork(pair_requests(encoder, texts), lambda scores: [float(score) for score in scores])


def _probabilities(logits: Sequence[Tensor]) -> list[float]:
    return [float(torch.softmax(pair.float(), 0)[1]) for pair in logits]


def _vector_work(service: Service, body: PairOptions, pairs: Sequence[Pair], embedder: Embedder) -> PairWork:
    cut = body.length(embedder.spec.longest(service.context))
    before = prompt_text(service, None, "query") if body.instruction is None else body.instruction
    prompt = prompt_text(service, None, "document")
    queries = list(dict.fromkeys(query for query, _ in pairs))
    texts = [embedding_ids(service, query, before, cut, "query") for query in queries]
    texts += [embedding_ids(service, document, prompt, cut, "documents") for _, document in pairs]

    def similarities(vectors: Sequence[Tensor]) -> list[float]:
        by_query = dict(zip(queries, vectors, strict=False))
        documents = zip(pairs, vectors[len(queries) :], strict=True)
        return [cosine(by_query[query], vector) for (query, _), vector in documents]

    return PairWork(vector_requests(embedder, texts, None), similarities)


def _answer_work(service: Service, body: PairOptions, pairs: Sequence[Pair]) -> PairWork:
    before, after = service.tag_ids(_BEFORE), service.tag_ids(_AFTER)
    answers = [service.text_prompt(word, add_special=False) for word in ("no", "yes")]
    if len(service.tag_ids("<|im_start|>")) != 1 or any(len(ids) != 1 for ids in answers):
        message = f"{service.name} does not rerank: no reranker's head, no embeddings, no Qwen chat markup"
        raise ApiError(400, message, "not_a_reranker", param="model")
    score = service.loaded.score
    if score is not None and [[score.false], [score.true]] != answers:
        message = f'{service.name} does not rerank: its LogitScore module has other tokens than "yes" and "no"'
        raise ApiError(400, message, "not_a_reranker", param="model")
    instruction = INSTRUCTION if body.instruction is None else body.instruction
    tags = len(before) + len(after)
    cut = body.length(service.context, tags)
    texts = []
    for query, document in pairs:
        pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        # Control tokens in a client's text stay text, so that a document cannot end the prompt and answer for the
        # model.
        ids = service.text_prompt(pair, add_special=False)
        ids = [*before, *(ids if cut is None else ids[: cut - tags]), *after]
        service.check_fits(ids, None, "documents")
        texts.append(ids)
    return PairWork(score_requests(texts, [ids[0] for ids in answers]), _probabilities)
