"""POST /v1/completions: OpenAI's continuation of texts, with the probabilities of the prompt's tokens (`echo`)."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.server.api_error import ApiError
from mycli.runtime.server.reply_reader import Piece, ReplyReader
from mycli.runtime.server.routes.chat_completions import FINISH
from mycli.runtime.server.routes.wire import TokenCounts, logprob_number, new_id, now, token_text
from mycli.runtime.server.schemas import CompletionRequest
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import answer, event, read_request

DEFAULT_TOKENS = 16  # OpenAI's


async def completions(service: Service, request: Request) -> Response:
    """Continue texts."""
    given, prepared = await read_request(service, request, CompletionRequest, lambda one: _prepare(service, one))
    rendering = TextRendering(service, given, prepared)
    return await answer(service, request, prepared, rendering, bool(given.stream))


def _prompts(service: Service, given: CompletionRequest) -> list[list[int]]:
    """The prompts as ids: a text, texts, ids, or lists of ids."""
    prompt: Any = given.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not prompt:
        raise ApiError(400, "prompt: is empty", "invalid_value", param="prompt")
    found = []
    for one in prompt:
        if isinstance(one, str):
            found.append(service.text_prompt(one))
        else:
            service.check_ids(one, "prompt")
            found.append(cast(list[int], list(one)))
    return found


def _prepare(service: Service, given: CompletionRequest) -> Prepared:
    most = service.settings.limits.choices
    limit = DEFAULT_TOKENS if given.max_tokens is None else given.max_tokens
    if limit == 0 and not given.echo:
        raise ApiError(400, "max_tokens: 0 needs echo", "invalid_value", param="max_tokens")
    if given.stream_options is not None and not given.stream:
        raise ApiError(400, "stream_options: needs stream", "invalid_value", param="stream_options")
    prompts = _prompts(service, given)
    count = given.n or 1
    if count * len(prompts) > most:
        raise ApiError(
            400, f"{count * len(prompts)} replies in one request, more than {most}", "invalid_value", param="n"
        )
    grammar = service.grammar(given.response_format)
    scored = bool(given.echo) and given.logprobs is not None
    wanted = []
    for number, prompt in enumerate(prompts):
        fitting = min(limit, service.room(prompt, given.max_tokens, "prompt"))
        for choice in range(count):
            request = service.request(prompt, given, choice, fitting, grammar, given.logprobs, scored)
            wanted.append((request, ReplyReader(service.loaded.tokenizer, number * count + choice, given.stops)))
    return Prepared(wanted, prompts)


class TextRendering:
    """Replies as text_completion, whole or in chunks."""

    def __init__(self, service: Service, given: CompletionRequest, prepared: Prepared) -> None:
        self._tokenizer = service.loaded.tokenizer
        self._echo, self._top = bool(given.echo), given.logprobs
        self._each = given.n or 1  # replies of a prompt
        self._prompts = prepared.prompts
        self._counts = TokenCounts(prepared.prompt_tokens)
        options = given.stream_options
        self._counted = options is not None and bool(options.include_usage)
        self._head = {"id": new_id("cmpl-"), "object": "text_completion", "created": now(), "model": service.name}
        self._texts = [self._tokenizer.decode(prompt) if self._echo else "" for prompt in self._prompts]
        self._offsets = [0] * len(prepared.wanted)
        self._begun = [False] * len(prepared.wanted)

    def begin(self) -> Iterable[bytes]:
        """Nothing: the prompt is echoed with the first piece."""
        return ()

    def add(self, piece: Piece) -> Iterable[bytes]:
        """What is new; the end comes with the last text."""
        self._counts.add(piece)
        if piece.content or piece.logprobs or piece.prompt_logprobs or piece.end is not None:
            yield event({**self._head, "choices": [self._choice(piece)]})

    def finish(self) -> Iterable[bytes]:
        """Counts, where they were asked for, and the mark of the end."""
        if self._counted:
            yield event({**self._head, "choices": [], "usage": self._counts.usage()})
        yield b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """The error, and the mark of the end."""
        yield event({"error": error.fields()})
        yield b"data: [DONE]\n\n"

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any]:
        """text_completion."""
        for reply in replies:
            self._counts.add(reply)
        choices = [self._choice(reply) for reply in replies]
        return {**self._head, "choices": choices, "usage": self._counts.usage()}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        first = not self._begun[piece.index]
        self._begun[piece.index] = True
        text = (self._texts[piece.index // self._each] if first else "") + piece.content
        end = None if piece.end is None else FINISH.get(piece.end, piece.end)
        logprobs = None if self._top is None else self._logprobs(piece, first)
        return {"index": piece.index, "text": text, "logprobs": logprobs, "finish_reason": end}

    def _logprobs(self, piece: Piece, first: bool) -> dict[str, Any]:
        """Parallel lists; the first token of an echoed prompt has no probability."""
        entries: list[tuple[int, TokenLogprob | None]] = []
        if first and self._echo:
            prompt = self._prompts[piece.index // self._each]
            entries += zip(prompt, (None, *piece.prompt_logprobs), strict=True)
        entries += [(one.token, one) for one in piece.logprobs]
        tokens, offsets = [], []
        for token, _ in entries:
            text, _ = token_text(self._tokenizer, token)
            tokens.append(text)
            offsets.append(self._offsets[piece.index])
            self._offsets[piece.index] += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [None if one is None else logprob_number(one.logprob) for _, one in entries],
            "top_logprobs": [None if one is None else self._likeliest(one) for _, one in entries],
            "text_offset": offsets,
        }

    def _likeliest(self, one: TokenLogprob) -> dict[str, float]:
        """By text; of two tokens with the same text the likelier. The token itself is always among them."""
        found: dict[str, float] = {}
        for token, value in (*one.top, (one.token, one.logprob)):
            text, _ = token_text(self._tokenizer, token)
            found[text] = max(logprob_number(value), found.get(text, -float("inf")))
        return found
