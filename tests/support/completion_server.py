"""Simulates a server of OpenAI's completions with scripted responses and pauses, for testing load generators."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Stream = Callable[[Any, Callable[[str], None]], None]
METRICS = """# HELP vllm:num_preemptions_total x
vllm:num_preemptions_total{model="a"} %d.0
vllm:prefix_cache_hits_total 7.0
vllm:request_queue_time_seconds_sum %f
vllm:request_queue_time_seconds_count %d.0
other 5
"""


class Scripted:
    """Runs a server; `stream` writes the response line by line. `most`: the peak number of concurrent requests."""

    def __init__(self, stream: Stream, models: bytes, status: int) -> None:
        self.asked: list[Any] = []
        self.keys: list[str | None] = []
        self.now = self.most = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Log nothing."""

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _leave(self) -> None:
                with outer.lock:
                    outer.now -= self.inside
                    self.inside = 0

            def _say(self, line: str) -> None:
                if "finish_reason" in line:
                    self._leave()  # before the client reads the end, since it may send the next request immediately
                self.wfile.write(line.encode() + b"\n\n")
                self.wfile.flush()

            def do_GET(self) -> None:
                count = len(outer.asked)
                found = models if self.path.endswith("/models") else (METRICS % (count, count * 0.25, count)).encode()
                outer.keys.append(self.headers.get("authorization"))
                self._answer(200, found)

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer.lock:
                    outer.asked.append(asked)
                    self.inside = 1
                    outer.now += 1
                    outer.most = max(outer.most, outer.now)
                if status != 200:
                    self._answer(status, json.dumps({"error": {"message": "too long"}}).encode())
                else:
                    self.send_response(200)
                    self.end_headers()
                    stream(asked, self._say)
                self._leave()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


MODELS = b'{"data": [{"id": "it"}]}'


def event(**fields: Any) -> str:
    return "data: " + json.dumps(fields)


def talkative(asked: Any, say: Callable[[str], None]) -> None:
    """Send three tokens and the end. A word counts as one and a half tokens, and every prompt has 3 more."""
    say(": ping")
    for _ in range(3):
        say(event(choices=[{"text": "a"}]))
    say(event(choices=[{"text": "", "finish_reason": "length"}]))
    words = len(asked["prompt"].split())
    counts = {
        "prompt_tokens": 3 + words * 3 // 2,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    say(event(choices=[], usage=counts))
    say("data: [DONE]")
    say(event(choices=[{"text": "nobody reads this"}]))


@contextmanager
def scripted(stream: Stream = talkative, models: bytes = MODELS, status: int = 200) -> Iterator[Scripted]:
    found = Scripted(stream, models, status)
    threading.Thread(target=found.server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield found
    finally:
        found.server.shutdown()
        found.server.server_close()
