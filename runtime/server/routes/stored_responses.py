"""GET and DELETE /v1/responses/{id}, GET /v1/responses/{id}/input_items: responses that are stored in memory."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.api_error import invalid_value, response_not_found, unsupported_parameter
from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.service import Service

_LARGEST_PAGE = 100


def _stored(service: Service, request: Request) -> Mapping[str, Any]:
    name = request.path_params["id"]
    stored = service.conversations.find(name)
    if stored is None:
        raise response_not_found(name)
    return stored


async def show_response(service: Service, request: Request) -> Response:
    """Show a stored response."""
    if request.query_params.get("stream") == "true":
        raise unsupported_parameter("stream", "a stored response cannot be streamed")
    return JsonResponse(_stored(service, request)["response"])


async def delete_response(service: Service, request: Request) -> Response:
    """Delete a stored response and its output items; conversations that continued it stay."""
    response = _stored(service, request)["response"]
    service.conversations.remove(response["id"])
    for item in response["output"]:
        service.items.remove(item["id"])
    return JsonResponse({"id": response["id"], "object": "response", "deleted": True})


async def list_input_items(service: Service, request: Request) -> Response:
    """List the items that a stored response replied to, those of the conversation it continued included."""
    items = [_listed(item) for item in _stored(service, request)["input"]]
    order, limit = request.query_params.get("order", "desc"), _limit(request)
    if order not in ("asc", "desc"):
        raise invalid_value("order", "must be asc or desc")
    if order == "desc":
        items.reverse()
    if after := request.query_params.get("after"):
        names = [item["id"] for item in items]
        if after not in names:
            raise invalid_value("after", f"the response has no item {after[:60]!r}")
        items = items[names.index(after) + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JsonResponse({"object": "list", "data": page, **ends, "has_more": len(items) > limit})


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", "20")
    if not (text.isascii() and text.isdecimal() and len(text) < 4 and 1 <= int(text) <= _LARGEST_PAGE):
        raise invalid_value("limit", f"must be 1 to {_LARGEST_PAGE}")
    return int(text)


def _listed(item: Mapping[str, Any]) -> dict[str, Any]:
    # A message may have been sent without type, and its content as a string; clients read a list of parts.
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind != "message" or not isinstance(item.get("content"), str):
        return {**item, "type": kind}
    part = {"type": "output_text" if item["role"] == "assistant" else "input_text", "text": item["content"]}
    return {"status": "completed", **item, "type": kind, "content": [part]}
