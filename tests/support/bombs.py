"""Builds schemas of a few kilobytes that take gigabytes or minutes to compile."""

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]


def doubling(depth: int, keyword: str, leaf: Schema | None = None) -> Schema:
    """Return a schema whose references are used twice at each level, so that 2^`depth` copies are merged."""
    definitions: Schema = {
        f"a{level}": {keyword: [{"$ref": f"#/$defs/a{level + 1}"}] * 2, "description": "twice"}
        for level in range(depth)
    }
    definitions[f"a{depth}"] = leaf or {"type": "string", "pattern": "^a"}
    return {"allOf": [{"$ref": "#/$defs/a0"}, {"type": "string"}], "$defs": definitions}


def _products() -> Schema:
    parts = [{"anyOf": [{"properties": {f"p{i}{j}": {"const": j}}} for j in range(8)]} for i in range(12)]
    return {"type": "object", "allOf": parts}


BOMBS: dict[str, Callable[[], Schema]] = {
    "allOf 20": lambda: doubling(20, "allOf"),
    "allOf 40": lambda: doubling(40, "allOf"),
    "anyOf 40": lambda: doubling(40, "anyOf"),
    "oneOf 40": lambda: doubling(40, "oneOf"),
    "anyOf in allOf": _products,
    "enum": lambda: {"enum": list(range(30_000))},
}
