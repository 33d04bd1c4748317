"""Rewrites a schema as clients write it to the words of JSON Schema: types, lengths, parts that state nothing."""

import json
import re
from collections.abc import Mapping
from typing import Any

MERGED_LISTS = ("allOf", "anyOf", "oneOf")
SCHEMA_LISTS = (*MERGED_LISTS, "prefixItems", "items")
SCHEMA_MAPS = ("properties", "patternProperties")
DEFINITIONS = ("$defs", "definitions")
PROPERTY_COUNTS = ("minProperties", "maxProperties")
JSON_TYPES = frozenset(("string", "number", "integer", "boolean", "array", "object", "null"))
_DATA = ("enum", "const", "default", "examples")  # what they hold is no schema
# Types in Python's words, as tools of benchmarks and agents have them.
_PYTHON_TYPES = dict(
    str="string", float="number", int="integer", bool="boolean", list="array", tuple="array", dict="object"
)
_ANY_TYPES = ("", "any", "type_unspecified")  # the last one is Gemini's
_LENGTHS = ("minItems", "maxItems", "minLength", "maxLength", *PROPERTY_COUNTS)
_DIGITS = re.compile(r"[0-9]{1,18}")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?")
_STRINGS = ("pattern", "format", "$ref")
_LISTS = (*MERGED_LISTS, "prefixItems", "enum", "required")


def normalize_schema(node: Any) -> Any:
    """Return a schema in which what clients write in other ways is written as in JSON Schema.

    Null is the value of no keyword but `const` and annotations: Go and others write it for a field that is not set. PHP
    and Lua write an empty object as a list, or the reverse. Gemini has types in capitals and numbers in strings.
    OpenAPI 3.0 writes `nullable` for null among the types. Tools written by hand have one name where a list belongs,
    and numbers and booleans in strings.
    """
    if not isinstance(node, Mapping):
        return node
    result: dict[str, Any] = {}
    for key, value in node.items():
        if key in (*SCHEMA_MAPS, *DEFINITIONS) and isinstance(value, Mapping):
            result[key] = {name: _part(part) for name, part in value.items()}
        elif key in SCHEMA_LISTS and isinstance(value, list):
            result[key] = [_part(part) for part in value]
        elif key == "type":
            kinds = [_type(kind) for kind in value] if isinstance(value, list) else _type(value)
            result |= {} if kinds is None or (isinstance(kinds, list) and None in kinds) else {key: kinds}
        elif key in _LENGTHS:
            result |= {} if value is None else {key: _whole(value)}
        elif not _states_nothing(key, value):
            result[key] = _as_meant(key, value) if isinstance(value, str) else _inner(key, value)
    return _with_null(result) if result.pop("nullable", None) is True else result


def value_problem(key: str, value: Any) -> str:
    """Return why no keyword `key` has this value, whatever the type next to it; "" if it may."""
    if key in _STRINGS and not isinstance(value, str):
        return "must be a string"
    if key in _LENGTHS and (not isinstance(value, int) or value < 0):
        return "must be an integer of at least 0"
    if key in _BOUNDS and not isinstance(value, int | float):
        return "must be a number"
    if key == "multipleOf" and value <= 0:
        return "must be above 0"
    if key in _LISTS and not isinstance(value, list):
        return "must be a list"
    if key in SCHEMA_MAPS and not isinstance(value, Mapping):
        return "must be an object"
    if key == "type" and not all(isinstance(kind, str) for kind in (value if isinstance(value, list) else [value])):
        return "must be a string or a list of strings"
    return ""


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    kind, values = schema.get("type"), schema.get("enum")
    if isinstance(kind, str):
        schema["type"] = [kind, "null"]
    if isinstance(values, list) and None not in values:
        schema["enum"] = [*values, None]
    return schema


def _inner(key: str, value: Any) -> Any:
    return value if key in _DATA else normalize_schema(value)


def _as_meant(key: str, text: str) -> Any:
    if key in ("required", "enum"):
        return [text]
    if key == "additionalProperties":
        return {"true": True, "false": False}.get(text.lower(), text)
    return json.loads(text) if key in _BOUNDS and _NUMBER.fullmatch(text) else text


def _part(schema: Any) -> Any:
    return True if schema is None else normalize_schema(schema)


def _type(kind: Any) -> Any:
    # None: any type.
    if not isinstance(kind, str) or kind in JSON_TYPES:
        return kind
    lower = kind.lower()
    if lower in _ANY_TYPES:
        return None
    return lower if lower in JSON_TYPES else _PYTHON_TYPES.get(lower, kind)


def _whole(value: Any) -> Any:
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _states_nothing(key: str, value: Any) -> bool:
    if value is None:
        return key != "const"
    if key == "required":  # a boolean in a property is of the third draft
        return isinstance(value, bool) or value in ("true", "false") or (not isinstance(value, list) and not value)
    return key in (*SCHEMA_MAPS, *DEFINITIONS) and value == []
