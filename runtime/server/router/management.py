"""POST /api/pull and DELETE /api/delete, for a server started with permission to download and delete models."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response, StreamingResponse

from mycli.runtime.errors import UserError
from mycli.runtime.hub.names import is_hub_name
from mycli.runtime.server.http.api_error import ApiError, invalid_value
from mycli.runtime.server.http.encoding import JsonResponse, dumps
from mycli.runtime.server.router.model import RoutedModel
from mycli.runtime.server.router.pool import ModelPool
from mycli.runtime.utils.sanitize import one_line

_LINE_SECONDS = 5.0  # between two lines of the state of a download
_MAX_OUTPUT = 1 << 22


@dataclass(frozen=True)
class ModelManager:
    """Downloads and deletes models by child processes.

    pull, remove: return the command for a name, which prints JSON; describe: returns the model to serve for a name.
    """

    pull: Callable[[str], Sequence[str]]
    remove: Callable[[str], Sequence[str]]
    describe: Callable[[str], RoutedModel]
    environment: Mapping[str, str]

    async def pulled(self, pool: ModelPool, name: str) -> AsyncIterator[dict[str, Any]]:
        """Download a model and add it to `pool`; yield the states of the download."""
        yield {"status": "pulling manifest"}  # Ollama's first line
        task = asyncio.create_task(_run(self.pull(name), self.environment))
        try:
            while not (await asyncio.wait({task}, timeout=_LINE_SECONDS))[0]:
                yield {"status": f"pulling {name}"}
            task.result()
            model = await asyncio.to_thread(self.describe, name)
        except (ApiError, UserError) as error:
            yield {"error": error.message}
            return
        finally:
            task.cancel()  # also when the client disconnects
        pool.add(model)
        yield {"status": "success"}

    async def removed(self, pool: ModelPool, name: str) -> Response:
        """Unload and delete a model. Raises ApiError for a model that is in use, or that mycli did not store."""
        slot = pool.find(name)
        if not slot.model.removable:
            message = f"{slot.model.name} was not pulled or quantized by mycli, so it is not deleted"
            raise ApiError(403, message, "not_removable", param="model")
        await pool.remove(slot)
        await _run(self.remove(slot.model.removable), self.environment)
        return JsonResponse({"status": "success"})


def pull_response(manager: ModelManager, pool: ModelPool, values: object, name: str | None) -> Response:
    """Return the states of a download as lines of JSON. Raises ApiError for a name that is not on the hub."""
    if name is None or name.startswith("-") or not is_hub_name(name):
        raise invalid_value("model", f"{name!r:.80} is not a name such as org/repo on the Hugging Face hub")

    async def lines() -> AsyncIterator[bytes]:
        # Without `stream` the client reads one object: the last state.
        whole = isinstance(values, dict) and values.get("stream") is False
        state: dict[str, Any] = {}
        async for state in manager.pulled(pool, name):
            if not whole:
                yield (dumps(state) + "\n").encode()
        if whole:
            yield dumps(state).encode()

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    # A process, because a thread cannot be ended when the client disconnects. stderr holds progress only; the error of
    # the command is in the JSON that it prints.
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
        limit=_MAX_OUTPUT,
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
    if process.returncode == 0:
        return
    cause = ""
    with suppress(ValueError, KeyError, TypeError):
        cause = str(json.loads(output.splitlines()[-1])["error"]["message"])
    message = cause or f"the command ended with exit code {process.returncode}"
    raise ApiError(500, one_line(message, 500), "command_failed")
