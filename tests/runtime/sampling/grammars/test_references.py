"""Test that references follow a schema into another one."""

from typing import Any

import pytest

from mycli.runtime.sampling.grammars.references import References, relocated


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


@pytest.mark.parametrize("reference", ["http://a/c#base", "http://a/c#/$defs/x", "c#base"])
def test_a_reference_to_another_document_has_no_target(reference: str) -> None:
    schema = {"$id": "http://a/b", "$defs": {"x": {"$anchor": "base"}}}
    assert References(schema).find(reference) is None
    assert References({"$defs": schema["$defs"]}).find(reference) is None
