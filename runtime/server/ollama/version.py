"""GET /api/version: the version of Ollama's interface, which some clients compare with the least they need."""

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.http.settings import ServerState
from mycli.runtime.utils import version

# Its routes and fields are served here. Clients refuse versions without the routes that they need: codex --oss those
# before 0.13.4 (OpenAI's responses), programs that start Claude Code those before 0.14 (Anthropic's messages).
INTERFACE_VERSION = "0.14.2"


async def ollama_version(server: ServerState, request: Request) -> Response:
    """Return the version of Ollama's interface that is served, and of this program."""
    return JsonResponse({"version": INTERFACE_VERSION, "mycli": version()})
