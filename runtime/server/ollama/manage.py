"""POST /api/pull and others that change the models of this machine: refused, with the command that does it."""

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.settings import ServerState

MANAGING = (
    ("POST", "/api/pull"),
    ("POST", "/api/push"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
)


async def refuse_managing(server: ServerState, request: Request) -> Response:
    """Refuse to change the models of this machine."""
    message = f"{request.url.path}: this server does not change the models of its machine"
    raise ApiError(403, message, "model_management_off")
