"""GET /slots: llama.cpp's list of the replies that may run concurrently, and how many do."""

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.service import Service


async def slots(service: Service, request: Request) -> Response:
    """Return one entry for each reply that may run; with fail_on_no_slot=1, 503 if all do."""
    count, running = service.worker.engine.scheduler.limits.running, service.worker.stats.running
    if running >= count and request.query_params.get("fail_on_no_slot"):
        raise ApiError(503, f"no slot available: {running} replies are running", "unavailable")
    # Sequences have no slot of their own here: the first ones stand for those that run. No prompt is shown.
    return JsonResponse(
        [
            {"id": index, "n_ctx": service.context, "speculative": False, "is_processing": index < running}
            for index in range(count)
        ]
    )
