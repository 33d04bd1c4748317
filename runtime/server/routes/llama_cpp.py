"""The fields that /infill and /completion of llama.cpp share: how their requests are read and their replies written."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from mycli.runtime.engine.replies.reader import Piece, ReplyReader
from mycli.runtime.engine.sequence import SequenceOutput, reply_room
from mycli.runtime.sampling.logprobs import MAX_TOP, TokenLogprob
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.encoding import event
from mycli.runtime.server.requests.formats import Constraints, output_format
from mycli.runtime.server.requests.schemas import ForReply, Sampling, StreamFigures
from mycli.runtime.server.routes.wire import OpenAIRendering, logprob_fields
from mycli.runtime.server.service import Prepared, Service

_LINES = re.compile(r"[^\n]*\n|[^\n]+")
_STOP_TYPES = {"stop": "eos", "stop_string": "word"}  # any other end: limit
# Sampler -> the fields that have no effect without it.
_SAMPLERS = {
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "temperature": ("temperature",),
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
}
_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "repetition_penalty": 1.0}
_OFF |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
_NO_EFFECT = ("dry", "typ_p", "xtc", "top_n_sigma", "adaptive_p")  # their fields are refused while they are on
_Name = Annotated[str, Field(max_length=64)]


class LlamaCppRequest(ForReply, Sampling, StreamFigures, Constraints):
    """The fields of llama.cpp's completion; None: the model's default."""

    n_predict: int | None = Field(None, ge=-1, le=1 << 31)  # -1: the rest of the context; 0: only compute the prompt
    max_tokens: int | None = Field(None, ge=-1, le=1 << 31)  # the same
    samplers: list[_Name] | None = Field(None, max_length=32)
    n_indent: int | None = Field(None, ge=0, le=1 << 10)  # a line with less white space before it ends the reply
    t_max_predict_ms: int | None = Field(None, ge=-1, le=1 << 31)  # the first line end after it ends the reply
    t_max_prompt_ms: int | None = Field(None, ge=-1, le=1 << 31)  # clients send it; no version of llama.cpp reads it
    response_fields: list[Annotated[str, Field(max_length=256)]] | None = Field(None, max_length=256)
    return_tokens: bool | None = None
    n_probs: int | None = Field(None, ge=0, le=MAX_TOP)

    @property
    def limit(self) -> int | None:
        """The largest number of tokens, None for the rest of the context."""
        limit = self.max_tokens if self.n_predict is None else self.n_predict
        return None if limit == -1 else limit

    def sampling(self) -> tuple[Sampling, list[str]]:
        """Return the settings with `samplers` applied, and what is left out."""
        # An empty list turns all off in llama.cpp; editors send it where nothing is to be sampled.
        if self.samplers is None:
            return self, []
        changes: dict[str, Any] = {}
        for sampler, fields in _SAMPLERS.items():
            if sampler not in self.samplers:
                changes |= {field: _OFF[field] for field in fields}
        unknown = [name for name in self.samplers if name not in _SAMPLERS and name not in _NO_EFFECT]
        if "infill" in unknown:
            # It drops unlikely tokens and merges those that begin alike, so its choice is nearly always the likeliest.
            changes["temperature"] = 0.0
        return self.model_copy(update=changes), [
            f"sampler {name}" if name.isidentifier() else "sampler unprintable" for name in unknown
        ]


class LineReader:
    """Reads a reply that ends at a line with less than `indent` white space, or with a line after `seconds`."""

    def __init__(self, reader: ReplyReader, indent: int, seconds: float | None) -> None:
        self.index = reader.index
        self._reader, self._indent, self._seconds = reader, indent, seconds
        self._first: float | None = None  # time of the first text
        self._margin: str | None = None  # white space of a line that has begun with nothing else; None in a line

    def feed(self, output: SequenceOutput) -> Piece:
        """Return what one output adds to the reply."""
        piece = self._reader.feed(output)
        text = piece.content
        if output.tokens and self._first is None:
            self._first = time.perf_counter()
        shown, ended = self._up_to_end(text)
        if ended:
            return replace(piece, parts=(shown,) if shown else (), end="length", stop=None)
        if piece.end is not None and self._margin:
            shown += self._margin
        return replace(piece, parts=(shown,) if shown else ())

    def _up_to_end(self, text: str) -> tuple[str, bool]:
        shown = ""
        late = self._seconds is not None and time.perf_counter() - (self._first or 0.0) > self._seconds
        for line in _LINES.findall(text):
            if self._margin is not None:
                rest = line.lstrip(" \t")
                self._margin += line[: len(line) - len(rest)]
                if not rest:
                    continue
                if len(self._margin) < self._indent:
                    return shown, True
                line, self._margin = self._margin + rest, None
            shown += line
            if line.endswith("\n"):
                if late:
                    return shown, True
                self._margin = "" if self._indent else None
        return shown, False


def prepare_replies(
    service: Service,
    body: LlamaCppRequest,
    prompts: Sequence[list[int]],
    param: str,
    omitted: Sequence[str] = (),
    *,
    fills: bool,
) -> Prepared:
    """Return the requests for one reply to each prompt; `fills`: `Service.fim_prompt` made them. Raises ApiError."""
    sampling, unsupported = body.sampling()
    grammar = service.grammar(output_format(body))
    milliseconds = body.t_max_predict_ms or 0
    seconds = milliseconds / 1000 if milliseconds > 0 else None
    requests = []
    for index, prompt in enumerate(prompts):
        service.check_fits(prompt, None, param)
        room = reply_room(service.context, len(prompt))
        limit = room if body.limit is None else min(body.limit, room)
        request = service.request(prompt, sampling, limit, grammar, body.n_probs or None, fills_in=fills)
        reader = ReplyReader(service.loaded.tokenizer, body.text_rules, index, before=prompt)
        limited = LineReader(reader, body.n_indent or 0, seconds) if body.n_indent or seconds is not None else reader
        requests.append((request, [limited]))
    return Prepared(requests, prompts, omitted=[*omitted, *unsupported])


@dataclass
class _Reply:
    # What has arrived of a reply.
    cached: int = 0
    generated: int = 0
    new_line: bool = False
    last: Piece = Piece()


class LlamaCppRendering(OpenAIRendering):
    """Writes replies in the form of llama.cpp; truncated: parts of the prompt were left out."""

    def __init__(self, service: Service, prepared: Prepared, body: LlamaCppRequest, truncated: bool) -> None:
        super().__init__(prepared, {}, None, body)
        self._tokenizer, self._model = service.loaded.tokenizer, body.model or service.name
        self._body, self._truncated = body, truncated
        self._states = [_Reply() for _ in prepared.prompts]

    def begin(self) -> Iterable[bytes]:
        return ()

    def add(self, piece: Piece) -> Iterable[bytes]:
        self._count(piece)
        self._note(piece)
        index = piece.index
        yield from self._progress_event(piece, self._part(index, ""))
        if piece.content or piece.logprobs:
            timings = {"timings": self._reply_timings(index)} if self._timed else {}
            probabilities = self._probabilities(piece.logprobs)
            yield event({**self._part(index, piece.content, piece.tokens), **probabilities, **timings})
        if piece.end is not None:
            yield event(self._result(index, "", ()))

    def keep_alive(self) -> Iterable[bytes]:
        yield event(self._part(0, ""))

    def finish(self) -> Iterable[bytes]:
        return ()

    def failed(self, error: ApiError) -> Iterable[bytes]:
        yield event({"error": error.fields()})

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any] | list[dict[str, Any]]:
        results = []
        for reply in replies:
            self._note(reply)
            probabilities = self._probabilities(reply.logprobs)
            results.append(self._result(reply.index, reply.content, reply.tokens, probabilities))
        return results if len(results) > 1 else results[0]

    def _note(self, piece: Piece) -> None:
        state = self._states[piece.index]
        state.cached = max(state.cached, piece.cached_tokens)
        state.generated += len(piece.tokens)
        state.new_line = state.new_line or "\n" in piece.content
        state.last = piece

    def _probabilities(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        if not self._body.n_probs:
            return {}

        def fields(token: int, logprob: float) -> dict[str, Any]:
            return {"id": token, **logprob_fields(self._tokenizer, token, logprob)}

        entries = [
            {**fields(item.token, item.logprob), "top_logprobs": [fields(*other) for other in item.top]}
            for item in logprobs
        ]
        return {"completion_probabilities": entries}

    def _reply_timings(self, index: int) -> dict[str, Any]:
        state = self._states[index]
        return self._timings(len(self._prepared.prompts[index]), state.cached, state.generated)

    def _part(self, index: int, content: str, tokens: Sequence[int] = ()) -> dict[str, Any]:
        return {
            "index": index,
            "content": content,
            "tokens": list(tokens) if self._body.return_tokens else [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._states[index].generated,
            "tokens_evaluated": len(self._prepared.prompts[index]),
        }

    def _result(
        self, index: int, content: str, tokens: Sequence[int], probabilities: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        state, paths = self._states[index], self._body.response_fields
        request, _ = self._prepared.requests[index]
        sampling = request.sampling
        result = {
            **self._part(index, content, tokens),
            "stop": True,
            "model": self._model,
            "generation_settings": {
                "n_predict": -1 if self._body.limit is None else self._body.limit,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "stop": self._body.stops,
                "stream": bool(self._body.stream),
            },
            "has_new_line": state.new_line,
            "truncated": self._truncated,
            "stop_type": _STOP_TYPES.get(state.last.end or "", "limit"),
            "stopping_word": state.last.stop or "",
            "tokens_cached": len(request.prompt) + state.generated,
            "timings": self._reply_timings(index),
            **(probabilities or {}),
        }
        if not paths or "prompt" in paths:
            result["prompt"] = self._tokenizer.spelled(request.prompt)
        return result if not paths else _chosen(result, paths)


def _chosen(result: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    # Keys are whole paths, as in llama.cpp: {"timings/prompt_n": 5}.
    chosen: dict[str, Any] = {}
    for path in paths:
        value: Any = result
        for key in path.split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            chosen[path] = value
    return chosen
