"""Check that costly requests are answered within a memory limit and do not delay concurrent requests."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.bombs import BOMBS, doubling
from tests.support.grids import chosen
from tests.support.neighbours import Attack, ServerProcess, server_process

WAIT = 2.0  # seconds until a concurrent request has two tokens
MEMORY = 1 << 30  # memory growth of server and workers
SIZE = (4 << 20) - 1000
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
AMBIGUOUS = 'start: a\na: "x" | a a a | a a | b\nb: a b a | "x"'


def repeated(before: str, item: str, after: str) -> bytes:
    """Return a body of 4 MiB with a list that repeats one item."""
    others = (SIZE - len(before) - len(after)) // (len(item) + 1) - 1
    return (before + f"{item}," * others + item + after).encode()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, **fields}


def schema(value: Any) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"schema": value}})


def regex(pattern: str) -> dict[str, Any]:
    return chat(response_format={"type": "regex", "regex": pattern})


def keys(count: int) -> str:
    return json.dumps({f"k{index}": "" for index in range(count)})


# The expected status; 0 accepts a reply or a refusal.
ATTACKS: dict[str, tuple[Attack, int]] = {
    **{f"schema {name}": (Attack(CHAT, schema(bomb())), 400) for name, bomb in BOMBS.items()},
    "schema allOf 40, 8 times": (Attack(CHAT, schema(doubling(40, "allOf")), 8), 400),
    "schema allOf 13, 8 times": (Attack(CHAT, schema(doubling(13, "allOf")), 8), 0),
    "schema minItems 10^9": (Attack(CHAT, schema({"type": "array", "items": {}, "minItems": 10**9})), 0),
    "schema maxItems 10^9": (
        Attack(CHAT, schema({"type": "array", "items": {"type": "object"}, "maxItems": 10**9})),
        0,
    ),
    "schema of 3,000 properties": (
        Attack(CHAT, schema({"type": "object", "properties": {f"p{i}": {} for i in range(3000)}})),
        0,
    ),
    "pattern ((a{1000}){1000}){1000}": (
        Attack(CHAT, schema({"type": "string", "pattern": "((a{1000}){1000}){1000}"})),
        0,
    ),
    "regex ((a?){30}){30}…": (Attack(CHAT, regex("((((a?){30}){30}){30}){30}"), 4), 0),
    "lark ambiguous": (Attack(CHAT, chat(response_format={"type": "lark", "lark": AMBIGUOUS})), 0),
    "prompt of -1": (Attack(TEXT, repeated('{"prompt":[', "-1", "]}")), 400),
    "prompt of lists": (Attack(TEXT, repeated('{"prompt":[', "[]", "]}")), 400),
    "prompts of one letter": (Attack(TEXT, repeated('{"prompt":[', '"a"', "]}")), 400),
    "content of numbers": (Attack(CHAT, repeated('{"messages":[{"role":"user","content":[', "0", "]}]}")), 400),
    "stop": (Attack(CHAT, repeated('{"messages":[{"role":"user"}],"stop":[', "1", "]}")), 400),
    "logit_bias": (Attack(TEXT, f'{{"prompt":"a","logit_bias":{keys(200_000)}}}'.encode()), 400),
    "Responses input": (Attack("/v1/responses", repeated('{"input":[', "0", "]}")), 400),
    "Anthropic messages": (Attack("/v1/messages", repeated('{"max_tokens":1,"messages":[', "0", "]}")), 400),
    "Anthropic system": (Attack("/v1/messages", repeated('{"max_tokens":1,"messages":[],"system":[', "0", "]}")), 400),
    "tokens": (Attack("/detokenize", repeated('{"tokens":[', "-1", "]}")), 400),
    "tokenize 4 MiB": (Attack("/tokenize", {"prompt": "a" * SIZE}), 200),
    "tokenize 4 MiB, 4 times": (Attack("/tokenize", {"prompt": "a b " * (SIZE // 4)}, 4), 200),
    "apply-template 4 MiB": (Attack("/apply-template", {"messages": [{"role": "user", "content": "a" * SIZE}]}), 0),
    "chat of 4 MiB": (Attack(CHAT, chat(messages=[{"role": "user", "content": "word " * (SIZE // 5)}])), 400),
}
QUICK = ("schema allOf 40, 8 times", "prompt of -1", "prompts of one letter", "logit_bias")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process() as process:
        yield process


@pytest.mark.parametrize("name", chosen(ATTACKS, QUICK))
def test_a_neighbour_of_a_costly_request_is_answered(server: ServerProcess, name: str) -> None:
    attack, status = ATTACKS[name]
    outcome = server.suffer(attack)
    print(outcome.row(name))
    assert set(outcome.statuses) <= ({status} if status else {200, 400, 500}) and outcome.statuses
    assert outcome.wait < WAIT and outcome.grown < MEMORY, outcome.row(name)
