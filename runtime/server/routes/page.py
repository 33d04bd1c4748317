"""GET / and /web/...: the chat page, files of this package, which load nothing from other servers."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.settings import ServerState

# Scripts and styles are files of this server, and none are inline. Only the sanitizer may turn text into markup.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_MEDIA = {"html": "text/html", "css": "text/css", "js": "text/javascript", "woff2": "font/woff2"}


@dataclass(frozen=True)
class _File:
    content: bytes
    media: str
    tag: str


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry


@cache
def _files() -> Mapping[str, _File]:
    # All files of the page by name: a name of a request is looked up and never becomes a path.
    by_name: dict[str, _File] = {}
    for name, entry in _walk(files("mycli.runtime.server").joinpath("web")):
        media = _MEDIA.get(name.rpartition(".")[2])
        if media is not None:
            content = entry.read_bytes()
            by_name[name] = _File(content, media, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return MappingProxyType(by_name)


def _response(request: Request, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise ApiError(404, "no such file of the page", "not_found")
    headers = {
        "content-security-policy": _POLICY,
        "x-frame-options": "DENY",
        "cache-control": "no-cache",  # asked for again with the tag, so that an update shows on reload
        "etag": file.tag,
    }
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media, headers=headers)


async def page(server: ServerState, request: Request) -> Response:
    """Return the chat page."""
    return _response(request, "page.html")


async def page_file(server: ServerState, request: Request) -> Response:
    """Return a script, style or font of the chat page."""
    return _response(request, request.path_params["name"])
