"""GET /api/version: the version of Ollama's interface, which some clients compare with the least they need."""

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.http.settings import ServerState
from mycli.runtime.utils import version

INTERFACE_VERSION = "0.12.11"  # whose fields these routes have


async def ollama_version(server: ServerState, request: Request) -> Response:
    """Return the version of Ollama's interface that is served, and of this program."""
    return JsonResponse({"version": INTERFACE_VERSION, "mycli": version()})
