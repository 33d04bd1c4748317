"""GET /: the chat page, one file of this package, which may load nothing from other servers."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from mycli.runtime.server.settings import ServerState


@cache
def _page() -> tuple[str, str]:
    # The policy allows the page's own script and style only, by their hashes.
    text = files("mycli.runtime.server").joinpath("page.html").read_text(encoding="utf-8")
    hashes = {
        tag: base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()
        for tag in ("script", "style")
        if (match := re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL))
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return text, policy


async def page(server: ServerState, request: Request) -> Response:
    """Return the chat page."""
    text, policy = _page()
    headers = {"content-security-policy": policy, "cache-control": "no-cache", "x-frame-options": "DENY"}
    return Response(text, media_type="text/html", headers=headers)
