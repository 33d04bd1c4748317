"""GET /health, /version and /metrics."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.service import Service
from mycli.runtime.server.streaming import off_loop
from mycli.runtime.utils import version


async def health(service: Service, request: Request) -> Response:
    """Return 200 while requests are accepted; 503 while shutting down or after the engine has failed."""
    state = "draining" if service.draining else "failed" if service.worker.failed else "ok"
    stats = service.worker.stats
    counts = {"running": stats.running, "waiting": service.worker.waiting, "cache": round(stats.cache_usage, 4)}
    return JsonResponse({"status": state, **counts}, 200 if state == "ok" else 503)


async def server_version(service: Service, request: Request) -> Response:
    """Return the version of this program."""
    return JsonResponse({"version": await off_loop(service, version)})


async def metrics(service: Service, request: Request) -> Response:
    """Return metrics in Prometheus' text format."""
    return Response(await off_loop(service, service.worker.metrics.text), media_type=CONTENT_TYPE_LATEST)
