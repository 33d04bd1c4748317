"""POST /v1/replies/{id}/resume: sends an interrupted reply again and continues it, with the same tokens."""

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.recording import Resumption
from mycli.runtime.server.reply_header import find_reply
from mycli.runtime.server.requests.schemas import ForReply
from mycli.runtime.server.routes.chat_completions import CHAT
from mycli.runtime.server.routes.completions import TEXT
from mycli.runtime.server.routes.messages import MESSAGES
from mycli.runtime.server.routes.responses import RESPONSES
from mycli.runtime.server.service import Service
from mycli.runtime.server.streaming import Interface, read_request

INTERFACES: Mapping[str, Interface[Any]] = {
    interface.name: interface for interface in (CHAT, TEXT, MESSAGES, RESPONSES)
}
_RELEASE_TRIES, _RELEASE_SECONDS = 100, 0.05  # up to 5 s for the old connection to release the record


class ResumeRequest(ForReply):
    """The body of POST /v1/replies/{id}/resume; stream: as in the first request if it is left out."""

    after: int = Field(0, ge=0, le=1 << 31)  # characters of reasoning and content that the client has


async def resume(service: Service, request: Request) -> Response:
    """Send an interrupted reply again and continue it."""
    name = request.path_params["id"]
    body, header = await read_request(service, request, ResumeRequest, lambda body: find_reply(service.journal, name))
    assert service.journal is not None
    resumption = Resumption(service.journal, name, header, service.loaded.fingerprint, body.after)
    await _release(service, name)
    return await INTERFACES[header["interface"]].resume(service, request, resumption, body.stream)


async def _release(service: Service, name: str) -> None:
    # A client may come back before the server has noticed that its connection was lost. The new connection then takes
    # the reply over; refusing it would make the client wait for a timeout.
    for _ in range(_RELEASE_TRIES):
        delivery = service.recorded.get(name)
        if delivery is None:
            return
        delivery.fail(ApiError(409, "the reply was resumed on another connection", "reply_resumed"))
        await asyncio.sleep(_RELEASE_SECONDS)
