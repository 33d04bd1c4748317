"""Prepares a JSON schema for the grammar compiler: bounds its cost, names unsupported keywords, closes objects.

Closing: where a schema names properties and has no `additionalProperties`, a reply has no others. By the letter of JSON
Schema any name may follow, which small models do until the context is full. An explicit `additionalProperties` and an
object without named properties stay as they are. Integers without bounds get those of exact JSON integers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mycli.runtime.sampling.grammars.dialects import (
    DEFINITIONS,
    JSON_TYPES,
    MERGED_LISTS,
    PROPERTY_COUNTS,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    normalize_schema,
    value_problem,
)
from mycli.runtime.sampling.grammars.patterns import rust_pattern
from mycli.runtime.sampling.grammars.references import References, quoted

# Nodes of a schema, with references expanded where schemas are merged: allOf, and any other keyword next to a
# reference. The compiler merges by copying, so 40 references, each used twice, would need 2^40 nodes.
MAX_NODES = 20_000
MAX_ALTERNATIVES = 2_000  # of one merged schema: anyOf inside allOf multiplies
FREE_NODES = 500  # compiled within some ten milliseconds
# The largest integer that every JSON reader has exactly (RFC 8259, section 6); without a limit digits may never end.
LARGEST_INTEGER = (1 << 53) - 1
_BOUNDS = frozenset(
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const", "$ref")
)
_CHILDREN = ("items", "additionalItems", "additionalProperties")
_ANNOTATIONS = frozenset(
    ("$schema", "$id", "id", "$comment", "$anchor", "title", "description", "default", "examples", "deprecated")
    + ("readOnly", "writeOnly", "contentMediaType", "contentEncoding", *DEFINITIONS)
)
# Known to JSON Schema and not to the compiler. Without them a reply may break the schema, but has its shape.
UNSUPPORTED = frozenset(
    ("contains", "minContains", "maxContains", "uniqueItems", "dependentRequired", "dependentSchemas", "dependencies")
    + ("if", "then", "else", "not", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
    + ("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor")
)
# Values of these that restrict nothing; zod writes the names of a record, other generators defaults.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "propertyNames": (True, {}, {"type": "string"}),
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
}
STRING_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
# The dialects that the compiler knows. In any other, keywords mean what they do in the newest of these.
_DIALECT = re.compile(r"https?(://json-schema\.org/draft)(-0[467]|/2019-09|/2020-12)/schema#?")
# Bounds and lengths that the compiler can compute with: it reads bounds as fp64 and converts them to 64-bit integers.
_LARGEST_BOUNDS = 1024 - (1 << 63), (1 << 63) - 1
_LARGEST_NUMBER = 10**18
_ANY_NUMBER = 1.7e308
_LARGEST_LENGTH = (1 << 31) - 1
_SCALARS = ("string", "integer", "number", "boolean", "null")
_LEFT_OUT = object()
_OPTIONS = "x-guidance"  # options of the compiler inside a schema, which are not the client's to set


@dataclass(frozen=True)
class PreparedSchema:
    """A schema for the compiler; `loosened`: paths of keywords that were left out; `nodes`: its estimated cost.

    `fault`: path and problem of the first wrong value, which the compiler ignores or names without its path.
    `places`: the path of each regular expression in it, which the compiler parses.
    """

    schema: Mapping[str, Any]
    loosened: tuple[str, ...]
    nodes: int
    patterns: bool
    fault: str = ""
    places: Mapping[str, str] = field(default_factory=dict)


def prepare(schema: Mapping[str, Any], strict: bool, closed: bool) -> PreparedSchema:
    """Check and rewrite `schema`. strict: refuse unsupported keywords instead of leaving them out.

    Raises ValueError that names the path of a part which is too large or not supported, RecursionError.
    """
    schema = normalize_schema(schema)
    cost = _Cost(schema)
    nodes = cost.total()
    rewriter = _Rewriter(schema, strict, closed and not _has_inner_ids(schema), References(schema))
    rewritten = rewriter.rewrite()
    return PreparedSchema(rewritten, tuple(rewriter.loosened), nodes, cost.patterns, rewriter.fault, rewriter.places)


def count_values(schema: Any) -> int | None:
    """Return the number of scalar values in an object of `schema`; None if it does not bound them."""
    if not isinstance(schema, Mapping) or any(key in schema for key in ("$ref", "not", *MERGED_LISTS)):
        return None
    if "enum" in schema or "const" in schema or schema.get("type") in _SCALARS:
        return 1
    properties = schema.get("properties")
    if schema.get("type") != "object" or not isinstance(properties, Mapping) or schema.get("additionalProperties"):
        return None
    counts = [count_values(value) for value in properties.values()]
    return sum(count for count in counts if count is not None) if None not in counts else None


def _asserts(node: Mapping[str, Any]) -> int:
    # The number of keywords that restrict a value: two or more are merged.
    return sum(key not in _ANNOTATIONS for key in node)


def _has_inner_ids(schema: Any, inner: bool = False) -> bool:
    # An $id changes what the references inside it are relative to.
    if isinstance(schema, Mapping):
        return (inner and isinstance(schema.get("$id"), str)) or any(
            _has_inner_ids(value, True) for value in schema.values()
        )
    return isinstance(schema, list) and any(_has_inner_ids(value, True) for value in schema)


class _Cost:
    # Estimates nodes and alternatives of what the compiler builds.

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._references = root, References(root)
        self._expanded: dict[str, tuple[int, int]] = {}
        self._visits = 0
        self.patterns = False

    def total(self) -> int:
        return self._weigh(self._root, "#", False)[1]

    def _weigh(self, node: Any, path: str, merged: bool) -> tuple[int, int]:
        # (alternatives, nodes) of one schema.
        self._visits += 1
        if self._visits > MAX_NODES:
            raise ValueError(f"{path}: more than {MAX_NODES} nodes")
        if not isinstance(node, Mapping):
            return 1, 1
        self.patterns |= "pattern" in node or "patternProperties" in node or "multipleOf" in node
        merged |= _asserts(node) > 1
        alternatives, nodes = 1, 1
        for key, value in node.items():
            place = f"{path}/{key}"
            if key in (*SCHEMA_MAPS, *DEFINITIONS) and isinstance(value, Mapping):
                nodes += sum(self._weigh(part, f"{place}/{name}", False)[1] for name, part in value.items())
            elif key in MERGED_LISTS and isinstance(value, list):
                parts = [
                    self._weigh(part, f"{place}/{index}", merged or key == "allOf") for index, part in enumerate(value)
                ]
                if key == "allOf":
                    for part in parts:
                        alternatives, nodes = _merge((alternatives, nodes), part)
                        self._check(alternatives, nodes, place)
                else:
                    sums = sum(part[0] for part in parts), sum(part[1] for part in parts)
                    alternatives, nodes = _merge((alternatives, nodes), sums)
            elif key == "$ref":
                part = self._expand(value, place) if merged else (1, 1)
                alternatives, nodes = _merge((alternatives, nodes), part)
            elif key == "enum" and isinstance(value, list):
                alternatives, nodes = _merge((alternatives, nodes), (1, len(value)))
            elif isinstance(value, list) and key in SCHEMA_LISTS:
                nodes += sum(self._weigh(part, f"{place}/{index}", False)[1] for index, part in enumerate(value))
            elif key in _CHILDREN:
                nodes += self._weigh(value, place, False)[1]
            elif key == "required" and isinstance(value, list):
                nodes += len(value)
            self._check(alternatives, nodes, place)
        return alternatives, nodes

    def _expand(self, reference: Any, path: str) -> tuple[int, int]:
        if not isinstance(reference, str):
            return 1, 1
        if reference not in self._expanded:
            self._expanded[reference] = (1, 1)  # a reference to itself is not expanded again
            self._expanded[reference] = self._weigh(self._references.find(reference), reference, True)
        return self._expanded[reference]

    def _check(self, alternatives: int, nodes: int, path: str) -> None:
        if nodes > MAX_NODES:
            raise ValueError(f"{path}: more than {MAX_NODES} nodes with references expanded")
        if alternatives > MAX_ALTERNATIVES:
            raise ValueError(f"{path}: more than {MAX_ALTERNATIVES} combinations of alternatives")


def _merge(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    # Each alternative of one is merged with a copy of each of the other.
    return first[0] * second[0], first[1] * second[0] + second[1] * first[0]


@dataclass
class _Rewriter:
    root: Mapping[str, Any]
    strict: bool
    closed: bool
    references: References
    loosened: list[str] = field(default_factory=list)
    fault: str = ""
    places: dict[str, str] = field(default_factory=dict)
    _open: dict[str, str] = field(default_factory=dict)  # name of the open copy of a reference's target
    _copies: dict[str, Any] = field(default_factory=dict)

    def rewrite(self) -> Mapping[str, Any]:
        schema = {key: value for key, value in self.root.items() if key != _OPTIONS}
        rewritten = self._node(schema, "#", False)
        if rewritten is False:
            raise ValueError("#/not: nothing can match")
        if self._copies:
            return {**rewritten, "$defs": {**rewritten.get("$defs", {}), **self._copies}}
        return dict(rewritten)

    def _node(self, node: Any, path: str, merged: bool) -> Any:
        """`merged`: the node is combined with others, so it stays open: they may name further properties."""
        if not isinstance(node, Mapping):
            if not isinstance(node, bool):
                self._note(path, "must be an object, true or false")
            return node
        if "not" in node and node["not"] in ({}, True):
            return False  # as zod writes a property that must be absent
        combined = merged or _asserts(node) > 1
        result: dict[str, Any] = {}
        for key, value in node.items():
            place = f"{path}/{key}"
            self._note(place, value_problem(key, value))
            if key in DEFINITIONS and isinstance(value, Mapping):
                result[key] = {name: self._node(part, f"{place}/{name}", False) for name, part in value.items()}
            elif key in SCHEMA_MAPS and isinstance(value, Mapping):
                parts = {name: self._node(part, f"{place}/{name}", merged) for name, part in value.items()}
                result[key] = parts if key == "properties" else self._expressions(parts, place)
            elif key in SCHEMA_LISTS and isinstance(value, list):
                inner = merged if key in ("prefixItems", "items") else combined or (key == "allOf" and len(value) > 1)
                result[key] = [self._node(part, f"{place}/{index}", inner) for index, part in enumerate(value)]
            elif key in _CHILDREN:
                result[key] = self._node(value, place, merged)
            elif key == "$ref":
                result[key] = self._reference(value, combined)
            elif (readable := self._keyword(node, key, place)) is not _LEFT_OUT:
                result[key] = readable
        if self.closed and not merged:
            self._close(node, result)
            if node.get("type") == "integer" and not _BOUNDS.intersection(result):
                result |= {"minimum": -LARGEST_INTEGER, "maximum": LARGEST_INTEGER}
        if not merged and not _countable(result):
            for key in [key for key in PROPERTY_COUNTS if key in result]:
                del result[key]
                self._refuse(f"{path}/{key}", "is not supported where properties are optional")
        return result

    def _keyword(self, node: Mapping[str, Any], key: str, place: str) -> Any:
        # The compiler reads -2 as 2, and takes 0 next to a minimum.
        numeric = not (types := _types(node)) or any(kind in ("number", "integer") for kind in types)
        if key == "multipleOf" and numeric and (problem := value_problem(key, node[key])):
            raise ValueError(f"{place} {problem}")
        try:
            readable = _readable(node, key, node[key])
        except ValueError as error:
            self._refuse(place, str(error))
            return _LEFT_OUT
        if key == "pattern" and isinstance(readable, str):
            self.places.setdefault(readable, place)
        return readable

    def _expressions(self, parts: Mapping[str, Any], place: str) -> Mapping[str, Any]:
        try:
            translated = {rust_pattern(pattern): part for pattern, part in parts.items()}
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        self.places |= dict.fromkeys(translated, place)
        return translated

    def _note(self, place: str, problem: str) -> None:
        if problem and not self.fault:
            self.fault = f"{place} {problem}"

    def _refuse(self, place: str, problem: str) -> None:
        if self.strict:
            raise ValueError(f"{place}: {problem}")
        self.loosened.append(place)

    def _reference(self, reference: Any, combined: bool) -> Any:
        target = self.references.find(reference)
        if combined and self.closed and isinstance(target, Mapping):
            return self._open_copy(reference, target)
        return reference if target is None else quoted(reference)

    def _open_copy(self, reference: str, target: Mapping[str, Any]) -> str:
        if reference not in self._open:
            name = f"open-{len(self._open)}"
            self._open[reference] = name
            noted = len(self.loosened)
            self._copies[name] = self._node(target, reference, True)
            del self.loosened[noted:]  # the definition itself is rewritten, too
        return f"#/$defs/{self._open[reference]}"

    def _close(self, node: Mapping[str, Any], result: dict[str, Any]) -> None:
        names = self._names(node, set()) if "properties" in node or _asserts(node) > 1 or "allOf" in node else None
        if not names:
            return
        properties = result.get("properties")
        listed = dict(properties) if isinstance(properties, Mapping) else {}
        result["properties"] = {**listed, **{name: True for name in names if name not in listed}}
        result["additionalProperties"] = False

    def _names(self, node: Any, seen: set[str]) -> dict[str, None] | None:
        """Return the names of properties that `node` and what it is combined with mention; None: leave it open."""
        if not isinstance(node, Mapping):
            return {}
        if any(key in node for key in ("additionalProperties", "patternProperties", "const", "enum")):
            return None
        names: dict[str, None] = {}
        if isinstance(properties := node.get("properties"), Mapping):
            names |= dict.fromkeys(properties)
        if isinstance(required := node.get("required"), list):
            names |= dict.fromkeys(name for name in required if isinstance(name, str))
        parts: Sequence[Any] = [part for key in MERGED_LISTS if isinstance(node.get(key), list) for part in node[key]]
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            parts = [*parts, self.references.find(reference)]
        for part in parts:
            inner = self._names(part, seen)
            if inner is None or (not inner and _accepts_objects(part)):
                return None
            names |= inner
        return names


def _accepts_objects(node: Any) -> bool:
    # An alternative that names nothing and may be any object.
    if not isinstance(node, Mapping):
        return bool(node)
    kinds = node.get("type")
    return kinds is None or "object" in (kinds if isinstance(kinds, list) else [kinds])


def _countable(node: Mapping[str, Any]) -> bool:
    # The compiler counts optional properties only up to one, and only if there are no others than those with names.
    least, most = node.get("minProperties", 0), node.get("maxProperties")
    properties, required = node.get("properties"), node.get("required", [])
    if not isinstance(least, int) or not isinstance(most, int | None) or not isinstance(required, list):
        return True  # refused as invalid
    optional = isinstance(properties, Mapping) and any(name not in required for name in properties)
    if not optional or (least <= len(required) and most is None):
        return True
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    return closed and least - len(required) <= 1 and (most is None or most - len(required) == 1)


def _types(node: Mapping[str, Any]) -> Sequence[Any]:
    types = node.get("type")
    return types if isinstance(types, list) else () if types is None else (types,)


def _readable(node: Mapping[str, Any], key: str, value: Any) -> Any:
    """Return the value of a keyword of `node` as the compiler reads it, `_LEFT_OUT` if it restricts nothing.

    Raises ValueError if it is not supported.
    """
    if key in UNSUPPORTED:
        if value in _NEUTRAL.get(key, ()):
            return _LEFT_OUT
        raise ValueError("this keyword is not supported")
    if key == "type":
        for kind in _types(node):
            if isinstance(kind, str) and kind not in JSON_TYPES:
                raise ValueError(f"type {kind!r:.60} is not supported")
    if key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        return _bound(node, key, value)
    if key == "maxLength" and isinstance(value, int) and value > _LARGEST_LENGTH:
        return _LEFT_OUT
    if not isinstance(value, str):
        return value
    if key == "$schema":
        dialect = _DIALECT.fullmatch(value)
        return f"http{'' if dialect[2][0] == '-' else 's'}{dialect[1]}{dialect[2]}/schema" if dialect else _LEFT_OUT
    if key == "format":
        if not value or ((types := _types(node)) and "string" not in types):
            return _LEFT_OUT  # such as OpenAPI's int32
        if value in ("time", "date-time") and re.fullmatch(r"\^.*\$", str(node.get("pattern"))):
            return _LEFT_OUT  # zod writes them for times without a time zone or seconds, which only its pattern shows
        if value not in STRING_FORMATS:
            raise ValueError(f"format {value!r:.60} is not supported")
    if key == "pattern":
        return rust_pattern(value)
    return quoted(value) if key in ("$id", "id") else value


def _bound(node: Mapping[str, Any], key: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if abs(value) >= _ANY_NUMBER:
        return _LEFT_OUT
    integer = "integer" in _types(node) and "number" not in _types(node)
    low, high = _LARGEST_BOUNDS if integer else (-_LARGEST_NUMBER, _LARGEST_NUMBER)
    return max(value, low) if key in ("minimum", "exclusiveMinimum") else min(value, high)
