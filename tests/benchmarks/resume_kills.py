"""Checks that replies killed and resumed are complete: the client's part plus the resumed part equal the whole reply.

    python -m tests.benchmarks.resume_kills --cuts 1000 --kills 100

`--cuts`: records cut at a random byte, as kill -9 leaves them, resumed by another engine of this process, alternately
greedy, sampled, with a schema, with drafts, preempted and with log-probabilities. `--kills`: servers killed with
SIGKILL while they send eight replies (sampled, greedy, schema, tools, n-gram drafts; OpenAI's and Anthropic's
interfaces), which the next server resumes. Exits with 1 if any reply differs.
"""

import argparse
import http.client
import json
import os
import subprocess
import tempfile
import threading
import time
from collections import Counter
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
    """Reads one streamed reply until it ends or the server is gone."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.port, self.path, self.body = port, path, body
        self.name_of_reply, self.text, self.calls, self.ended = "", "", "", False
        self.start()

    def run(self) -> None:
        with suppress(OSError, http.client.HTTPException, ValueError):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
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

    def _take(self, event: dict[str, Any]) -> None:
        self.name_of_reply = self.name_of_reply or event.get("id") or event.get("message", {}).get("id", "")
        text, calls = text_of(event)
        self.text += text
        self.calls += calls


def start(environment: dict[str, str]) -> tuple[subprocess.Popen[str], int]:
    """Start a server of pico that drafts by n-gram lookup; return the process and its port."""
    child = subprocess.Popen(
        [*COMMAND, "serve", "pico", "--port", "0", "--ctx", "512", "--draft", "ngram", "--threads", "1", "-q"],
        env=environment,
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    return child, int(child.stdout.readline().split(":")[2].split()[0])


def ask_all(port: int) -> list[Client]:
    return [Client(port, path, body) for path, body in ASKED]


def real_kills(count: int, random: Random) -> Counter[str]:
    """Kill `count` servers while they reply; return the number of resumed replies that were equal and different."""
    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as state:
        environment = {**os.environ, "XDG_STATE_HOME": state}
        child, port = start(environment)
        for _ in range(2):  # the first replies are slower
            began = time.perf_counter()
            expected = ask_all(port)
            for client in expected:
                client.join()
                assert client.ended, client.text
        seconds = time.perf_counter() - began
        for number in range(count):
            clients = ask_all(port)
            while not any(client.name_of_reply for client in clients):
                time.sleep(0.001)
            # Socket buffers hold more than a reply, so the bytes a client has read do not show the server's progress.
            time.sleep(random.uniform(0, seconds))
            child.kill()
            child.wait()
            for client in clients:
                client.join()
            child, port = start(environment)
            for client, whole in zip(clients, expected, strict=True):
                if client.ended or not client.name_of_reply:
                    results["had ended" if client.ended else "had not begun"] += 1
                    continue
                path = f"/v1/replies/{client.name_of_reply}/resume"
                rest = Client(port, path, {"after": len(client.text)})
                rest.join()
                same = client.text + rest.text == whole.text and rest.calls == whole.calls and rest.ended
                results["equal" if same else "different"] += 1
                if not same:
                    print(f"kill {number}: {client.text!r} + {rest.text!r} is not {whole.text!r}", flush=True)
        child.kill()
        child.wait()
    return results


def cuts(count: int, random: Random) -> Counter[str]:
    """Cut `count` records over all kinds; return the number of replies that were equal and different."""
    results: Counter[str] = Counter()
    loaded = load_pico()
    for place, kind in enumerate(KINDS):
        with tempfile.TemporaryDirectory() as folder:
            engine = engine_for(loaded, kind)
            whole = record_whole(engine, requests(loaded, kind), Path(folder))
            for _ in range(count // len(KINDS) + (place < count % len(KINDS))):
                engine.forget()
                same = resumed_after_kill(engine, whole, Path(folder), random) == list(whole.tokens)
                results[f"{kind}: {'equal' if same else 'different'}"] += 1
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = Random(options.seed)
    results = cuts(options.cuts, random) if options.cuts else Counter[str]()
    print("cuts:", dict(results), flush=True)
    killed = real_kills(options.kills, random) if options.kills else Counter[str]()
    print("replies of killed servers:", dict(killed))
    raise SystemExit(any("different" in name for name in (*results, *killed)))


if __name__ == "__main__":
    main()
