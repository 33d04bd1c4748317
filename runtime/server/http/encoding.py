"""Writes JSON responses, server-sent events and lines of JSON."""

import json
from typing import Any

from starlette.responses import Response


def event(data: Any, name: str | None = None) -> bytes:
    """Format one server-sent event with JSON data."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {dumps(data)}\n\n".encode()


def dumps(value: Any) -> str:
    """Return `value` as JSON on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode()
