"""A client of OpenAI's completions that times one streamed reply, for any server with /v1/models and /v1/completions.

Responses are not trusted: sizes and types are checked.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.utils.json_fields import strict_json

_TIMEOUT = 600.0  # seconds without a byte
_MAX_ANSWER = 1 << 24  # bytes of a response
_MAX_LINE = 1 << 20  # bytes of an event
_MAX_LINES = 1 << 22  # lines of a reply
_COUNTERS = re.compile(
    r"^(?:mycli|vllm):(prefix_cache_queries|prefix_cache_hits|num_preemptions|request_queue_time_seconds_sum|"
    r"request_queue_time_seconds_count)(?:_total)?(?:\{[^}]*\})? ([0-9.eE+-]+)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Reply:
    """Times of one request, in seconds of a monotonic clock, and token counts; `problem`: why there is no reply."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    prompt: int = 0
    cached: int = 0
    tokens: int = 0
    problem: str = ""

    @property
    def first_token_seconds(self) -> float:
        return self.first - self.sent

    @property
    def token_seconds(self) -> float | None:
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


class CompletionServer:
    """A server and the first model that it lists."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """Raises UsageError for an invalid address, ModelError if no such server responds."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.username:
            raise UsageError(f"{url}: not the address of a server", "write it as http://127.0.0.1:8080")
        self.url, self._host, self._port = url.rstrip("/"), parts.hostname, port
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            self.model = str(strict_json(self._get("/v1/models"))["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise ModelError(
                f"{self.url}: /v1/models lists no model", "the server must have OpenAI's /v1/models"
            ) from None

    def _open(self, method: str, path: str, body: bytes | None = None) -> tuple[HTTPConnection, HTTPResponse]:
        connection = self._kind(self._host, self._port, timeout=_TIMEOUT)
        try:
            connection.request(method, self._path + path, body, self._headers)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def _get(self, path: str) -> bytes:
        try:
            connection, response = self._open("GET", path)
            try:
                answer = response.read(_MAX_ANSWER)
            finally:
                connection.close()
        except (OSError, HTTPException) as error:
            cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NotFoundError(f"{self.url}: {cause}", "check that a server is running there") from None
        if response.status != 200:
            raise ModelError(f"{self.url}{path}: status {response.status}: {_problem(answer)}")
        return answer

    def counters(self) -> dict[str, float]:
        """Return vLLM's counters of prefix cache, preemptions and queue time from /metrics; {} without them."""
        try:
            return {name: float(value) for name, value in _COUNTERS.findall(self._get("/metrics").decode())}
        except (ModelError, NotFoundError, ValueError):
            return {}

    def reply(self, prompt: str, tokens: int) -> Reply:
        """Stream one greedy completion of exactly `tokens` tokens: end tokens are ignored."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = time.monotonic()
        try:
            connection, response = self._open("POST", "/v1/completions", json.dumps(body).encode())
            try:
                if response.status != 200:
                    return Reply(sent, problem=f"{response.status}: {_problem(response.read(_MAX_ANSWER))}")
                return _timed(sent, response)
            finally:
                connection.close()
        except (OSError, HTTPException, ValueError) as error:
            return Reply(sent, problem=f"{type(error).__name__}: {error}")


def _problem(answer: bytes) -> str:
    try:
        return str(strict_json(answer)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode("utf-8", "replace")


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    for _ in range(_MAX_LINES):
        line = response.readline(_MAX_LINE)
        if not line:
            return
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = strict_json(data)
        if not isinstance(event, dict):
            raise ValueError("an event is not a JSON object")
        yield event
    raise ValueError("the reply does not end")


def _has_token(data: Mapping[str, Any]) -> bool:
    # An event without text may still bring a token, as part of a character; one with a finish_reason does not.
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(choice, dict) and (bool(choice.get("text")) or not choice.get("finish_reason"))


def _timed(sent: float, response: HTTPResponse) -> Reply:
    first = last = 0.0
    usage: Mapping[str, Any] = {}
    seen = 0
    for data in _events(response):
        now = time.monotonic()
        if "error" in data:
            return Reply(sent, problem=str(data["error"])[:200])
        if _has_token(data):
            seen += 1
            first, last = first or now, now
        if isinstance(data.get("usage"), dict):
            usage = data["usage"]
    if not seen:
        return Reply(sent, problem="the reply is empty")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    counts = (usage.get("prompt_tokens"), cached, usage.get("completion_tokens", seen))
    prompt, cached, tokens = (count if isinstance(count, int) and count >= 0 else 0 for count in counts)
    return Reply(sent, first, last, prompt, cached, tokens)
