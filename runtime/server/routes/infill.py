"""POST /infill: llama.cpp's completion of code between a prefix and a suffix, for code editors."""

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.requests.schemas import LongText, Strict
from mycli.runtime.server.routes.llama_cpp import LlamaCppRendering, LlamaCppRequest, prepare_replies
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.streaming import answer, read_request

_LEAST_REPLY = 256  # tokens that a cut prompt leaves for a reply without a limit


class ExtraText(Strict):
    """A part of another file."""

    text: LongText
    filename: Annotated[str, Field(max_length=4096)] = "tmp"


class InfillRequest(LlamaCppRequest):
    """The body of POST /infill."""

    input_prefix: LongText
    input_suffix: LongText
    input_extra: list[ExtraText] | None = Field(None, max_length=1024)
    prompt: LongText | None = None  # the beginning of the line at the cursor, after the prefix


def _prepare(service: Service, body: InfillRequest) -> tuple[Prepared, bool]:
    # Editors send more than fits, and count on the server to keep the text nearest to the cursor.
    reply = _LEAST_REPLY if body.limit is None else body.limit
    room = service.context - min(reply, service.context // 4)
    extra = [(part.filename, part.text) for part in body.input_extra or ()]
    prefix = body.input_prefix + (body.prompt or "")
    prompt = service.fim_prompt(prefix, body.input_suffix, "input_suffix", extra, room)
    omitted = ["text beyond the context"] if prompt.cut else []
    return prepare_replies(service, body, [prompt.ids], "input_prefix", omitted, fills=True), prompt.cut


async def infill(service: Service, request: Request) -> Response:
    """Fill in the text between a prefix and a suffix, in llama.cpp's form."""
    body, (prepared, cut) = await read_request(service, request, InfillRequest, lambda body: _prepare(service, body))
    return await answer(service, request, prepared, LlamaCppRendering(service, prepared, body, cut), body.stream)
