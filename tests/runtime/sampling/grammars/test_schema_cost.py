"""Test the estimated cost of compiling a JSON schema."""

from typing import Any

import pytest

from mycli.runtime.sampling.grammars.json_schema import MAX_ALTERNATIVES, MAX_NODES, prepare

EITHER: dict[str, Any] = {"anyOf": [{"enum": [1, 2]}, {"enum": [3]}]}  # 3 and 2 nodes, and a root for each
ENUM = {"enum": [1, 2, 3]}
REFERENCE = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("schema", "nodes"),
    [
        ({"type": ["string", "null"], "examples": ["a"] * MAX_NODES}, 1),
        ({"type": "object", "required": ["a", "b"]}, 3),
        ({"properties": {"required": {}}}, 2),
    ],
    ids=["annotations", "required", "property"],
)
def test_names_cost_nodes_and_annotations_do_not(schema: dict[str, Any], nodes: int) -> None:
    assert prepare(schema, strict=False, closed=True).nodes == nodes


@pytest.mark.parametrize(
    ("schema", "nodes"),
    [
        (EITHER, 7),
        ({"allOf": [EITHER, EITHER]}, 4 + 2 * 7 + 2 * 7),
        ({"allOf": [EITHER, ENUM]}, 2 + 7 + 2 * 4),
        ({"allOf": [ENUM, EITHER]}, 2 + 7 + 2 * 4),
        ({"type": "array", "prefixItems": [EITHER, {}], "items": EITHER}, 1 + 7 + 1 + 7),
        ({"allOf": [{"$ref": "#"}, {}]}, 2 + 4 + 1),
        ({"properties": 5, "$ref": 5}, 2),
    ],
    ids=["either", "both", "first", "second", "items", "recursive", "wrong"],
)
def test_each_alternative_of_a_merged_schema_costs_a_copy_of_the_others(schema: dict[str, Any], nodes: int) -> None:
    assert prepare(schema, strict=False, closed=True).nodes == nodes


@pytest.mark.parametrize(
    ("schema", "nodes"),
    [
        ({"type": "object", **REFERENCE}, 2 + 7),
        ({"title": "T", **REFERENCE}, 1 + 1),
        ({"properties": {"x": REFERENCE}, "required": ["x"]}, 1 + 2 + 1),
        ({"type": "array", "prefixItems": [REFERENCE], "items": REFERENCE}, 1 + 2 + 2),
        ({"allOf": [REFERENCE]}, 2 + 2 + 7),
        ({"anyOf": [REFERENCE, {}]}, 2 + 2 + 1),
        ({"type": "array", "anyOf": [REFERENCE]}, 2 + 2 + 7),
    ],
    ids=["next to a type", "title", "property", "items", "allOf", "anyOf", "merged anyOf"],
)
def test_a_reference_costs_its_target_where_it_is_merged(schema: dict[str, Any], nodes: int) -> None:
    definition = prepare(EITHER, strict=False, closed=True).nodes
    assert prepare({**schema, "$defs": {"a": EITHER}}, strict=False, closed=True).nodes == nodes + definition


def test_the_largest_schema_has_as_many_alternatives_as_the_limit() -> None:
    prepare({"allOf": [{"anyOf": [{}] * MAX_ALTERNATIVES}]}, strict=True, closed=True)
    with pytest.raises(ValueError, match=f"#/allOf/0/anyOf: more than {MAX_ALTERNATIVES} combinations"):
        prepare({"allOf": [{"anyOf": [{}] * (MAX_ALTERNATIVES + 1)}]}, strict=True, closed=True)


def test_a_reference_to_a_reference_is_merged_too() -> None:
    """The compiler copies what it merges, wherever that is."""
    definitions = {"a": {"$ref": "#/$defs/b"}, "b": {"enum": [*range(1000)]}}
    direct, indirect = (
        prepare({"type": "integer", "$ref": f"#/$defs/{name}", "$defs": definitions}, True, True).nodes
        for name in ("b", "a")
    )
    assert direct > 2000 and indirect > 2000


@pytest.mark.parametrize(
    ("part", "patterns"),
    [
        ({"type": "string"}, False),
        ({"pattern": "a"}, True),
        ({"patternProperties": {"a": {}}}, True),
        ({"multipleOf": 2}, True),
    ],
    ids=["none", "pattern", "names", "number"],
)
def test_expressions_have_a_cost_that_nodes_do_not_show(part: dict[str, Any], patterns: bool) -> None:
    assert prepare({"items": part}, strict=True, closed=True).patterns == patterns
