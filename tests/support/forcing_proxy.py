"""Runs a proxy that forces a tool call in the first turn and records the exchanges.

A request with tools and without tool results gets a `tool_choice` that requires a call, in the format of its interface,
so that a random model calls a tool and the client's whole loop runs.
"""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

_RESULTS = ('"role": "tool"', '"tool_result"', '"function_call_output"', '"custom_tool_call_output"')


@dataclass
class Exchange:
    """Holds one forwarded request, whether a call was forced, and the response."""

    path: str
    body: Any
    forced: bool
    status: int = 0
    answer: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def force(path: str, body: Any, tool: str | None = None) -> bool:
    """Change a request so that it requires a call, of `tool` if it is set; return whether it did."""
    tools = body.get("tools") if isinstance(body, dict) else None
    if not tools or any(mark in json.dumps(body) for mark in _RESULTS):
        return False
    if path.startswith("/v1/messages"):
        body["tool_choice"] = {"type": "any"} if tool is None else {"type": "tool", "name": tool}
        body.pop("thinking", None)
    elif path.startswith("/v1/responses"):
        body["tool_choice"] = "required" if tool is None else {"type": "function", "name": tool}
    else:
        body["tool_choice"] = "required" if tool is None else {"type": "function", "function": {"name": tool}}
    return True


@contextmanager
def proxy(port: int, tool: str | None = None, forcing: bool = True) -> Iterator[tuple[int, list[Exchange]]]:
    """Forward to the server at `port` inside this context; yield the proxy's port and the list of exchanges."""
    passed: list[Exchange] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            """Log nothing: `passed` records every exchange."""

        def _pass(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            try:
                body = json.loads(data) if data else None
            except ValueError:
                body = None
            forced = forcing and force(self.path, body, tool)
            exchange = Exchange(self.path, body, forced)
            passed.append(exchange)
            kept = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            link.request(self.command, self.path, json.dumps(body).encode() if forced else data, kept)
            answer = link.getresponse()
            exchange.status = answer.status
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
                    exchange.headers[name.lower()] = value
            self.send_header("connection", "close")
            self.end_headers()
            while part := answer.read1(65536):
                exchange.answer += part
                self.wfile.write(part)
            self.close_connection = True

        do_GET = do_POST = do_HEAD = _pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1], passed
    finally:
        server.shutdown()
        server.server_close()


_HOP = ("host", "content-length", "connection", "transfer-encoding", "accept-encoding", "keep-alive")
