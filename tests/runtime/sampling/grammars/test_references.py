"""Test that references follow a schema into another one."""

from typing import Any

from mycli.runtime.sampling.grammars.references import relocated


def test_references_to_the_schema_itself_follow_it() -> None:
    schema: dict[str, Any] = {
        "properties": {"$ref": {"$ref": "#/$defs/a"}, "const": {"items": [{"$ref": "#"}]}},
        "const": {"$ref": "#/x"},
        "$defs": {"a": {"$ref": "https://example.com/#/x"}, "b": {"not": {"$ref": "#/$defs/a"}}},
    }
    assert relocated(schema, "/properties/arguments") == {
        "properties": {
            "$ref": {"$ref": "#/properties/arguments/$defs/a"},
            "const": {"items": [{"$ref": "#/properties/arguments"}]},
        },
        "const": {"$ref": "#/x"},
        "$defs": {
            "a": {"$ref": "https://example.com/#/x"},
            "b": {"not": {"$ref": "#/properties/arguments/$defs/a"}},
        },
    }
