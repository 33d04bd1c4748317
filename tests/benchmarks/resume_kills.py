"""Checks that replies killed and resumed are complete: the client's part plus the resumed part equal the whole reply.

    python -m tests.benchmarks.resume_kills --cuts 1000 --clients 200 --kills 100

`--cuts`: records cut at a random byte, as kill -9 leaves them, resumed by another engine of this process: as many each
of greedy and sampled replies, with a schema, a tool call, drafts, preemption and log-probabilities. `--clients`:
connections reset at a random character, resumed on the same server, 16 at a time in a cache that holds 8. `--kills`:
servers killed with SIGKILL while they send eight replies (sampled, greedy, schema, tools; OpenAI's and Anthropic's
interfaces), which the next server resumes. Servers draft by n-gram lookup. Exits with 1 if any reply differs.

Prints a line for every 50 of each. It waits for events, not for times, so it may run next to other work.
"""

import argparse
import http.client
import itertools
import json
import os
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from tests.support.command_line import COMMAND
from tests.support.resumed import KINDS, engine_for, load_pico, record_whole, requests, resumed_after_kill

MESSAGES = [{"role": "user", "content": "Tell me about Leo and his dog."}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 400}}, "required": ["name"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
LONG: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 330, "stream": True}
CHAT, OTHER = "/v1/chat/completions", "/v1/messages"
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {**LONG, "temperature": 0, "ignore_eos": True}),
    (CHAT, {**LONG, "temperature": 1, "seed": 1, "ignore_eos": True}),
    (CHAT, {**LONG, "temperature": 0.9, "seed": 2, "repetition_penalty": 1.2, "ignore_eos": True}),
    (CHAT, {**LONG, "temperature": 0.9, "seed": 3, "response_format": FORMAT}),
    (CHAT, {**LONG, "temperature": 0.9, "seed": 4, "tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {**LONG, "temperature": 1, "seed": 5, "n": 1, "ignore_eos": True}),
    (OTHER, {**LONG, "temperature": 0}),
    ("/v1/completions", {"prompt": "Leo", "max_tokens": 330, "temperature": 0, "ignore_eos": True, "stream": True}),
)


def text_of(event: dict[str, Any]) -> tuple[str, str]:
    """Return the text of an event, and the arguments of its tool calls."""
    if "choices" in event:
        choice = (event["choices"] or [{}])[0]
        delta = choice.get("delta", {})
        calls = "".join(call["function"]["arguments"] for call in delta.get("tool_calls") or ())
        return (delta.get("content") or "") + choice.get("text", ""), calls
    return str(event.get("delta", {}).get("text", "")), ""


class Client(threading.Thread):
    """Read one streamed reply until it ends, the server is gone, or `most` characters have come."""

    def __init__(self, port: int, path: str, body: dict[str, Any], most: int | None = None) -> None:
        super().__init__(daemon=True)
        self.port, self.path, self.body, self.most = port, path, body, most
        self.name_of_reply, self.text, self.calls, self.ended = "", "", "", False
        self.start()

    def run(self) -> None:
        with suppress(OSError, http.client.HTTPException, ValueError):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
            connection.request("POST", self.path, json.dumps(self.body), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                self.text = f"status {response.status}: {response.read()!r}"
                return
            while line := response.readline():
                if line.startswith(b"data: "):
                    data = line.decode().removeprefix("data: ").strip()
                    # http.client reports a broken connection as the end of a response.
                    self.ended = data == "[DONE]" or '"message_stop"' in data
                    if data != "[DONE]":
                        self._take(json.loads(data))
                if self.most is not None and len(self.text + self.calls) >= self.most:
                    assert connection.sock is not None
                    # The kernel closes the sockets of a killed process; with this option it also resets the connection.
                    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    response.close()
                    connection.close()
                    return

    def _take(self, event: dict[str, Any]) -> None:
        self.name_of_reply = self.name_of_reply or event.get("id") or event.get("message", {}).get("id", "")
        text, calls = text_of(event)
        self.text += text
        self.calls += calls


class Server:
    """A server of pico that drafts by n-gram lookup, in a process that can be killed."""

    def __init__(self, state: str) -> None:
        self._environment = {**os.environ, "XDG_STATE_HOME": state}
        self._start()

    def _start(self) -> None:
        words = ["serve", "pico", "--port", "0", "--ctx", "512", "--draft", "ngram", "--threads", "1", "-q"]
        self._child = subprocess.Popen(
            [*COMMAND, *words],
            env=self._environment,
            cwd=tempfile.gettempdir(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout is not None
        self.port = int(self._child.stdout.readline().split(":")[2].split()[0])

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()

    def restart(self) -> None:
        self.kill()
        self._start()

    def ask_all(self, most: Sequence[int | None] = (None,) * len(ASKED)) -> list[Client]:
        """Send a request for each limit in `most`, over all of `ASKED` in turn."""
        requests = itertools.cycle(ASKED)
        return [Client(self.port, *next(requests), limit) for limit in most]

    def whole(self) -> list[Client]:
        """Return the uninterrupted replies."""
        clients = self.ask_all()
        for client in clients:
            client.join()
            assert client.ended, client.text
        return clients

    def resumed_equal(self, client: Client, whole: Client) -> bool:
        """Resume a broken reply and return whether both parts are `whole`; prints those that are not."""
        rest = Client(self.port, f"/v1/replies/{client.name_of_reply}/resume", {"after": len(client.text)})
        rest.join()
        same = client.text + rest.text == whole.text and rest.calls == whole.calls and rest.ended
        if not same:
            print(f"{client.text!r} + {rest.text!r} {rest.calls!r} is not {whole.text!r} {whole.calls!r}", flush=True)
        return same


class Progress:
    """Counts results and prints a line for every 50."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._shown = title, total, 0
        self._began = time.perf_counter()
        self.results: Counter[str] = Counter()

    def add(self, result: str) -> None:
        self.results[result] += 1
        done = sum(self.results.values())
        if done % 50 == 0 or done == self._total:
            counts = ", ".join(f"{name} {count}" for name, count in sorted(self.results.items()))
            seconds = time.perf_counter() - self._began
            print(f"{self._title} {done}/{self._total}, {seconds:.0f} s: {counts}", flush=True)


def cut_clients(count: int, random: Random) -> Counter[str]:
    """Reset `count` connections at random characters and resume the replies on the same server."""
    progress = Progress("clients", count)
    with tempfile.TemporaryDirectory() as state:
        server = Server(state)
        try:
            expected = server.whole()
            while (missing := count - sum(progress.results.values())) > 0:
                lengths = [len(whole.text + whole.calls) for whole in expected * 2]
                clients = server.ask_all([random.randint(1, length) for length in lengths])
                for client in clients:
                    client.join()
                for client, whole in list(zip(clients, expected * 2, strict=True))[:missing]:
                    if client.ended:
                        progress.add("had ended")
                    else:
                        progress.add("equal" if server.resumed_equal(client, whole) else "different")
        finally:
            server.kill()
    return progress.results


def kill_servers(count: int, random: Random) -> Counter[str]:
    """Kill `count` servers while they reply; return the number of resumed replies that were equal and different."""
    progress = Progress("replies of killed servers", count * len(ASKED))
    with tempfile.TemporaryDirectory() as state:
        server = Server(state)
        try:
            server.whole()  # the first replies are slower
            began = time.perf_counter()
            expected = server.whole()
            seconds = time.perf_counter() - began
            for _ in range(count):
                clients = server.ask_all()
                while not any(client.name_of_reply for client in clients):
                    time.sleep(0.001)
                # Socket buffers hold more than a reply, so the bytes that a client has read do not show the progress.
                time.sleep(random.uniform(0, seconds))
                server.restart()
                for client, whole in zip(clients, expected, strict=True):
                    client.join()
                    if client.ended or not client.name_of_reply:
                        progress.add("had ended" if client.ended else "had not begun")
                    else:
                        progress.add("equal" if server.resumed_equal(client, whole) else "different")
        finally:
            server.kill()
    return progress.results


def cut_records(count: int, random: Random) -> Counter[str]:
    """Cut `count` records over all kinds; return the number of replies that were equal and different."""
    progress = Progress("records", count)
    loaded = load_pico()
    for place, kind in enumerate(KINDS):
        with tempfile.TemporaryDirectory() as folder:
            engine = engine_for(loaded, kind)
            whole = record_whole(engine, requests(loaded, kind), Path(folder))
            for _ in range(count // len(KINDS) + (place < count % len(KINDS))):
                engine.forget()
                same = resumed_after_kill(engine, whole, Path(folder), random) == list(whole.tokens)
                progress.add(f"{kind} {'equal' if same else 'different'}")
    return progress.results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=0)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = Random(options.seed)
    counts = Counter[str]()
    for count, measure in ((options.cuts, cut_records), (options.clients, cut_clients), (options.kills, kill_servers)):
        if count:
            counts += measure(count, random)
    raise SystemExit(any("different" in name for name in counts))


if __name__ == "__main__":
    main()
