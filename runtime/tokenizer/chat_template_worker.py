"""The worker process that renders chat templates, the only place where a model's Jinja runs.

The environment is that of transformers 5.23: trim_blocks, lstrip_blocks, loop controls, tojson, raise_exception,
strftime_now and the generation tag; templates written for llama.cpp may change their own lists, too.
`runtime.utils.sandbox` limits time and memory.
"""

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import ExprStmtExtension, Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_OUTPUT = 1 << 23  # characters of a rendered conversation


class Refusal(TemplateError):
    """The template rejects the conversation (raise_exception)."""


class OutputTooLong(Exception): ...


def _refuse(message: object) -> None:
    raise Refusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(date_format: str) -> str:
    return datetime.now().strftime(date_format)


class _Generation(Extension):
    # {% generation %} marks the assistant's part for training; here its body is rendered as it is.

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    # dict(...) without the class, whose attributes lead out of the sandbox.

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    # Refuses underscore names, which reach Python's internals.

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not set {name!r} on a namespace")


class _Environment(ImmutableSandboxedEnvironment):
    # Templates in GGUF files (Kimi K2) keep queues of tool calls in lists, which transformers refuses and llama.cpp
    # does not. The lists of the conversation stay as they are, as does every other kind of value.

    fixed: frozenset[int] = frozenset()  # ids of the lists in the variables

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, list) and attr in ("append", "pop"):
            return id(obj) not in self.fixed
        return super().is_safe_attribute(obj, attr, value)


def _lists(value: Any) -> Iterator[int]:
    # Recursion is safe: the parser of the request limits its nesting.
    if isinstance(value, list):
        yield id(value)
    if isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _lists(item)


def environment() -> _Environment:
    """Return the environment in which templates are compiled."""
    extensions = [_Generation, LoopControlExtension, ExprStmtExtension]
    jinja = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    jinja.filters["tojson"] = _to_json
    jinja.globals |= {"raise_exception": _refuse, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
    return jinja


def arguments_read(tree: nodes.Template) -> list[str]:
    """Return the names of the variables that a template reads and does not set itself, without the globals."""
    names = meta.find_undeclared_variables(tree) - set(tree.environment.globals if tree.environment else ())
    # A variable that is set in one branch counts as undeclared in the others; it is an argument if the template
    # asks whether it is defined.
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    tested = {
        test.node.name
        for test in tree.find_all(nodes.Test)
        if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
    }
    return sorted(names - (stored - tested))


def handler(_: object) -> Callable[[Any], list[str]]:
    """Return the handler of {"template": source, "variables": [one object per text]}: the rendered texts.

    Without "variables" it returns the names of the template's arguments.
    """
    jinja = environment()
    compiled = lru_cache(4)(jinja.from_string)

    def render(request: dict[str, Any]) -> list[str]:
        if "variables" not in request:
            return arguments_read(jinja.parse(request["template"]))
        template = compiled(request["template"])
        texts = []
        for variables in request["variables"]:
            parts, length, jinja.fixed = [], 0, frozenset(_lists(variables))
            for part in template.generate(variables):
                length += len(part)
                if length > MAX_OUTPUT:
                    raise OutputTooLong(f"rendered more than {MAX_OUTPUT} characters")
                parts.append(part)
            texts.append("".join(parts))
        return texts

    return render
