"""Test the estimated cost of compiling a JSON schema."""

from typing import Any

import pytest

from mycli.runtime.sampling.grammars.json_schema import MAX_NODES, prepare


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


def test_a_reference_to_a_reference_is_merged_too() -> None:
    """The compiler copies what it merges, wherever that is."""
    definitions = {"a": {"$ref": "#/$defs/b"}, "b": {"enum": [*range(1000)]}}
    direct, indirect = (
        prepare({"type": "integer", "$ref": f"#/$defs/{name}", "$defs": definitions}, True, True).nodes
        for name in ("b", "a")
    )
    assert direct > 2000 and indirect > 2000
