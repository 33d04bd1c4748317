"""Finds the targets of references inside a JSON schema."""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")  # in a list (RFC 6901, section 4)
_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # by names, not keywords
_DATA = ("enum", "const", "default", "examples")


def relocated(node: Any, pointer: str, names: bool = False) -> Any:
    """Return a schema with the references to itself as they must be at the JSON pointer `pointer` of another one.

    names: the keys of `node` are names of properties or definitions.
    """
    if isinstance(node, list):
        return [relocated(part, pointer) for part in node]
    if not isinstance(node, Mapping):
        return node
    result: dict[str, Any] = {}
    for key, value in node.items():
        if key == "$ref" and not names and isinstance(value, str) and (value == "#" or value[:2] == "#/"):
            result[key] = f"#{pointer}{value[1:]}"
        elif names or key not in _DATA:
            result[key] = relocated(value, pointer, key in _MAPS and not names)
        else:
            result[key] = value
    return result


def quoted(reference: str) -> str:
    """Return a URI reference with the characters of type and property names that a URI cannot have encoded."""
    return quote(_PERCENT.sub("%25", reference), safe="#/%:?@!$&'()*+,;=~")


class References:
    """The references of the schema `root`: JSON pointers and anchors, alone or after the schema's own `$id`."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        identifier = root.get("$id")
        self._base = urldefrag(identifier)[0] if isinstance(identifier, str) else ""

    def find(self, reference: Any) -> Any:
        """Return the target of a reference, None if it is not inside the schema."""
        fragment = self._fragment(reference) if isinstance(reference, str) else None
        if fragment is None or (fragment and fragment[0] != "/"):
            return self._anchors.get(fragment)
        node: Any = self._root
        for part in fragment.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and key in node:
                node = node[key]
            elif isinstance(node, list) and _INDEX.fullmatch(key) and int(key) < len(node):
                node = node[int(key)]
            else:
                return None
        return node

    def _fragment(self, reference: str) -> str | None:
        if reference[:1] == "#":
            return unquote(reference[1:])
        try:
            place, fragment = urldefrag(urljoin(self._base, reference))
        except ValueError:
            return None
        return unquote(fragment) if self._base and place == self._base else None

    @cached_property
    def _anchors(self) -> Mapping[str | None, Any]:
        return {node["$anchor"]: node for node in _mappings(self._root) if isinstance(node.get("$anchor"), str)}


def _mappings(node: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(node, Mapping):
        yield node
        node = list(node.values())
    for part in node if isinstance(node, list) else ():
        yield from _mappings(part)
