"""Check that costly requests are answered within a memory limit and do not delay concurrent requests."""

import gzip
import json
from collections.abc import Callable, Iterator
from functools import partial
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


def levels(depth: int) -> dict[str, Any]:
    levels: dict[str, Any] = {"n0": {"type": "integer"}}
    for level in range(depth):
        inner = {"$ref": f"#/$defs/n{level}"}
        parts = [{"type": "array", "items": inner}, {"type": "object", "properties": {"p": inner}}]
        levels[f"n{level + 1}"] = {"anyOf": parts}
    return levels


def tools(count: int, properties: int) -> list[Any]:
    described = {f"p{index}": {"type": "string", "pattern": "[a-z]{1,90}"} for index in range(properties)}
    return [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object", "properties": described}}}
        for i in range(count)
    ]


def head(length: str) -> bytes:
    return f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{length}\r\n\r\n".encode()


def _schema_attack(bomb: Callable[[], Any]) -> Attack:
    return Attack(CHAT, schema(bomb()))


CIRCLE = {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}, "b": {"allOf": [{"$ref": "#/$defs/b"}, {"type": "object"}]}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 900}}
DEEP = b"[" * 20_000 + b"]" * 20_000
RULES = "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1} | "b"' for i in range(20_000)) + '\nr20000 ::= "c"'
CALLS = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in range(100)]
CHUNKED = head("transfer-encoding: chunked")
PIPELINED = head("content-length: 2") + b"{}"


# Built when it is sent, since bodies have megabytes, and the expected status; 0 accepts a reply or a refusal.
ATTACKS: dict[str, tuple[Callable[[], Attack], int]] = {
    **{f"schema {name}": (partial(_schema_attack, bomb), 400) for name, bomb in BOMBS.items()},
    "schema allOf 40, 8 times": (lambda: Attack(CHAT, schema(doubling(40, "allOf")), 8), 400),
    "schema allOf 13, 8 times": (lambda: Attack(CHAT, schema(doubling(13, "allOf")), 8), 0),
    "schema minItems 10^9": (lambda: Attack(CHAT, schema({"type": "array", "items": {}, "minItems": 10**9})), 0),
    "schema maxItems 10^9": (
        lambda: Attack(CHAT, schema({"type": "array", "items": {"type": "object"}, "maxItems": 10**9})),
        0,
    ),
    "schema of 3,000 properties": (
        lambda: Attack(CHAT, schema({"type": "object", "properties": {f"p{i}": {} for i in range(3000)}})),
        400,
    ),
    "pattern ((a{1000}){1000}){1000}": (
        lambda: Attack(CHAT, schema({"type": "string", "pattern": "((a{1000}){1000}){1000}"})),
        0,
    ),
    "regex ((a?){30}){30}…": (lambda: Attack(CHAT, regex("((((a?){30}){30}){30}){30}"), 4), 0),
    "lark ambiguous": (lambda: Attack(CHAT, chat(response_format={"type": "lark", "lark": AMBIGUOUS})), 0),
    "prompt of -1": (lambda: Attack(TEXT, repeated('{"prompt":[', "-1", "]}")), 400),
    "prompt of lists": (lambda: Attack(TEXT, repeated('{"prompt":[', "[]", "]}")), 400),
    "prompts of one letter": (lambda: Attack(TEXT, repeated('{"prompt":[', '"a"', "]}")), 400),
    "content of numbers": (lambda: Attack(CHAT, repeated('{"messages":[{"role":"user","content":[', "0", "]}]}")), 400),
    "stop": (lambda: Attack(CHAT, repeated('{"messages":[{"role":"user"}],"stop":[', "1", "]}")), 400),
    "logit_bias": (lambda: Attack(TEXT, f'{{"prompt":"a","logit_bias":{keys(200_000)}}}'.encode()), 400),
    "Responses input": (lambda: Attack("/v1/responses", repeated('{"input":[', "0", "]}")), 400),
    "Anthropic messages": (lambda: Attack("/v1/messages", repeated('{"max_tokens":1,"messages":[', "0", "]}")), 400),
    "Anthropic system": (
        lambda: Attack("/v1/messages", repeated('{"max_tokens":1,"messages":[],"system":[', "0", "]}")),
        400,
    ),
    "tokens": (lambda: Attack("/detokenize", repeated('{"tokens":[', "-1", "]}")), 400),
    "tokenize 4 MiB": (lambda: Attack("/tokenize", {"prompt": "a" * SIZE}), 200),
    "tokenize 4 MiB, 4 times": (lambda: Attack("/tokenize", {"prompt": "a b " * (SIZE // 4)}, 4), 200),
    "apply-template 4 MiB": (
        lambda: Attack("/apply-template", {"messages": [{"role": "user", "content": "a" * SIZE}]}),
        0,
    ),
    "chat of 4 MiB": (lambda: Attack(CHAT, chat(messages=[{"role": "user", "content": "word " * (SIZE // 5)}])), 400),
}
ATTACKS |= {
    "pattern of nested quantifiers": (
        lambda: Attack(CHAT, schema({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]+$"})),
        0,
    ),
    "regex (x+x+)+y of classes": (lambda: Attack(CHAT, regex(r"((\p{L}{1,400})+\p{L}{1,400}){1,400}y")), 0),
    "schema of references in a circle": (lambda: Attack(CHAT, schema({"$ref": "#/$defs/a", "$defs": CIRCLE})), 0),
    "schema that contains itself in allOf": (lambda: Attack(CHAT, schema({"$ref": "#/$defs/b", "$defs": CIRCLE})), 0),
    "schema minLength 10^9": (lambda: Attack(CHAT, schema({"type": "string", "minLength": 10**9}), 4), 0),
    "schema of 60 nested anyOf": (lambda: Attack(CHAT, schema({"$ref": "#/$defs/n60", "$defs": levels(60)})), 0),
    "schema of 4,000 anyOf": (
        lambda: Attack(CHAT, schema({"anyOf": [{"properties": {"a": {"const": str(i)}}} for i in range(4000)]})),
        0,
    ),
    "enum of 3.6 MB": (lambda: Attack(CHAT, schema({"enum": [f"{i}{'x' * 1800}" for i in range(2000)]})), 0),
    "schema of numbers without end": (
        lambda: Attack(
            CHAT, schema({"type": "number", "multipleOf": 1e-300, "maximum": 10**400, "minimum": -1e308}), 4
        ),
        0,
    ),
    "128 tools of 100 properties": (lambda: Attack(CHAT, chat(tools=tools(128, 100), tool_choice="required"), 4), 0),
    "100,000 stop strings": (lambda: Attack(CHAT, chat(stop=[f"s{i}" for i in range(100_000)])), 400),
    "logit_bias of the vocabulary": (lambda: Attack(CHAT, chat(logit_bias={str(i): 1 for i in range(4096)}), 4), 0),
    "n of a billion": (lambda: Attack(CHAT, chat(n=10**9)), 400),
    "n of 64 with 20 logprobs": (
        lambda: Attack(CHAT, chat(n=64, logprobs=True, top_logprobs=20, max_tokens=64, ignore_eos=True)),
        200,
    ),
    **{
        f"n of 60, {count} times": (partial(Attack, CHAT, chat(n=60, max_tokens=64, ignore_eos=True), count), 200)
        for count in (2, 4)
    },
    "64 prompts of 1,400 tokens": (
        lambda: Attack(
            TEXT, {"prompt": [f"{i} " + "word " * 690 for i in range(64)], "max_tokens": 4, "ignore_eos": True}
        ),
        200,
    ),
    "prompt of 1,400 tokens, 64 times": (lambda: Attack(TEXT, {"prompt": "word " * 700, "max_tokens": 1}, 64), 200),
    "32 beams, twice": (
        lambda: Attack(
            TEXT, {"prompt": "The", "use_beam_search": True, "n": 32, "max_tokens": 40, "ignore_eos": True}, 2
        ),
        200,
    ),
    "4,000 images": (lambda: Attack(CHAT, chat(messages=[{"role": "user", "content": [IMAGE] * 4000}])), 400),
    "lone surrogates": (
        lambda: Attack(CHAT, b'{"messages":[{"role":"user","content":"' + b"\\ud800" * 600_000 + b'"}]}'),
        400,
    ),
    "compressed body": (
        lambda: Attack(
            CHAT, gzip.compress(b'{"messages": "' + b"a" * (1 << 28) + b'"}'), headers={"content-encoding": "gzip"}
        ),
        415,
    ),
    "50,000 unknown fields": (lambda: Attack(CHAT, chat(**{f"f{i}": 1 for i in range(50_000)})), 0),
    "300,000 unread parts": (
        lambda: Attack(
            CHAT, chat(messages=[{"role": "user", "content": "Hi", **{f"f{i}": 1 for i in range(300_000)}}])
        ),
        0,
    ),
    "template arguments": (
        lambda: Attack(CHAT, chat(chat_template_kwargs={"messages": ["x"] * 400_000, "range": 1, "namespace": {}})),
        0,
    ),
    "template arguments of 20,000 levels": (
        lambda: Attack(
            CHAT, b'{"messages":[{"role":"user","content":"Hi"}],"chat_template_kwargs":{"a":' + DEEP + b"}}"
        ),
        400,
    ),
    "grammar of 20,000 rules": (lambda: Attack(CHAT, chat(grammar=RULES)), 0),
    "grammar of counts in counts": (lambda: Attack(CHAT, chat(grammar='root ::= (("a"{0,999}){0,999}){0,999}'), 4), 0),
    "400 messages of 100 calls": (
        lambda: Attack(CHAT, chat(messages=[{"role": "assistant", "tool_calls": CALLS}] * 400)),
        400,
    ),
    "200 messages of 100 calls": (
        lambda: Attack(CHAT, chat(messages=[{"role": "assistant", "tool_calls": CALLS}] * 200)),
        0,
    ),
    "2,000 requests on one connection": (lambda: Attack(CHAT, pieces=[PIPELINED * 2000]), 0),
    "length of 4 MiB for 10 bytes": (
        lambda: Attack(CHAT, pieces=[head("content-length: 4000000") + b'{"messages'], copies=8),
        0,
    ),
    "length of 2 bytes for 20": (lambda: Attack(CHAT, pieces=[head("content-length: 2") + b"{}" * 10]), 0),
    "chunks of one byte": (
        lambda: Attack(CHAT, pieces=[CHUNKED, *[b"1\r\n \r\n"] * 300], pause=0.01),
        0,
    ),
    "400,000 chunks of one byte": (
        lambda: Attack(CHAT, pieces=[CHUNKED + b"1\r\n \r\n" * 400_000]),
        0,
    ),
}
QUICK = (
    *("schema allOf 40, 8 times", "prompt of -1", "prompts of one letter", "logit_bias"),
    *("schema of 3,000 properties", "compressed body", "400 messages of 100 calls", "400,000 chunks of one byte"),
    "n of 60, 2 times",
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process() as process:
        yield process


@pytest.mark.parametrize("name", chosen(ATTACKS, QUICK))
def test_a_neighbour_of_a_costly_request_is_answered(server: ServerProcess, name: str) -> None:
    build, status = ATTACKS[name]
    attack = build()
    outcome = server.suffer(attack)
    print(outcome.row(name))
    # A connection that ends within a request gets no answer.
    assert set(outcome.statuses) <= ({status} if status else {200, 400, 408})
    assert outcome.statuses or attack.pieces
    assert outcome.wait < WAIT and outcome.grown < MEMORY, outcome.row(name)
