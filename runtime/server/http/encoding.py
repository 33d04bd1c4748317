"""Writes JSON responses, server-sent events and lines of JSON."""

import json
from typing import Any

from starlette.responses import Response


def event(data: Any, name: str | None = None) -> bytes:
    """Format one server-sent event with JSON data."""
    head = "" if name is None else f"event: {name}\n"
    return _encoded(f"{head}data: {dumps(data)}\n\n")


def dumps(value: Any) -> str:
    """Return `value` as JSON on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _encoded(text: str) -> bytes:
    # Some interfaces send fields of the request back, which may have half of a surrogate pair. UTF-8 cannot have one,
    # but Python's escape of it is JSON's.
    return text.encode("utf-8", "backslashreplace")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _encoded(dumps(content))
