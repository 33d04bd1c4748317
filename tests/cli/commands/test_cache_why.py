"""Test `mycli cache why`: two request bodies of any chat API, compared as the model's prompt."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Mycli


def chat(system: str) -> dict[str, Any]:
    return {"model": "pico", "messages": [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]}


def called(system: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "noon"}]
    body = chat(system)
    return {**body, "messages": [*body["messages"], *turns]}


TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
BODIES: dict[str, tuple[Any, Any]] = {
    "chat": (chat("Today is 2026-11-23."), chat("Today is 2026-11-24.")),
    "calls": (called("Today is 2026-11-23."), called("Today is 2026-11-24.")),
    "tools": tuple({**chat(f"Today is 2026-11-{day}."), "tools": TOOLS} for day in (23, 24)),
    "messages": tuple(
        {"model": "pico", "max_tokens": 9, "system": f"Today is 2026-11-{day}.", "messages": chat("")["messages"][1:]}
        for day in (23, 24)
    ),
    "responses": tuple(
        {"model": "pico", "instructions": f"Today is 2026-11-{day}.", "input": "Hi"} for day in (23, 24)
    ),
}


def compared(mycli: Mycli, folder: Path, first: Any, second: Any, *options: str) -> Any:
    paths = [folder / "a.json", folder / "b.json"]
    for path, body in zip(paths, (first, second), strict=True):
        path.write_text(body if isinstance(body, str) else json.dumps(body))
    return mycli("cache", "why", *map(str, paths), *options)


@pytest.mark.parametrize("kind", BODIES)
def test_the_cause_is_named(kind: str, mycli: Mycli, tmp_path: Path) -> None:
    first, second = BODIES[kind]
    found = json.loads(compared(mycli, tmp_path, first, second, "--json").stdout)
    assert found["causes"] == ["a date, time or number in the system prompt changed"]
    assert found["before"].endswith("2026-11-2") and (found["earlier"][0], found["later"][0]) == ("3", "4")
    assert "continues the first" in compared(mycli, tmp_path, first, first).stdout


def test_tools_with_an_input_schema_are_those_of_messages(mycli: Mycli, tmp_path: Path) -> None:
    tool = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
    bodies = [{"model": "pico", "max_tokens": 9, "messages": chat("")["messages"][1:], "tools": [tool]}] * 2
    done = compared(mycli, tmp_path, *bodies)
    assert done.returncode == 0 and "continues the first" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("first", "options", "cause"),
    [
        ("{", (), "not valid JSON"),
        ("[]", (), "not an object"),
        ({"messages": []}, (), "names no model"),
        ({"model": "", "messages": []}, (), "names no model"),
        ({"model": 5, "messages": []}, (), "names no model"),
        ({"messages": []}, ("--model", "pico"), "messages: must have 1 or more items"),
    ],
)
def test_mistakes(first: Any, options: tuple[str, ...], cause: str, mycli: Mycli, tmp_path: Path) -> None:
    done = compared(mycli, tmp_path, first, chat(""), *options)
    assert done.returncode == 2 and cause in done.stderr
