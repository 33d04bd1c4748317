"""One line of log per request: when, who, what, the token counts and times. Never a prompt, a reply or a key."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]


@dataclass
class RequestFigures:
    """Token counts of a request and its replies. ttft, tpot: seconds to the first token, and per token after it."""

    prompt: int = 0
    completion: int = 0
    ttft: float | None = None
    tpot: float | None = None
    _cached: dict[int, int] = field(default_factory=dict)  # by prompt, since replies to one prompt share its tokens

    def add_cached(self, prompt: int, tokens: int) -> None:
        """Note that `tokens` of the prompt with this number were found in the cache."""
        self._cached[prompt] = max(tokens, self._cached.get(prompt, 0))

    @property
    def cached(self) -> int:
        return min(sum(self._cached.values()), self.prompt)


@dataclass(frozen=True)
class RequestRecord:
    """One answered request.

    omitted: parts of it that were left out; key: the name of the client's key; missed: where and why its prompt differs
    from the most similar earlier one.
    """

    time: datetime
    client: str
    request_id: str
    method: str
    route: str
    model: str
    status: int
    seconds: float
    figures: RequestFigures | None = None
    omitted: Sequence[str] = ()
    key: str = ""
    missed: str = ""

    def fields(self) -> Mapping[str, Any]:
        """Return the record as an object; times in seconds, None for what the request did not have."""
        figures = self.figures
        return {
            "time": self.time.isoformat(timespec="milliseconds"),
            "client": self.client,
            "request_id": self.request_id,
            "method": self.method,
            "route": self.route,
            "model": self.model,
            "status": self.status,
            "seconds": round(self.seconds, 6),
            "prompt_tokens": None if figures is None else figures.prompt,
            "cached_tokens": None if figures is None else figures.cached,
            "completion_tokens": None if figures is None else figures.completion,
            "ttft": None if figures is None or figures.ttft is None else round(figures.ttft, 6),
            "tpot": None if figures is None or figures.tpot is None else round(figures.tpot, 6),
            "omitted": list(self.omitted),
            "key": self.key or None,
            "missed": self.missed or None,
        }

    def line(self, log_format: LogFormat) -> str:
        """Return the record as one line."""
        if log_format == "json":
            return json.dumps(self.fields(), ensure_ascii=False)
        head = f"{self.time.isoformat(timespec='milliseconds')} {self.client} {self.method} {self.route} {self.status}"
        words = [head, self.model, f"{self.seconds:.3f} s"]
        if self.figures is not None:
            words.append(f"prompt {self.figures.prompt} ({self.figures.cached} cached)")
            words.append(f"completion {self.figures.completion}")
            words += [] if self.figures.ttft is None else [f"TTFT {self.figures.ttft * 1000:.0f} ms"]
            words += [] if self.figures.tpot is None else [f"TPOT {self.figures.tpot * 1000:.1f} ms"]
        words += [f"key {self.key}"] if self.key else []
        words += [f"cache missed at {self.missed}"] if self.missed else []
        words += [f"left out: {', '.join(self.omitted)}"] if self.omitted else []
        return " · ".join([*words, self.request_id])
