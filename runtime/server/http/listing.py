"""The entries of GET /v1/models, of a server of one model or of several: in OpenAI's form, or in Anthropic's."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request

from mycli.runtime.server.ollama.card import utc_text


def openai_model(name: str, root: str, created: int, context: int) -> dict[str, Any]:
    """Return the fields that both servers have; root: the first of the model's names; created: since 1970."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "mycli",
        "type": "base",  # Mistral's client tells its two kinds of models apart by it
        "root": root,
        "context_length": context,
        "max_model_len": context,  # the same, as vLLM names it
        "max_context_length": context,  # and as Mistral does
    }


def anthropic_model(name: str, created: int, context: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": utc_text(datetime.fromtimestamp(created, UTC)),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def asks_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def model_list(request: Request, models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the list of all models, in the form that the request asks for."""
    if asks_anthropic(request):
        return {"data": models, "first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
    return {"object": "list", "data": models}
