"""The fields that /infill and /completion of llama.cpp share: how their requests are read and their replies written."""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from mycli.runtime.engine.replies.reader import Piece, ReplyReader
from mycli.runtime.engine.sequence import SequenceOutput, reply_room
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.encoding import event
from mycli.runtime.server.requests.formats import Constraints, output_format
from mycli.runtime.server.requests.schemas import ForReply, Sampling, StreamFigures
from mycli.runtime.server.routes.wire import OpenAIRendering
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


def prepare_reply(
    service: Service, body: LlamaCppRequest, prompt: list[int], param: str, omitted: Sequence[str] = (), *, fills: bool
) -> Prepared:
    """Return the request for one reply; `fills`: to a prompt of `Service.fim_prompt`. Raises ApiError."""
    service.check_fits(prompt, None, param)
    sampling, unsupported = body.sampling()
    room = reply_room(service.context, len(prompt))
    limit = room if body.limit is None else min(body.limit, room)
    request = service.request(prompt, sampling, limit, service.grammar(output_format(body)), None, fills_in=fills)
    reader = ReplyReader(service.loaded.tokenizer, body.stops, before=prompt)
    milliseconds = body.t_max_predict_ms or 0
    seconds = milliseconds / 1000 if milliseconds > 0 else None
    limited = LineReader(reader, body.n_indent or 0, seconds) if body.n_indent or seconds is not None else reader
    return Prepared([(request, [limited])], [prompt], omitted=[*omitted, *unsupported])


class LlamaCppRendering(OpenAIRendering):
    """Writes a reply in the form of llama.cpp; truncated: parts of the prompt were left out."""

    def __init__(self, service: Service, prepared: Prepared, body: LlamaCppRequest, truncated: bool) -> None:
        super().__init__(prepared, {}, None, body)
        self._tokenizer, self._model = service.loaded.tokenizer, body.model or service.name
        ((self._request, _),) = prepared.requests
        self._body, self._truncated = body, truncated
        self._new_line = False
        self._last = Piece()

    def begin(self) -> Iterable[bytes]:
        return ()

    def add(self, piece: Piece) -> Iterable[bytes]:
        self._count(piece)
        self._note(piece)
        yield from self._progress_event(piece, self._part(""))
        if piece.content:
            timings = {"timings": self._timings()} if self._timed else {}
            yield event({**self._part(piece.content, piece.tokens), **timings})

    def keep_alive(self) -> Iterable[bytes]:
        yield event(self._part(""))

    def finish(self) -> Iterable[bytes]:
        yield event(self._result("", ()))

    def failed(self, error: ApiError) -> Iterable[bytes]:
        yield event({"error": error.fields()})

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any]:
        (reply,) = replies
        self._counts.add(reply)
        self._note(reply)
        return self._result(reply.content, reply.tokens)

    def _note(self, piece: Piece) -> None:
        self._new_line = self._new_line or "\n" in piece.content
        self._last = piece

    def _part(self, content: str, tokens: Sequence[int] = ()) -> dict[str, Any]:
        return {
            "index": 0,
            "content": content,
            "tokens": list(tokens) if self._body.return_tokens else [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._counts.generated,
            "tokens_evaluated": self._counts.prompt,
        }

    def _result(self, content: str, tokens: Sequence[int]) -> dict[str, Any]:
        sampling, paths = self._request.sampling, self._body.response_fields
        result = {
            **self._part(content, tokens),
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
            "has_new_line": self._new_line,
            "truncated": self._truncated,
            "stop_type": _STOP_TYPES.get(self._last.end or "", "limit"),
            "stopping_word": self._last.stop or "",
            "tokens_cached": self._counts.prompt + self._counts.generated,
            "timings": self._timings(),
        }
        if not paths or "prompt" in paths:
            result["prompt"] = self._tokenizer.spelled(self._request.prompt)
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
