"""POST /v1/completions: OpenAI's text completion, with log-probabilities of the prompt's tokens (`echo`)."""

from collections.abc import Iterable, Sequence
from itertools import count, groupby
from typing import Annotated, Any, cast

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.engine.replies.reader import Piece, ReplyReader
from mycli.runtime.engine.sequence import reply_room
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.server.http.api_error import invalid_value, unsupported_parameter
from mycli.runtime.server.recording import ReplyIds
from mycli.runtime.server.requests.formats import Constraints, output_format
from mycli.runtime.server.requests.schemas import (
    MAX_IDS,
    MAX_PROMPTS,
    BeamFields,
    ForReply,
    LongText,
    PromptTruncation,
    Sampling,
    StreamFigures,
    StreamOptions,
    TokenId,
)
from mycli.runtime.server.routes.chat_completions import FINISH
from mycli.runtime.server.routes.prompt_logprobs import PromptLogprobs, prompt_logprobs
from mycli.runtime.server.routes.wire import OpenAIRendering, completion_logprobs
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import Interface

DEFAULT_TOKENS = 16  # OpenAI's


class CompletionRequest(ForReply, Sampling, StreamFigures, BeamFields, Constraints, PromptTruncation, PromptLogprobs):
    """The body of POST /v1/completions."""

    prompt: (
        LongText
        | Annotated[list[LongText], Field(max_length=MAX_PROMPTS)]
        | Annotated[list[TokenId], Field(max_length=MAX_IDS)]
        | Annotated[list[Annotated[list[TokenId], Field(max_length=MAX_IDS)]], Field(max_length=MAX_PROMPTS)]
    )
    suffix: LongText | None = None
    n: int | None = Field(None, ge=1, le=64)
    echo: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=-1, le=1 << 31)  # -1: the rest of the context, as in llama.cpp
    n_predict: int | None = Field(None, ge=-1, le=1 << 31)  # of llama.cpp
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool = True  # of vLLM
    return_token_ids: bool | None = None  # of vLLM and SGLang


def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    prompts: Any = body.prompt
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    if not prompts:
        raise invalid_value("prompt", "is empty")
    max_replies = service.settings.limits.choices
    replies = (body.n or 1) * len(prompts)
    if replies > max_replies:  # before they are tokenized
        raise invalid_value("n", f"{replies} replies in one request; at most {max_replies}")
    ids = []
    for prompt in prompts:
        if body.suffix and isinstance(prompt, str):
            ids.append(service.fim_prompt(prompt, body.suffix, "suffix").ids)
        elif isinstance(prompt, str):
            ids.append(service.text_prompt(prompt, add_special=body.add_special_tokens))
        else:
            service.check_ids(prompt, "prompt")
            ids.append(cast(list[int], list(prompt)))
    return ids


def _check_suffix(body: CompletionRequest) -> None:
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not all(isinstance(text, str) for text in texts):
        raise invalid_value("suffix", "needs a prompt of text")
    if body.echo:  # the prompt has the suffix before the reply
        raise unsupported_parameter("suffix", "cannot be combined with echo")


def _prepare(service: Service, body: CompletionRequest) -> Prepared:
    requested = body.max_tokens if body.max_tokens is not None else body.n_predict
    limit = DEFAULT_TOKENS if requested is None else service.context + 1 if requested == -1 else requested
    if limit == 0 and not body.echo:
        raise invalid_value("max_tokens", "0 needs echo")
    if body.stream_options is not None and not body.stream:
        raise invalid_value("stream_options", "needs stream")
    if body.suffix:
        _check_suffix(body)
    room = service.context + 1 - (1 if requested == -1 else limit)
    prompts = [body.cut(prompt, room) for prompt in _prompts(service, body)]
    grammar = service.grammar(output_format(body))
    scored = (bool(body.echo) and body.logprobs is not None) or body.prompt_logprobs is not None
    top = body.most_logprobs(body.logprobs, body.stream)
    numbers, beams = count(), body.beams(body.n or 1)
    requests = []
    # Equal prompts are computed once; each search has its own beams.
    for prompt, same in groupby(prompts) if beams is None else ((prompt, [prompt]) for prompt in prompts):
        service.check_fits(prompt, None if requested == -1 else requested, "prompt")
        fitting = min(limit, reply_room(service.context, len(prompt)))
        most = None if beams is not None and requested == -1 else fitting
        request = service.request(prompt, body, most, grammar, top, scored, beams, bool(body.suffix))
        readers = [
            ReplyReader(service.loaded.tokenizer, body.text_rules, next(numbers), before=prompt)
            for _ in range((body.n or 1) * len(list(same)))
        ]
        requests.append((request, readers))
    return Prepared(requests, prompts)


class TextRendering(OpenAIRendering):
    """Writes replies as text_completion, whole or in chunks."""

    def __init__(self, service: Service, prepared: Prepared, body: CompletionRequest, ids: ReplyIds) -> None:
        self._tokenizer, self._prompt_top = service.loaded.tokenizer, body.prompt_logprobs
        self._echo, self._top, self._shows_ids = bool(body.echo), body.logprobs, bool(body.return_token_ids)
        model = body.model or service.name
        head = {"id": ids.name, "object": "text_completion", "created": ids.created, "model": model}
        super().__init__(prepared, head, body.stream_options, body)
        self._offsets = [0] * prepared.replies
        self._started = [False] * prepared.replies

    def begin(self) -> Iterable[bytes]:
        return ()  # an echoed prompt comes with the first piece, which has its log-probabilities

    def add(self, piece: Piece) -> Iterable[bytes]:
        self._count(piece)
        empty = {"index": piece.index, "text": "", "logprobs": None, "finish_reason": None}
        yield from self._progress_events(piece, empty)
        ids = self._shows_ids and piece.tokens
        if piece.content or ids or piece.logprobs or piece.prompt_logprobs or piece.end is not None:
            yield self._choice_event(self._choice(piece))

    def keep_alive(self) -> Iterable[bytes]:
        yield self._choice_event({"index": 0, "text": "", "logprobs": None, "finish_reason": None})

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any]:
        for reply in replies:
            self._counts.add(reply)
        choices = [self._choice(reply) for reply in replies]
        if self._prompt_top is not None:
            prompts = [self._prepared.prompts[self._prepared.prompt_of(reply.index)] for reply in replies]
            for choice, prompt in zip(choices, prompts, strict=True):
                same = [reply for reply, other in zip(replies, prompts, strict=True) if other == prompt]
                choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, same, self._prompt_top)
        return {**self._head, "choices": choices, **self._summary()}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        index, ids = piece.index, dict[str, Any]()
        text, tokens = piece.content, list[int | TokenLogprob]()
        prompt = self._prepared.prompts[self._prepared.prompt_of(index)]
        if self._shows_ids:
            ids = {"token_ids": piece.tokens, "prompt_token_ids": None if self._started[index] else prompt}
        if self._echo and not self._started[index]:
            text = self._tokenizer.decode(prompt) + text
            tokens += prompt[:1]
        self._started[index] = True
        logprobs = None
        if self._top is not None:
            tokens += (*(piece.prompt_logprobs if self._echo else ()), *piece.logprobs)
            offset = self._offsets[index]
            logprobs, self._offsets[index] = completion_logprobs(self._tokenizer, tokens, offset, self._top)
        end = None if piece.end is None else FINISH.get(piece.end, piece.end)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": end, **ids}


TEXT = Interface("completion", "cmpl-", CompletionRequest, _prepare, TextRendering)


async def completions(service: Service, request: Request) -> Response:
    """Continue texts."""
    return await TEXT.reply(service, request)
