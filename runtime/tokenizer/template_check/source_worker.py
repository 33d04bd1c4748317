"""The worker process that parses the source of a template and reports what it uses."""

import string
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import TemplateSyntaxError, nodes

from mycli.runtime.tokenizer.chat_template_worker import arguments_read, environment

# Directives of strftime that change within a day.
_TIMES = frozenset("HIMSpfTRrXcsk")


def handler(_: object) -> Callable[[str], dict[str, Any]]:
    """Return the handler of a source: {"findings": [[code, data], ...], "variables": [name, ...]}."""
    jinja = environment()

    def check(source: str) -> dict[str, Any]:
        try:
            tree = jinja.parse(source)
            jinja.compile(source)  # unknown filters and tests are found here
        except TemplateSyntaxError as error:
            return {"findings": [["syntax", {"line": error.lineno, "cause": str(error.message)}]], "variables": []}
        return {"findings": list(_findings(tree)), "variables": arguments_read(tree)}

    return check


def _findings(tree: nodes.Template) -> Iterator[tuple[str, dict[str, Any]]]:
    seen = set[tuple[str, str]]()
    for code, value, line in _uses(tree):
        if (code, value) not in seen:
            seen.add((code, value))
            yield code, {"line": line, "value": value}


def _uses(tree: nodes.Template) -> Iterator[tuple[str, str, int]]:
    for attribute in tree.find_all(nodes.Getattr):
        if attribute.attr.startswith("_"):
            yield "private-attribute", attribute.attr, attribute.lineno
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Const) and str(item.arg.value).startswith("__"):
            yield "private-attribute", str(item.arg.value), item.lineno
    for statement in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        yield "other-file", type(statement).__name__.lower(), statement.lineno
    for used in tree.find_all(nodes.Filter):
        if used.name == "random":
            yield "random", used.name, used.lineno
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == "strftime_now":
            written = call.args[0].value if call.args and isinstance(call.args[0], nodes.Const) else ""
            yield "time-of-day" if _has_time(str(written)) else "date", str(written), call.lineno


def _has_time(written: str) -> bool:
    # The letter after each percent sign, without the flags of glibc such as %-d.
    letters = {part.lstrip("-_0^#" + string.digits)[:1] for part in written.replace("%%", "").split("%")[1:]}
    return bool(letters & _TIMES)
